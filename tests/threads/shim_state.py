"""Every object that the shim may touch, to compare before and after."""

from __future__ import annotations

from typing import Any

import torch._dynamo.eval_frame
import torch._dynamo.utils
import torch.compiler
import torch.fx._symbolic_trace
import torch.fx.experimental.proxy_tensor
import torch.fx.traceback

from dflash_mp.threads.inplace import functions_of

_MODULES = (
    torch._dynamo.eval_frame,
    torch._dynamo.utils,
    torch.compiler,
    torch.fx._symbolic_trace,
    torch.fx.experimental.proxy_tensor,
    torch.fx.traceback,
)


def _same(before: Any, now: Any) -> bool:
    """The same object; PyTorch itself exchanges empty dictionaries for others."""
    return before is now or (before == {} and now == {})


class Snapshot:
    """The objects themselves, by identity."""

    def __init__(self) -> None:
        self.modules = {module: (type(module), dict(vars(module))) for module in _MODULES}
        self.codes = [(function, function.__code__) for module in _MODULES for function in functions_of(module)]
        module = torch.nn.Module
        self.methods = (module.__call__, module.__getattr__, torch.fx._symbolic_trace._Patcher.patch_method)

    def changes(self) -> list[str]:
        """What is no longer the same object; empty when everything is."""
        found: list[str] = []
        for module, (kind, entries) in self.modules.items():
            now: dict[str, Any] = vars(module)
            found += [module.__name__] * (type(module) is not kind)
            for key in entries.keys() | now.keys():
                if type(entries.get(key)) is int:  # a counter of compilations
                    continue
                if key not in entries or key not in now or not _same(entries[key], now[key]):
                    found.append(f"{module.__name__}.{key}")
        found += [function.__qualname__ for function, code in self.codes if function.__code__ is not code]
        before, self.methods = self.methods, Snapshot.methods_now()
        return found + ["methods"] * (before != self.methods)

    @staticmethod
    def methods_now() -> tuple[Any, ...]:
        module = torch.nn.Module
        return module.__call__, module.__getattr__, torch.fx._symbolic_trace._Patcher.patch_method
