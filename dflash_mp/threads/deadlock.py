"""The deadlock that no thread-local flag can cure, on demand: `python -m dflash_mp.threads.deadlock`. It takes a CUDA device to meet it.

PyTorch's autograd engine has one thread per device and process. Thread A compiles a call of flex_attention: it holds Dynamo's compile lock
and calls `torch.autograd.grad`, to trace the gradient of the score function, which is work for the device's autograd thread. Thread
B is in a backward pass on the same device, so that thread is B's now; if something there has to be compiled, it waits for the compile
lock. Neither goes on. (AOTAutograd's own joint trace is no such call: it has autograd work in the calling thread.)

Each meeting is a process of its own, in which A is held inside the compilation until B's backward pass has begun, and B goes on when A holds the
lock. Prints a line of JSON per meeting. Exit code 1 when one of them could not be held.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch.nn.attention.flex_attention import flex_attention

from dflash_mp.threads.compilations import on_autograd_thread
from dflash_mp.threads.fx_shim import isolated
from dflash_mp.threads.watch import stacks

_HELD_SECONDS = 60.0  # the first compilation of a process takes tens of seconds
_STUCK_SECONDS = 60.0
_PROCESS_SECONDS = 240.0
PRODUCT, FLEX = "a product", "flex_attention"
NEW_GRAPH, BACKWARD_GRAPH, AHEAD, NOTHING = (
    "a new graph",
    "its backward graph",
    "its backward graph, compiled ahead",
    "nothing new",
)


@dataclass(frozen=True)
class Meeting:
    """What A compiles on `of_a`, and what B's backward pass on `of_b` asks for: a new graph (as a recomputation that meets a new shape
    does), its backward graph (which PyTorch compiles when it is first needed), the same compiled ahead, or nothing new. `own_threads`:
    each thread does its autograd work itself."""

    compiles: str
    needs: str
    of_a: str
    of_b: str
    own_threads: bool = False


def main() -> int:
    """Every meeting, on one device and, where there are two, on two. All at once."""
    meetings = meetings_on([f"cuda:{n}" for n in range(torch.cuda.device_count())] or ["cpu"])
    command = [sys.executable, "-m", "dflash_mp.threads.deadlock"]
    started = [
        (meeting, subprocess.Popen([*command, json.dumps(asdict(meeting))], stdout=subprocess.PIPE, text=True))
        for meeting in meetings
    ]
    failed = 0
    for meeting, process in started:
        try:
            said, _ = process.communicate(timeout=_PROCESS_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        failed += process.returncode != 0
        print(said.strip() or json.dumps({**asdict(meeting), "died": process.returncode}), flush=True)
    return int(failed > 0)


def meetings_on(devices: list[str]) -> list[Meeting]:
    """What is tried on `devices`; on a CPU only what can run there (flex_attention has no backward pass on it)."""
    first = devices[0]
    if first == "cpu":
        return [Meeting(PRODUCT, NEW_GRAPH, first, first)]
    found = [Meeting(FLEX, needs, first, first) for needs in (NEW_GRAPH, BACKWARD_GRAPH, AHEAD, NOTHING)]
    found += [Meeting(FLEX, needs, first, first, own_threads=True) for needs in (NEW_GRAPH, BACKWARD_GRAPH)]
    found += [Meeting(PRODUCT, NEW_GRAPH, first, first)]
    return found + [Meeting(FLEX, NEW_GRAPH, first, other) for other in devices[1:2]]


def meet(meeting: Meeting) -> dict[str, Any]:
    """Let the two meet: `{"stuck": names of the threads that don't go on, "stacks": theirs, "errors": …}`. The process must end
    afterwards: threads may be stuck."""
    if meeting.needs == AHEAD:
        torch._functorch.config.force_non_lazy_backward_lowering = True
    compiling, in_backward = threading.Event(), threading.Event()
    errors: dict[str, str] = {}
    threads = [
        threading.Thread(target=_reporting, args=(name, errors, meeting.own_threads, action), name=name, daemon=True)
        for name, action in (
            ("A", lambda: _compile(meeting, compiling, in_backward)),
            ("B", _backward(meeting, in_backward, compiling)),
        )
    ]
    with isolated():
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _STUCK_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread.name for thread in threads if thread.is_alive()]
        where = stacks(lambda name: name in stuck or name.startswith("autograd")) if stuck else {}
        found = {**asdict(meeting), "stuck": stuck, "errors": errors, "stacks": where}
        if stuck:  # the shim can't be removed below threads that compile
            _say_and_end(found)
    return found


def _reporting(name: str, errors: dict[str, str], own_threads: bool, action: Callable[[], None]) -> None:
    if own_threads:
        torch.autograd.set_multithreading_enabled(False)
    try:
        action()
    except Exception as error:
        errors[name] = f"{type(error).__name__}: {error}"


def _compile(meeting: Meeting, compiling: threading.Event, in_backward: threading.Event) -> None:
    """A: compile a forward and a backward pass, and be held there, with the compile lock, until B's backward pass has begun."""

    @torch._dynamo.assume_constant_result
    def held() -> int:  # Dynamo calls it while it traces
        compiling.set()
        if not in_backward.wait(_HELD_SECONDS):
            raise TimeoutError("B's backward pass does not begin")
        return 1

    def product(x: torch.Tensor) -> torch.Tensor:
        return x * x * held()

    def attention(x: torch.Tensor) -> torch.Tensor:
        return flex_attention(x * held(), x, x, score_mod=_score)

    function = attention if meeting.compiles == FLEX else product
    x = torch.ones(1, 1, 128, 16, device=meeting.of_a, requires_grad=True)
    torch.compile(function, backend="aot_eager", dynamic=False, fullgraph=True)(x).sum().backward()


def _score(
    score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    return score * 2


def _backward(meeting: Meeting, in_backward: threading.Event, compiling: threading.Event) -> Callable[[], None]:
    """B: a backward pass that, in the thread that autograd uses, tells that it is there, waits for A's lock, and asks for what it needs."""
    settled = torch.compile(lambda x: x * 2, backend="aot_eager", dynamic=False)
    settled(_leaf(4, meeting.of_b))
    function = torch.compile(_fresh_square, backend="inductor", dynamic=False)
    x = _leaf(5, meeting.of_b)
    y = function(x) if meeting.needs in (BACKWARD_GRAPH, AHEAD) else x * x

    def hook(gradient: torch.Tensor) -> None:
        in_backward.set()
        if not compiling.wait(_HELD_SECONDS):
            raise TimeoutError("A does not compile")
        # As in a recomputation. Without gradients enabled, Dynamo's guards take the known call for another one.
        with torch.enable_grad():
            if meeting.needs == NEW_GRAPH:
                settled(_leaf(6, meeting.of_b))
            elif meeting.needs == NOTHING:
                settled(_leaf(4, meeting.of_b))

    scaled = y * 1.0
    scaled.register_hook(hook)
    return lambda: scaled.sum().backward()


def _fresh_square(x: torch.Tensor) -> torch.Tensor:
    return x * x + x


def _leaf(size: int, device: str) -> torch.Tensor:
    return torch.ones(size, device=device, requires_grad=True)


def _say_and_end(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)
    os._exit(bool(found["errors"]))


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(main())
    asked = Meeting(**json.loads(sys.argv[1]))
    on_autograd_thread(torch.device(asked.of_b), lambda: None)
    _say_and_end(meet(asked))
