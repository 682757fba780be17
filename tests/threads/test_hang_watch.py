"""A hang is told soon after the last event and the last computation, and never before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from dflash_mp.threads import watch
from dflash_mp.threads.watch import HangWatch, ProcessorTime, processor_time

BURN = "import time\nwhile time.process_time() < 1.0: pass\n"


def told_at(
    monkeypatch: pytest.MonkeyPatch, used_at: Callable[[float], float], event_at: Callable[[float], float]
) -> float | None:
    """When a watch with 10 quiet seconds, asked five times a second for 60 s, tells of a hang."""
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch, "processor_time", lambda: ProcessorTime(used_at(now[0]), {}))
    asked = HangWatch(10.0)
    for tick in range(1, 300):
        now[0] = tick / 5
        if asked.hung(event_at(now[0])):
            return now[0]
    return None


def test_a_hang_is_told_when_computing_ended_that_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told_at(monkeypatch, lambda now: min(now, 11.0), lambda now: 0.0)
    assert found is not None
    assert 20.5 <= found <= 22.0


def test_a_hang_is_told_when_the_last_event_is_that_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told_at(monkeypatch, lambda now: 0.0, lambda now: min(now, 11.0))
    assert found is not None
    assert 21.0 <= found <= 22.0


@pytest.mark.parametrize("used_each_second", [0.1, 3.0])
def test_computing_is_no_hang(monkeypatch: pytest.MonkeyPatch, used_each_second: float) -> None:
    assert told_at(monkeypatch, lambda now: used_each_second * now, lambda now: 0.0) is None


def test_events_are_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told_at(monkeypatch, lambda now: 0.0, lambda now: now - now % 9.0) is None


def test_the_end_of_what_computed_much_hides_no_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second another descendant that has used 5 s ends unseen, while one goes on computing."""
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])

    def used() -> ProcessorTime:
        ending = {pid: 5.0 for pid in range(100, 160) if pid - 100 > now[0]}
        return ProcessorTime(now[0] + sum(ending.values()), {1: now[0], **ending})

    monkeypatch.setattr(watch, "processor_time", used)
    asked = HangWatch(10.0)
    for tick in range(1, 290):
        now[0] = tick / 5
        assert not asked.hung(0.0)


def test_what_a_child_computed_counts_while_it_lives_and_after_its_end() -> None:
    before = processor_time()
    program = BURN + "print(flush=True)\ninput()\n"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert processor_time().since(before) > 0.9
        child.communicate(b"\n")
    assert processor_time().since(before) > 0.9


def test_a_child_that_nobody_waits_for_takes_nothing_from_what_others_compute() -> None:
    grandchild = BURN + "print(flush=True)\ninput()\n"
    program = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"  # the kernel buries its children
        f"child = subprocess.Popen([sys.executable, '-c', {grandchild!r}], stdin=subprocess.PIPE)\n"
        "input()\nchild.communicate(b'\\n')\n"
        "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass\nprint(flush=True)\ninput()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before = processor_time()
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        after = processor_time()
        assert after.total < before.total
        assert 0.3 < after.since(before) < 0.9
        child.communicate(b"\n")
