"""Counting compilations and compiled calls, and the settings of Dynamo that a comparison needs.

`CountingBackend` is given to `torch.compile` in place of the backend that it wraps. It counts the graphs compiled, apart from those that
the backward pass (a recomputation under checkpointing) asked for, and the calls of compiled graphs, so that a call that silently ran
uncompiled can be told. Cost: a Python call per compiled layer.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.config
from torch._dynamo.backends.registry import lookup_backend

_ENOUGH = 1 << 16


class CountingBackend:
    """A backend of `torch.compile`."""

    def __init__(self, name: str) -> None:
        self._name, self._mutex = name, threading.Lock()
        self._calls: Counter[int] = Counter()
        self.forward = 0  # layer graphs compiled in a forward pass
        self.backward = 0  # and in a backward pass

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Callable[..., Any]:
        """Compile `graph`."""
        with self._mutex:
            if torch._C._current_graph_task_id() == -1:
                self.forward += 1
            else:
                self.backward += 1
        compiled = lookup_backend(self._name)(graph, inputs, **options)

        def counted(*args: Any) -> Any:
            self._calls[threading.get_ident()] += 1
            return compiled(*args)

        return counted

    def calls_here(self) -> int:
        """Compiled graphs that the calling thread has run."""
        return self._calls[threading.get_ident()]


def settle_dynamo() -> None:
    """Let as many shapes be compiled as come. Since 2.12 the setting is the calling thread's own."""
    config = torch._dynamo.config
    config.recompile_limit = _ENOUGH
    config.accumulated_recompile_limit = _ENOUGH
    # What dynamic=False means. Up to 2.11 every call of a compiled function sets it for all threads, and takes it back.
    config.automatic_dynamic_shapes = False


def on_autograd_thread(device: torch.device, action: Callable[[], None]) -> None:
    """Run `action` in the thread of the autograd engine that serves `device`; on a CPU that is the caller's."""
    value = torch.zeros((), device=device, requires_grad=True)
    product = value * 1.0
    product.register_hook(lambda gradient: action())
    product.backward()
