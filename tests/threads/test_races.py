"""The races themselves: what PyTorch does without a shim, with the older one, and with ours; and that process mode has no part in this."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_mp.threads import fx_shim, races
from dflash_mp.threads.module_replacement import replaced
from dflash_mp.threads.races import Elsewhere, tracing_symbolically
from dflash_mp.threads.states import GLOBAL

FLAG = "Detected that you are using FX to symbolically trace a dynamo-optimized function"


def reproduced(variant: str) -> dict[str, str]:
    """Case → outcome, in a process of its own."""
    command = [sys.executable, "-m", "dflash_mp.threads.reproduce", variant]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    cases: dict[str, str] = json.loads(done.stdout)["cases"]
    return cases


@pytest.fixture(scope="module")
def bare() -> dict[str, str]:
    return reproduced("bare")


def cases_of(state: str) -> Iterator[races.Case]:
    return (case for case in races.CASES if case.state == state)


@pytest.mark.parametrize("state", [*fx_shim.probe()])
def test_without_the_shim_a_process_wide_state_is_seen_by_another_thread(state: str, bare: dict[str, str]) -> None:
    """Where PyTorch has made the state thread-local by itself, the same case shows that too."""
    what = fx_shim.probe()[state]
    met = {case.name: bare[case.name] for case in cases_of(state)}
    isolated = {case.name: case.isolated for case in cases_of(state)}
    if what != GLOBAL:
        assert met == isolated, f"{state} is {what}"
        return
    # Since 2.13 a compilation says is_compiling() to all threads, which hides the flag that it also sets; before, only torch.export did.
    tells = bare["another thread compiles; torch.compiler.is_compiling()"] == "is_compiling() is True"
    told = {
        "another thread compiles; torch.compiler.is_compiling()",
        "another thread compiles; AdamW(foreach=True).step()",
    }
    hidden = {"another thread compiles; compiled call"} if tells else told
    for name in met.keys() - hidden:
        assert met[name] != isolated[name], name


@pytest.mark.skipif(fx_shim.probe()["tracing flag"] != GLOBAL, reason="the flag is thread-local in this PyTorch")
def test_a_compiled_call_raises_while_another_thread_traces(bare: dict[str, str]) -> None:
    assert FLAG[:60] in bare["another thread is in symbolic_trace; compiled call"]
    assert FLAG[:60] in bare["another thread is in make_fx; compiled call"]


def test_two_overlapping_traces_leave_pytorch_damaged(bare: dict[str, str]) -> None:
    assert "AssertionError" in bare["two traces overlap"]


def test_with_the_shim_nothing_of_it_is_left(bare: dict[str, str]) -> None:
    under_shim = reproduced("shim")
    assert under_shim.keys() == bare.keys()
    assert under_shim == {case.name: case.isolated for case in (*races.PROTECTION, *races.CASES)}


@pytest.mark.skipif(fx_shim.probe()["tracing flag"] != GLOBAL, reason="there is no flag to replace")
def test_the_older_shim_makes_the_attribute_thread_local_and_the_error_stays() -> None:
    original = sys.modules["torch.fx._symbolic_trace"]
    compiled = torch.compile(lambda x: x + 5, backend="eager", dynamic=False)
    compiled(torch.ones(1))
    with replaced() as wrapper, Elsewhere(tracing_symbolically):
        assert torch.fx._symbolic_trace is wrapper is sys.modules["torch.fx._symbolic_trace"]
        assert wrapper._is_fx_tracing_flag is False  # what it does: whoever asks the module gets its own thread's flag
        assert (
            wrapper.is_fx_symbolic_tracing() is True
        )  # what it doesn't: the reader's globals are the original module's
        with pytest.raises(RuntimeError, match=FLAG):
            compiled(torch.ones(1))
        after = torch.compile(lambda x: x + 6, backend="eager", dynamic=False)  # and compiled after the replacement
        with pytest.raises(RuntimeError, match=FLAG):
            after(torch.ones(1))
    assert torch.fx._symbolic_trace is original is sys.modules["torch.fx._symbolic_trace"]
    assert original._is_fx_tracing_flag is False


def test_held_threads_never_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(races, "SECONDS", 0.2)
    with pytest.raises(TimeoutError, match="did not get to where it should be held"):
        Elsewhere(lambda pause: races.threading.Event().wait(1)).__enter__()


def test_process_mode_never_imports_thread_mode() -> None:
    program = (
        "import sys, dflash_mp.cli, dflash_mp.drafter.__main__, dflash_mp.drafter.rank, dflash_mp.drafter.state\n"
        "import dflash_mp.run, dflash_mp.torchrun, dflash_mp.target.feed\n"
        "sys.exit(','.join(name for name in sys.modules if name.startswith('dflash_mp.threads')) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_nothing_but_the_command_line_names_thread_mode() -> None:
    package = Path(fx_shim.__file__).parents[1]
    named = [
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if "dflash_mp.threads" in file.read_text(encoding="utf-8") and file.parent.name != "threads"
    ]
    assert named == ["commands/comparison.py"]


def test_a_report_of_races_names_every_case_and_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_mp.threads import matrix, reproduce

    def run(python: str, variant: str) -> dict[str, Any]:
        cases = {} if variant == "module-replacement" else {"a | b": f"{variant} met it"}
        return {"torch": "9.9", "states": {"flag": GLOBAL}, "cases": cases, "note": "refused: no flag"}

    monkeypatch.setattr(reproduce, "_run", run)
    found = reproduce.reproduce()
    assert found["cases"] == {
        "a | b": {"bare": "bare met it", "module-replacement": "refused: no flag", "shim": "shim met it"}
    }
    text = matrix.markdown({"9.9": found, "1.0": {"failure": "no such version"}})
    assert "| flag | process-wide |" in text
    assert "1.0: no such version" in text
