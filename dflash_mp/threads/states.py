"""The process-wide states of PyTorch that concurrent FX traces and compilations corrupt, and how each becomes a thread's own.

Every `State` can say what it is in the running PyTorch without changing anything: GLOBAL, LOCAL (PyTorch has made it thread-local by itself),
ABSENT (this version has no such thing), or something else, which is the reason why its layout is not known. `isolate` changes a GLOBAL one.
Read in the sources of 2.9.1, 2.11.0, 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.eval_frame
import torch._dynamo.utils
import torch.compiler
import torch.fx._symbolic_trace
import torch.fx.experimental.proxy_tensor
import torch.fx.traceback
from torch._dynamo.metrics_context import MetricsContext, RuntimeMetricsContext

from dflash_mp.threads.inplace import Changes, UnknownLayout, begin_with, rewrite, run_under

GLOBAL, LOCAL, ABSENT = "process-wide", "thread-local in this PyTorch", "not in this PyTorch"

_fx = torch.fx._symbolic_trace
_eval_frame = torch._dynamo.eval_frame
_FULLGRAPH = "set_fullgraph_compiled_frame_count"


@dataclass(frozen=True)
class State:
    """One of them. `probe` changes nothing; `isolate` raises `UnknownLayout` when it cannot, after changing at most what `Changes` holds."""

    name: str
    what: str  # what goes wrong when threads share it
    probe: Callable[[], str]
    isolate: Callable[[Changes, Any], object]  # the second argument is the turn that traces take


def module_globals(module: types.ModuleType, names: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """Those of `names` that `module` has, each at rest. Raises `UnknownLayout` for one that is in use."""
    found = {name: fresh for name, fresh in names.items() if name in vars(module)}
    for name, fresh in found.items():
        now = vars(module)[name]
        if now != fresh():
            raise UnknownLayout(f"{module.__name__}.{name} is {now!r}: a trace is running, or one has left this behind")
    return found


def _flag() -> str:
    if isinstance(vars(_fx).get("_is_fx_tracing_flag"), bool):
        return GLOBAL
    if isinstance(vars(_fx).get("_is_fx_tracing_tls"), threading.local):
        return LOCAL
    return "torch.fx._symbolic_trace has neither _is_fx_tracing_flag nor _is_fx_tracing_tls"


def _patches() -> str:
    if "CURRENT_PATCHER" in vars(_fx) and hasattr(vars(_fx).get("_Patcher"), "patch_method"):
        return GLOBAL
    return "torch.fx._symbolic_trace has no CURRENT_PATCHER or no _Patcher.patch_method"


def _isolate_tracing(changes: Changes, turn: Any) -> None:
    """Flag, module patches and turns are one rewrite: they are in one module."""
    rewrite(
        changes,
        _fx,
        local=module_globals(_fx, {"_is_fx_tracing_flag": bool, "CURRENT_PATCHER": lambda: None}),
        edits={
            "Tracer.trace": run_under("_dflash_mp_turn"),
            "_Patcher.patch_method": begin_with("new_fn = _dflash_mp_for_this_thread(cls, name, new_fn)"),
        },
        provide={"_dflash_mp_turn": turn, "_dflash_mp_for_this_thread": _for_this_thread},
    )


def _for_this_thread(cls: type, name: str, patch: Callable[..., Any]) -> Callable[..., Any]:
    """A method that acts as `patch` in the thread that traces, and as the method it replaces in every other."""
    present = getattr(cls, name)
    unpatched = getattr(present, "_dflash_mp_unpatched", present)
    owner, this_thread = threading.get_ident(), threading.get_ident

    @functools.wraps(patch)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (patch if this_thread() == owner else unpatched)(self, *args, **kwargs)

    # Dynamo must go on skipping this frame, as it skips all of that file.
    method.__code__ = method.__code__.replace(co_filename=_fx.__file__)  # type: ignore[attr-defined]
    method._dflash_mp_unpatched = unpatched  # type: ignore[attr-defined]
    return method


def _compiling() -> str:
    if isinstance(vars(torch.compiler).get("_is_compiling_flag"), bool):
        return GLOBAL
    return "torch.compiler has no _is_compiling_flag"


def _isolate_compiling(changes: Changes, turn: Any) -> None:
    flags = module_globals(torch.compiler, {"_is_compiling_flag": bool, "_is_exporting_flag": bool})
    rewrite(changes, torch.compiler, local=flags)


def _tracer() -> str:
    module = torch.fx.experimental.proxy_tensor
    return GLOBAL if "_CURRENT_MAKE_FX_TRACER" in vars(module) else f"{module.__name__} has no _CURRENT_MAKE_FX_TRACER"


def _isolate_tracer(changes: Changes, turn: Any) -> None:
    module = torch.fx.experimental.proxy_tensor
    rewrite(changes, module, local=module_globals(module, {"_CURRENT_MAKE_FX_TRACER": lambda: None}))


_NODE_META: dict[str, Callable[[], Any]] = {
    "current_meta": dict,
    "current_replay_node": lambda: None,
    "should_preserve_node_meta": bool,
    "_should_preserve_node_meta": bool,
}


def _node_meta() -> str:
    present = vars(torch.fx.traceback)
    if isinstance(present.get("current_meta"), dict) and isinstance(present.get("should_preserve_node_meta"), bool):
        return GLOBAL
    return "torch.fx.traceback has no current_meta or no should_preserve_node_meta"


def _isolate_node_meta(changes: Changes, turn: Any) -> None:
    rewrite(changes, torch.fx.traceback, local=module_globals(torch.fx.traceback, _NODE_META))


def _metrics() -> str:
    present = vars(torch._dynamo.utils)
    if isinstance(present.get("_METRICS_CONTEXT"), MetricsContext):
        return GLOBAL
    if isinstance(present.get("_metrics_context_tls"), threading.local):
        return LOCAL
    return "torch._dynamo.utils has neither _METRICS_CONTEXT nor _metrics_context_tls"


def _isolate_metrics(changes: Changes, turn: Any) -> None:
    module = torch._dynamo.utils
    record = vars(module)["_METRICS_CONTEXT"]._on_exit
    fresh: dict[str, Callable[[], Any]] = {
        "_METRICS_CONTEXT": lambda: MetricsContext(on_exit=record),
        "_RUNTIME_METRICS_CONTEXT": lambda: RuntimeMetricsContext(on_exit=record),
    }
    if module.get_metrics_context().in_progress():
        raise UnknownLayout("a compilation is running")
    rewrite(changes, module, local=fresh)


def _fullgraph() -> str:
    """Asked of the counter itself: does another thread see what this one set?"""
    count = vars(_eval_frame).get(_FULLGRAPH)
    if count is None:
        return ABSENT
    before = count(0)
    try:
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(count(-1)))
        thread.start()
        thread.join()
    finally:
        count(before)
    return GLOBAL if seen == [0] else LOCAL


def _isolate_fullgraph(changes: Changes, turn: Any) -> None:
    count = vars(_eval_frame)[_FULLGRAPH]
    changes.entry(vars(_eval_frame), _FULLGRAPH, _OneCounter(count))


class _OneCounter:
    """The C counter of compiled frames, lent to one thread at a time; a thread that finds it lent out skips that check for its call."""

    def __init__(self, count: Callable[[int], int]) -> None:
        self._count, self._owner, self._mutex = count, 0, threading.Lock()

    def __call__(self, value: int) -> int:
        me = threading.get_ident()
        with self._mutex:
            if self._owner not in (0, me):
                return 0 if value >= 0 else -1  # as if a caller further up did the counting
            prior = self._count(value)
            self._owner = me if value >= 0 else 0
            return prior


STATES = (
    State(
        "tracing flag",
        "a compiled function raises while any other thread traces",
        _flag,
        _isolate_tracing,
    ),
    State(
        "module patches",
        "a trace replaces nn.Module.__call__ and __getattr__ for all threads; two traces leave them replaced",
        _patches,
        _isolate_tracing,
    ),
    State(
        "is_compiling",
        "eager code of other threads, AdamW for one, believes that it is being compiled",
        _compiling,
        _isolate_compiling,
    ),
    State("make_fx tracer", "a subgraph is traced into another thread's graph", _tracer, _isolate_tracer),
    State("node metadata", "assertions in joint tracing; wrong annotations", _node_meta, _isolate_node_meta),
    State(
        "compile metrics", "a lazily compiled backward pass raises 'Metric(s) already set'", _metrics, _isolate_metrics
    ),
    State(
        "fullgraph counter",
        "'found no compiled frames' from a function that ran compiled",
        _fullgraph,
        _isolate_fullgraph,
    ),
)
