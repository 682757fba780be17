"""The deadlock of the compile lock and a device's autograd thread: on a GPU it is met on demand, and where autograd work stays in the calling
thread it is not."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import asdict
from functools import partial

import pytest
import torch
from torch._dynamo.convert_frame import compile_lock

from dflash_mp.threads import deadlock
from dflash_mp.threads.deadlock import AHEAD, BACKWARD_GRAPH, FLEX, NEW_GRAPH, NOTHING, PRODUCT, Meeting, meetings_on
from dflash_mp.threads.fx_shim import isolated
from dflash_mp.threads.guards import GUARDS


def _met(meeting: Meeting) -> dict[str, object]:
    command = [sys.executable, "-m", "dflash_mp.threads.deadlock", json.dumps(asdict(meeting))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_threads_that_use_no_device_thread_do_not_wait_for_each_other() -> None:
    found = _met(meetings_on(["cpu"])[0])
    assert not found["stuck"]
    assert not found["errors"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("needs", [NEW_GRAPH, BACKWARD_GRAPH])
def test_flex_attention_compiled_beside_a_backward_pass_that_compiles_is_stuck(needs: str) -> None:
    found = _met(Meeting(FLEX, needs, "cuda:0", "cuda:0"))
    assert found["stuck"] == ["A", "B"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "meeting",
    [
        Meeting(PRODUCT, NEW_GRAPH, "cuda:0", "cuda:0"),
        Meeting(FLEX, AHEAD, "cuda:0", "cuda:0"),
        Meeting(FLEX, NOTHING, "cuda:0", "cuda:0"),
        Meeting(FLEX, NEW_GRAPH, "cuda:0", "cuda:0", own_threads=True),
        Meeting(FLEX, BACKWARD_GRAPH, "cuda:0", "cuda:0", own_threads=True),
    ],
)
def test_other_compilations_and_threads_that_do_their_own_autograd_work_go_on(meeting: Meeting) -> None:
    found = _met(meeting)
    assert not found["stuck"]
    assert not found["errors"]


@pytest.mark.parametrize("own_threads", [False, True])
def test_flex_attention_asks_the_shared_autograd_thread_while_the_compile_lock_is_held(
    monkeypatch: pytest.MonkeyPatch, own_threads: bool
) -> None:
    """What the deadlock is made of, seen on a CPU: A's gradient trace, the lock, and whose thread does the work."""
    # "No backward pass on a CPU" is found before anything is traced; what is traced would be the same.
    monkeypatch.setattr(sys.modules["torch.nn.attention.flex_attention"], "_validate_device", lambda *tensors: None)
    tracing, seen = sys.modules["torch._higher_order_ops.flex_attention"], []
    original = tracing.create_fw_bw_graph

    def watched(*arguments: object) -> object:
        seen.append((compile_lock._is_owned(), torch._C._is_multithreading_enabled()))
        return original(*arguments)

    monkeypatch.setattr(tracing, "create_fw_bw_graph", watched)
    torch._dynamo.reset()
    meeting = Meeting(FLEX, NEW_GRAPH, "cpu", "cpu", own_threads)
    compiling, in_backward, errors = threading.Event(), threading.Event(), {}
    in_backward.set()
    action = partial(deadlock._compile, meeting, compiling, in_backward)
    thread = threading.Thread(target=deadlock._reporting, args=("A", errors, own_threads, action))
    with isolated():  # as in a meeting
        thread.start()
        thread.join(120)
    assert compiling.is_set()
    assert seen, errors
    assert all(locked for locked, _ in seen)
    assert any(shared for _, shared in seen) != own_threads


def test_the_own_backward_guard_acts_on_its_thread_only() -> None:
    seen: list[bool] = []

    def look() -> None:
        GUARDS["shim-own-backward"].in_thread()
        seen.append(torch._C._is_multithreading_enabled())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(30)
    assert seen == [False]
    assert torch._C._is_multithreading_enabled()
