"""The older shim, kept to show what it does: a wrapper module that keeps the tracing flag in thread-local storage.

`torch.fx._symbolic_trace` is replaced in `sys.modules` and on the package by a module whose `_is_fx_tracing_flag` is thread-local. Code that
asks the *module* for the flag gets its own thread's. But the writer, `Tracer.trace`, and the reader, `is_fx_symbolic_tracing`, are functions
whose globals are the original module's dictionary, and `torch.compile` binds that reader when it wraps a function: neither ever sees
the wrapper. So the error stays, whether the replacement comes before or after compiling. Restores both references exactly.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch.fx
import torch.fx._symbolic_trace

from dflash_mp.threads.fx_shim import FxShimError

_NAME, _FLAG = "torch.fx._symbolic_trace", "_is_fx_tracing_flag"


class _Replacement(types.ModuleType):
    """Delegates to the original module, but for the flag."""

    def __init__(self, original: types.ModuleType) -> None:
        super().__init__(_NAME)
        self.__dict__["_original"] = original
        self.__dict__["_local"] = threading.local()

    def __getattr__(self, name: str) -> Any:
        if name == _FLAG:
            return getattr(self.__dict__["_local"], "flag", False)
        return getattr(self.__dict__["_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == _FLAG:
            self.__dict__["_local"].flag = value
        else:
            setattr(self.__dict__["_original"], name, value)


@contextlib.contextmanager
def replaced() -> Iterator[types.ModuleType]:
    """The replacement within a block. Raises `FxShimError` where there is no module-level flag, or when it is replaced already."""
    original = sys.modules[_NAME]
    if not isinstance(vars(original).get(_FLAG), bool):
        raise FxShimError(
            f"{_NAME} has no {_FLAG} to replace: it is thread-local in PyTorch {torch.__version__}, or already replaced",
            "run without this guard",
        )
    replacement = _Replacement(original)
    sys.modules[_NAME] = replacement
    torch.fx._symbolic_trace = replacement
    try:
        yield replacement
    finally:
        sys.modules[_NAME] = original
        torch.fx._symbolic_trace = original
