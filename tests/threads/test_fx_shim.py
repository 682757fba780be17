"""The shim comes and goes without a trace, refuses what it doesn't know, and keeps PyTorch's own protection."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator

import pytest
import torch
from shim_state import Snapshot
from torch.nn.attention.flex_attention import flex_attention

from dflash_mp.threads import fx_shim, races, states
from dflash_mp.threads.fx_shim import FxShimError, install, isolated, uninstall
from dflash_mp.threads.inplace import Changes, UnknownLayout
from dflash_mp.threads.races import Elsewhere, tracing_symbolically

fx = torch.fx._symbolic_trace


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    torch.compile(lambda x: x, backend="eager")(torch.ones(1))  # Dynamo wraps Tracer.trace at the first compilation
    before = Snapshot()
    yield
    fx_shim.uninstall()
    assert before.changes() == []
    assert races.left_behind() == []


def test_every_object_is_restored() -> None:
    before = Snapshot()
    report = install()
    assert "made thread-local" in report.states.values()
    assert before.changes()
    assert uninstall()
    assert before.changes() == []
    assert not uninstall()


def test_functions_keep_their_identity_so_that_references_bound_before_follow() -> None:
    reader = fx.is_fx_symbolic_tracing
    with isolated(), Elsewhere(tracing_symbolically):
        assert reader is fx.is_fx_symbolic_tracing
        assert not reader()


def test_installing_twice_is_installing_once() -> None:
    first = install()
    code = fx.Tracer.trace
    assert install() is first
    assert fx.Tracer.trace is code
    assert uninstall()
    assert not fx_shim.installed()


def test_blocks_nest_and_the_outermost_removes_the_shim() -> None:
    with isolated() as outer:
        with isolated() as inner:
            assert inner is outer
        assert fx_shim.installed()
    assert not fx_shim.installed()


def test_a_block_leaves_what_install_installed() -> None:
    install()
    with isolated():
        pass
    assert fx_shim.installed()


def test_an_exception_in_the_block_removes_the_shim_and_goes_on() -> None:
    before = Snapshot()
    with pytest.raises(ZeroDivisionError), isolated():
        _ = 1 // 0
    assert before.changes() == []


def test_each_race_is_gone_under_the_shim() -> None:
    with isolated():
        assert {case.name: case.outcome() for case in races.CASES} == {case.name: case.isolated for case in races.CASES}


def test_a_thread_that_traces_and_calls_a_compiled_function_still_raises() -> None:
    expected = {case.name: "raises RuntimeError" for case in races.PROTECTION}
    assert {case.name: case.outcome() for case in races.PROTECTION} == expected
    with isolated():
        assert {case.name: case.outcome() for case in races.PROTECTION} == expected


def test_tracing_and_compiling_give_the_same_results_under_the_shim() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    x = torch.randn(2, 4)
    expected = model(x)
    with isolated():
        graph = torch.fx.symbolic_trace(model)
        assert torch.equal(graph(x), expected)
        compiled = torch.compile(model, backend="aot_eager", dynamic=False)
        compiled(x).sum().backward()
        assert model[0].weight.grad is not None
        assert torch.equal(compiled(x), expected)


def test_flex_attention_is_compiled_in_one_graph_under_the_shim() -> None:
    """Its traced code imports from `torch.compiler`, a module with thread-local names."""

    def doubled(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        return score * 2

    def attention(x: torch.Tensor) -> torch.Tensor:
        return flex_attention(x, x, x, score_mod=doubled)

    x = torch.randn(1, 1, 128, 16)
    with isolated():
        compiled = torch.compile(attention, backend="aot_eager", dynamic=False, fullgraph=True)
        assert torch.allclose(compiled(x), attention(x), atol=1e-5)
    assert torch.fx.traceback.current_meta == {}


def _asks_while_traced(x: torch.Tensor) -> torch.Tensor:
    import torch.fx.experimental.proxy_tensor  # noqa: F401
    import torch.fx.traceback as of_package
    from torch.compiler import is_compiling
    from torch.fx._symbolic_trace import Tracer  # noqa: F401

    return x + is_compiling() + 2 * of_package.has_preserved_node_meta()


def test_traced_code_may_import_from_what_was_changed() -> None:
    with isolated():
        compiled = torch.compile(_asks_while_traced, backend="eager", fullgraph=True)
        assert compiled(torch.zeros(1)).item() == 1
        assert _asks_while_traced(torch.zeros(1)).item() == 0
    assert compiled(torch.zeros(1)).item() == 1


def unknown(text: str) -> states.State:
    return states.State("planted", "", lambda: text, lambda changes, turn: None)


def test_an_unknown_layout_is_refused_with_the_reason_and_nothing_changes() -> None:
    before = Snapshot()
    with pytest.raises(FxShimError, match="unknown layout: it was moved") as raised:
        install(states=[*states.STATES, unknown("it was moved")])
    assert "separate processes" in raised.value.remedy
    assert before.changes() == []
    assert not fx_shim.installed()


@pytest.mark.parametrize("name", ["CURRENT_PATCHER", "_Patcher"])
def test_a_torch_without_what_the_shim_expects_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fx, name)
    before = Snapshot.__new__(Snapshot)
    before.modules = {fx: (type(fx), dict(vars(fx)))}
    with pytest.raises(FxShimError, match=r"unknown layout: torch\.fx\._symbolic_trace has no CURRENT_PATCHER"):
        install()
    assert dict(vars(fx)) == before.modules[fx][1]


def test_a_function_that_is_not_what_its_source_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    function = fx._Patcher.patch_method
    monkeypatch.setattr(function, "__code__", function.__code__.replace(co_name="patched_by_somebody"))
    before = Snapshot()
    with pytest.raises(FxShimError, match=r"_Patcher.patch_method is not what its source says"):
        install()
    assert before.changes() == []


def test_a_reader_that_cannot_be_followed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.fx.traceback
    reader = types.FunctionType((lambda: current_meta).__code__, vars(module))  # type: ignore[name-defined]  # noqa: F821
    reader.__module__, reader.__qualname__ = module.__name__, "reader"
    monkeypatch.setattr(module, "reader", reader, raising=False)
    before = Snapshot()
    with pytest.raises(FxShimError, match=r"torch\.fx\.traceback\.reader is not what its source says"):
        install()
    assert before.changes() == []


def test_a_part_that_fails_undoes_the_parts_before_it() -> None:
    def fails(changes: Changes, turn: object) -> None:
        raise UnknownLayout("planted")

    before = Snapshot()
    with pytest.raises(FxShimError, match="planted"):
        install(states=[*states.STATES, states.State("planted", "", lambda: states.GLOBAL, fails)])
    assert before.changes() == []


def test_a_failing_self_test_removes_the_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Snapshot()
    monkeypatch.setattr(races, "failures_under_shim", lambda: ["the sky fell"])
    with pytest.raises(FxShimError, match="does not work: the sky fell"):
        install()
    assert before.changes() == []


def test_the_self_test_notices_a_shim_without_one_of_its_parts() -> None:
    """Each part is needed where another thread can meet its state: leaving it out fails the self-test."""
    met = {case.state for case in races.CASES if not case.damages and case.outcome() != case.isolated}
    process_wide = [state for state in states.STATES if state.probe() == states.GLOBAL]
    parts = dict.fromkeys(state.isolate for state in process_wide if state.name in met)
    assert len(parts) >= 3
    for part in parts:
        with pytest.raises(FxShimError, match="does not work"):
            install(states=[state for state in states.STATES if state.isolate is not part])


def test_it_is_neither_installed_nor_removed_while_another_thread_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fx_shim, "_IDLE_SECONDS", 0.1)
    before = Snapshot()
    with Elsewhere(tracing_symbolically):
        during = Snapshot()
        with pytest.raises(FxShimError, match=r"a trace is running|another thread is compiling"):
            install()
        assert during.changes() == []
    assert before.changes() == []
    install()
    with Elsewhere(tracing_symbolically), pytest.raises(FxShimError, match="another thread is compiling or tracing"):
        uninstall()
    assert fx_shim.installed()


def test_a_trace_that_waits_too_long_for_its_turn_says_so() -> None:
    late = pytest.raises(FxShimError, match=r"an FX trace waited \d s")
    with isolated(turn_seconds=2.0), Elsewhere(tracing_symbolically), late:
        torch.fx.symbolic_trace(lambda x: x + 1)


def test_values_set_by_attribute_are_the_threads_own() -> None:
    with isolated():
        torch.compiler._is_compiling_flag = True
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(torch.compiler.is_compiling()))
        thread.start()
        thread.join()
        assert torch.compiler.is_compiling()
        torch.compiler._is_compiling_flag = False
        assert seen == [False]
