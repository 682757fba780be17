"""The races, one at a time and on demand: one thread is held inside a trace or a compilation while another one does something.

Each case is deterministic: threads meet at events, every wait is bounded, nothing depends on timing. `Case.outcome()` says in a few words what
the second thread met; `Case.isolated` is what it meets when the state concerned is its own. The cases of a thread's own trace are
different: PyTorch's protection must raise there, always. A case marked `damages` leaves a PyTorch without the shim unusable: its process should end.
Needs nothing but PyTorch. The first case costs seconds (Dynamo's import), the others milliseconds.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch._dynamo
import torch.fx
import torch.fx._symbolic_trace
import torch.fx.experimental.proxy_tensor as proxy_tensor
import torch.fx.traceback
from torch._dynamo.utils import get_metrics_context

SECONDS = 60.0  # the longest wait for anything here

Pause = Callable[[], None]
RUNS, RAISES = "runs", "raises"


@dataclass(frozen=True)
class Case:
    """A race. `state` names the `states.State` that it is about."""

    name: str
    state: str
    isolated: str
    outcome: Callable[[], str]
    damages: bool = False


class Elsewhere:
    """Runs `body(pause)` in another thread and holds it where it calls `pause`, until the block ends."""

    def __init__(self, body: Callable[[Pause], Any]) -> None:
        self.error: BaseException | None = None
        self._body, self._there, self._go = body, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="held", daemon=True)

    def __enter__(self) -> Elsewhere:
        self._thread.start()
        if not self._there.wait(SECONDS):
            raise TimeoutError("the other thread did not get to where it should be held")
        if self.error is not None:
            raise self.error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let it go on, and wait for its end."""
        self._go.set()
        self._thread.join(SECONDS)
        if self._thread.is_alive():
            raise TimeoutError("the other thread does not end")

    def _run(self) -> None:
        try:
            self._body(self._pause)
        except BaseException as error:
            self.error = error
        self._there.set()

    def _pause(self) -> None:
        self._there.set()
        if not self._go.wait(SECONDS):
            raise TimeoutError("nobody released the held thread")


def tracing_symbolically(pause: Pause) -> None:
    """For `Elsewhere`: inside `torch.fx.symbolic_trace`."""

    def traced(x: torch.Tensor) -> torch.Tensor:
        pause()
        return x + 1

    torch.fx.symbolic_trace(traced)


def making_fx(pause: Pause) -> None:
    """For `Elsewhere`: inside `make_fx`, which AOTAutograd uses for joint graphs."""

    def traced(x: torch.Tensor) -> torch.Tensor:
        pause()
        return x + 1

    proxy_tensor.make_fx(traced)(torch.ones(1))


def compiling(pause: Pause) -> None:
    """For `Elsewhere`: inside `torch.compile`, in a backend that traces, as every real one does."""

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        making_fx(pause)
        return graph.forward

    torch.compile(_fresh(lambda x: x * 3), backend=backend, dynamic=False)(torch.ones(1))


def said(action: Callable[[], Any]) -> str:
    """RUNS, or what it raised."""
    try:
        action()
    except Exception as error:
        return _short(error)
    return RUNS


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{RAISES} {type(error).__name__}: {text[0][:90]}"


def _warmed() -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(_fresh(function), backend="eager", dynamic=False)
    compiled(torch.ones(1))
    return compiled


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with code of its own: Dynamo keeps compilations by code object, and few of each."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _compiled_call(held: Callable[[Pause], Any]) -> Callable[[], str]:
    def outcome() -> str:
        function = _warmed()
        with Elsewhere(held):
            return said(lambda: function(torch.ones(1)))

    return outcome


def _own(trace: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]) -> Callable[[], str]:
    def outcome() -> str:
        return said(lambda: trace(_warmed())).partition(":")[0]

    return outcome


def _module_call() -> str:
    module = torch.nn.Identity()
    with Elsewhere(tracing_symbolically):
        return said(lambda: module(torch.ones(1)))


def _parameter() -> str:
    """The other thread traces a model; this one reads a parameter of the same model, as a shared target would be read."""

    class Model(torch.nn.Module):
        def __init__(self, pause: Pause) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(1, 1)
            self.pause = pause

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.pause()
            out: torch.Tensor = self.inner(x)
            return out

    shared: list[Model] = []

    def trace(pause: Pause) -> None:
        shared.append(Model(pause))
        torch.fx.symbolic_trace(shared[0])

    with Elsewhere(trace):
        return f"reads a {type(shared[0].inner.weight).__name__}"


def _is_compiling() -> str:
    with Elsewhere(compiling):
        return f"is_compiling() is {torch.compiler.is_compiling()}"


def _adamw() -> str:
    """Three eager updates of AdamW while the other thread compiles, compared bit by bit with the same updates alone."""
    alone = _updated()
    with Elsewhere(compiling):
        during = _updated()
    return "the same update" if torch.equal(alone, during) else "another update, without an error"


def _updated() -> torch.Tensor:
    weight = torch.linspace(0.1, 1.0, 64).requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.95), foreach=True)
    for _ in range(3):
        weight.grad = weight.detach() * 0.7
        optimizer.step()
    return weight.detach()


def _make_fx_tracer() -> str:
    with Elsewhere(making_fx):
        mine = proxy_tensor._CURRENT_MAKE_FX_TRACER
        return "no tracer" if mine is None else "another thread's tracer"


def _node_metadata() -> str:
    def preserving(pause: Pause) -> None:
        with torch.fx.traceback.preserve_node_meta():
            pause()

    with Elsewhere(preserving):
        return "preserved" if torch.fx.traceback.has_preserved_node_meta() else "not preserved"


def _metrics() -> str:
    def measuring(pause: Pause) -> None:
        with get_metrics_context():
            pause()

    with Elsewhere(measuring):
        return "in progress" if get_metrics_context().in_progress() else "not in progress"


def _fullgraph_counter() -> str:
    """A call ends its count of compiled frames twice; in between, another call has begun to count, and a third begins before it ends."""
    results: list[str] = []

    def leaving(pause: Pause) -> None:
        context = torch._dynamo.optimize("eager", nopython=True)
        context.enter_exit_hooks.append(lambda: pause)  # type: ignore[union-attr]
        context(_fresh(lambda x: x * 11))(torch.ones(1))

    def running(pause: Pause) -> None:
        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            def run(*args: torch.Tensor) -> Any:
                pause()
                return graph.forward(*args)

            return run

        function = torch.compile(_fresh(lambda x: x * 5), backend=backend, fullgraph=True, dynamic=False)
        results.append(said(lambda: function(torch.ones(1))))

    with Elsewhere(leaving) as first, Elsewhere(running) as second:
        first.release()

        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            second.release()
            return graph.forward

        torch.compile(_fresh(lambda x: x * 7), backend=backend, fullgraph=True, dynamic=False)(torch.ones(1))
    return results[0]


def _two_traces() -> str:
    """Two traces overlap and end in the order in which they began."""
    from dflash_mp.threads import fx_shim

    second = Elsewhere(tracing_symbolically)
    with Elsewhere(tracing_symbolically) as first:
        second._thread.start()
        _until(lambda: second._there.is_set() or fx_shim.waiting() > 0, "the second trace begins or waits")
        first.release()
    second.release()
    errors = [_short(error) for error in (first.error, second.error) if error is not None]
    return "; ".join(errors) or ("both complete" if not left_behind() else f"left behind: {', '.join(left_behind())}")


def left_behind() -> list[str]:
    """Traces of a trace that ended badly. Empty in a sound process; ask when nothing traces."""
    fx, module = torch.fx._symbolic_trace, torch.nn.Module
    found = []
    if getattr(fx, "_is_fx_tracing_flag", False):
        found.append("the tracing flag is set")
    if fx.CURRENT_PATCHER is not None:
        found.append("CURRENT_PATCHER is set")
    if module.__call__ is not fx._orig_module_call or module.__getattr__ is not fx._orig_module_getattr:
        found.append("nn.Module is patched")
    return found


def _until(condition: Callable[[], bool], what: str) -> None:
    """Poll for a condition, bounded."""
    turns, tick = int(SECONDS * 100), threading.Event()
    for _ in range(turns):
        if condition():
            return
        tick.wait(0.01)
    raise TimeoutError(f"not within {SECONDS:.0f} s: {what}")


CASES = (
    Case(
        "another thread is in symbolic_trace; compiled call", "tracing flag", RUNS, _compiled_call(tracing_symbolically)
    ),
    Case("another thread is in make_fx; compiled call", "tracing flag", RUNS, _compiled_call(making_fx)),
    Case("another thread compiles; compiled call", "tracing flag", RUNS, _compiled_call(compiling)),
    Case("another thread is in symbolic_trace; module call", "module patches", RUNS, _module_call),
    Case("another thread traces a shared module; parameter read", "module patches", "reads a Parameter", _parameter),
    Case(
        "another thread compiles; torch.compiler.is_compiling()",
        "is_compiling",
        "is_compiling() is False",
        _is_compiling,
    ),
    Case("another thread compiles; AdamW(foreach=True).step()", "is_compiling", "the same update", _adamw),
    Case("another thread is in make_fx; current tracer", "make_fx tracer", "no tracer", _make_fx_tracer),
    Case("another thread preserves node metadata", "node metadata", "not preserved", _node_metadata),
    Case("another thread compiles a backward pass; metrics", "compile metrics", "not in progress", _metrics),
    Case("three fullgraph calls overlap", "fullgraph counter", RUNS, _fullgraph_counter),
    Case("two traces overlap", "module patches", "both complete", _two_traces, damages=True),
)
PROTECTION = (
    Case("this thread is in symbolic_trace; compiled call", "", "raises RuntimeError", _own(torch.fx.symbolic_trace)),
    Case(
        "this thread is in make_fx; compiled call",
        "",
        "raises RuntimeError",
        _own(lambda function: proxy_tensor.make_fx(function)(torch.ones(1))),
    ),
)


def failures_under_shim() -> list[str]:
    """Run every case; those that did not go as they must with the shim, with what happened. Empty: it works.

    After a failure, cases that could damage PyTorch are left out.
    """
    found: list[str] = []
    for case in (*PROTECTION, *CASES):
        if found and case.damages:
            continue
        outcome = case.outcome()
        if outcome != case.isolated:
            found.append(f"{case.name}: {outcome}, not {case.isolated}")
    return found + left_behind()
