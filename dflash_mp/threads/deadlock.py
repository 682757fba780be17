"""The deadlock that no thread-local state can cure, on demand: `python -m dflash_mp.threads.deadlock`. Needs CUDA.

PyTorch's autograd engine has one thread per device and process. Thread A compiles: it holds Dynamo's compile lock and traces a joint graph, for which
it calls `torch.autograd.grad`, work for the device's autograd thread. Thread B is in a backward pass on the same device, so that thread
is B's now; if something there has to be compiled, it waits for the compile lock. Neither goes on.

Each variant is a process of its own, in which A is held inside the compilation until B's backward pass has begun, and B goes on when A holds the
lock. `needs` says what B's backward pass asks for: "a new graph" (a recomputation that meets a new shape), "its backward graph" (which
PyTorch compiles lazily, in the first backward pass), the same compiled ahead, or nothing new. Prints a line of JSON per variant.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch._dynamo.backends.registry import lookup_backend

from dflash_mp.threads.compilations import on_autograd_thread
from dflash_mp.threads.fx_shim import isolated
from dflash_mp.threads.watch import stacks

_HELD_SECONDS = 60.0  # the first compilation of a process takes tens of seconds
_STUCK_SECONDS = 60.0
_PROCESS_SECONDS = 240.0
NEEDS = ("a new graph", "its backward graph", "its backward graph, compiled ahead", "nothing new")


def main() -> None:
    """Every variant, on one device and, where there are two, on two. All at once."""
    devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())] or [torch.device("cpu")]
    command = [sys.executable, "-m", "dflash_mp.threads.deadlock"]
    started = [
        (needs, subprocess.Popen([*command, needs, str(devices[0]), str(of_b)], stdout=subprocess.PIPE, text=True))
        for of_b in devices[:2]
        for needs in NEEDS
    ]
    for needs, process in started:
        try:
            said, _ = process.communicate(timeout=_PROCESS_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            said = ""
        print(said.strip() or json.dumps({"needs": needs, "died": process.returncode}), flush=True)


def meet(needs: str, of_a: torch.device, of_b: torch.device) -> dict[str, Any]:
    """Let A compile for `of_a` while B is in a backward pass on `of_b`. The process must end afterwards: threads may be stuck."""
    if needs == "its backward graph, compiled ahead":
        torch._functorch.config.force_non_lazy_backward_lowering = True
    compiling, in_backward = threading.Event(), threading.Event()
    a = threading.Thread(target=_compile, args=(of_a, compiling, in_backward), name="A", daemon=True)
    backward = _backward(needs, of_b, in_backward, compiling)
    b = threading.Thread(target=backward, name="B", daemon=True)
    with isolated():
        a.start()
        b.start()
        deadline = time.monotonic() + _STUCK_SECONDS
        for thread in (a, b):
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread.name for thread in (a, b) if thread.is_alive()]
        where = stacks(lambda name: name in stuck or name.startswith("autograd")) if stuck else {}
        found = {"needs": needs, "A": str(of_a), "B": str(of_b), "stuck": stuck, "stacks": where}
        if stuck:
            print(json.dumps(found), flush=True)
            os._exit(0)
    return found


def _compile(device: torch.device, compiling: threading.Event, in_backward: threading.Event) -> None:
    """A: compile, with forward and backward, and be held there until B's backward pass has begun."""

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiling.set()
        if not in_backward.wait(_HELD_SECONDS):
            raise TimeoutError("B's backward pass does not begin")
        compiled: Callable[..., Any] = lookup_backend("aot_eager")(graph, inputs)
        return compiled

    torch.compile(lambda x: (x * x).sum(), backend=backend, dynamic=False)(_leaf(3, device)).backward()


def _backward(
    needs: str, device: torch.device, in_backward: threading.Event, compiling: threading.Event
) -> Callable[[], None]:
    """B: a backward pass that, in the autograd thread, tells that it is there, waits for A's lock, and asks for what it `needs`."""
    settled = torch.compile(lambda x: x * 2, backend="aot_eager", dynamic=False)
    settled(_leaf(4, device))
    function = torch.compile(_fresh_square, backend="inductor", dynamic=False)
    x = _leaf(5, device)
    y = function(x) if needs.startswith("its") else x * x

    def hook(gradient: torch.Tensor) -> None:
        in_backward.set()
        if not compiling.wait(_HELD_SECONDS):
            raise TimeoutError("A does not compile")
        if needs == "a new graph":
            settled(_leaf(6, device))
        elif needs == "nothing new":
            settled(_leaf(4, device))

    scaled = y * 1.0
    scaled.register_hook(hook)
    return lambda: scaled.sum().backward()


def _fresh_square(x: torch.Tensor) -> torch.Tensor:
    return x * x + x


def _leaf(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size, device=device, requires_grad=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        on_autograd_thread(torch.device(sys.argv[3]), lambda: None)
        print(json.dumps(meet(sys.argv[1], torch.device(sys.argv[2]), torch.device(sys.argv[3]))), flush=True)
        os._exit(0)
    main()
