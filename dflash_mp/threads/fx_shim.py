"""Opt-in: make PyTorch's process-wide tracing and compilation states local to a thread, so that threads can trace and compile.

`isolated()` (or `install` and `uninstall`) changes the running PyTorch in place and puts the very objects back that were there. It changes
only what `states.STATES` finds to be process-wide, leaves alone what PyTorch has made thread-local by itself, and lets one FX trace run
at a time, under Dynamo's own compile lock. A thread that traces and calls a compiled function still gets PyTorch's error. After
installing it runs the cases of `races` against itself. When a layout is unknown, a trace is running or a case fails, `FxShimError` says why and
nothing is changed. Cost: about a second to install (mostly the first compilation), a thread-local look-up per use.

What it does not cure: on CUDA, a compilation on the device's autograd thread deadlocks with flex_attention's (docs/race.md); torch.compile's
configuration, which is per thread since 2.12; the process-wide random generators; switches in C that are set around every call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock

from dflash_mp.errors import DflashError
from dflash_mp.threads.inplace import Changes, UnknownLayout
from dflash_mp.threads.states import ABSENT, GLOBAL, LOCAL, STATES, State

DONE = "made thread-local"
TURN_SECONDS = 900.0
_IDLE_SECONDS = 60.0
_REMEDY = "train in separate processes (`dflash-mp run`): they share none of these states"


class FxShimError(DflashError):
    """The shim cannot be installed or removed here, or a trace waited too long. After a failed `install` PyTorch is as it was."""


@dataclass(frozen=True)
class Report:
    """What the shim found and did: state → "made thread-local", or why it was left alone."""

    torch: str
    states: dict[str, str]


class _Turn:
    """A reentrant lock for traces, with a time-out instead of a hang."""

    def __init__(self, lock: Any, seconds: float) -> None:
        self._lock, self._seconds, self._mutex, self.waiting = lock, seconds, threading.Lock(), 0

    def __enter__(self) -> None:
        if self._lock.acquire(blocking=False):
            return
        self._count(1)
        try:
            if not self._lock.acquire(timeout=self._seconds):
                raise FxShimError(
                    f"an FX trace waited {self._seconds:.0f} s for the compilation or trace of another thread", _REMEDY
                )
        finally:
            self._count(-1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def _count(self, change: int) -> None:
        with self._mutex:
            self.waiting += change


@dataclass
class _Installed:
    changes: Changes
    turn: _Turn
    report: Report
    kept: bool = False  # by `install`: the end of a block does not remove it
    blocks: int = 0  # of `isolated` that are open


_mutex = threading.RLock()
_installed: _Installed | None = None


def probe() -> dict[str, str]:
    """What each state is in this PyTorch: process-wide, thread-local, absent, or what about it is not known. Changes nothing."""
    return {state.name: state.probe() for state in STATES}


def install(*, turn_seconds: float = TURN_SECONDS, states: Sequence[State] = STATES) -> Report:
    """Make `states` thread-local. Does nothing when that is done already. Raises `FxShimError`, with PyTorch as it was."""
    with _mutex:
        held = _install(turn_seconds, states)
        held.kept = True
        return held.report


def uninstall() -> bool:
    """Put every object back; False when nothing was installed. Raises `FxShimError` while another thread traces or compiles."""
    global _installed
    with _mutex:
        if _installed is None:
            return False
        with _nothing_compiles():
            _installed.changes.undo()
            _installed = None
        return True


@contextlib.contextmanager
def isolated(*, turn_seconds: float = TURN_SECONDS) -> Iterator[Report]:
    """The shim within a block. Blocks may nest; the outermost removes it, unless `install` had been called before."""
    with _mutex:
        held = _install(turn_seconds, STATES)
        held.blocks += 1
    try:
        yield held.report
    finally:
        with _mutex:
            held.blocks -= 1
            if held is _installed and held.blocks == 0 and not held.kept:
                uninstall()


def installed() -> bool:
    """Whether the shim is in place."""
    return _installed is not None


def waiting() -> int:
    """Threads that wait for their turn to trace."""
    return 0 if _installed is None else _installed.turn.waiting


def _install(turn_seconds: float, states: Sequence[State]) -> _Installed:
    global _installed
    if _installed is not None:
        return _installed
    found = {state.name: state.probe() for state in states}
    unknown = [text for text in found.values() if text not in (GLOBAL, LOCAL, ABSENT)]
    if unknown:
        raise FxShimError(f"PyTorch {torch.__version__} has an unknown layout: {'; '.join(unknown)}", _REMEDY)
    changes, turn = Changes(), _Turn(compile_lock, turn_seconds)
    with _nothing_compiles():
        try:
            for isolate in dict.fromkeys(state.isolate for state in states if found[state.name] == GLOBAL):
                isolate(changes, turn)
        except UnknownLayout as error:
            changes.undo()
            raise FxShimError(f"PyTorch {torch.__version__}: {error}", _REMEDY) from None
        except BaseException:
            changes.undo()
            raise
    done = {name: DONE if text == GLOBAL else text for name, text in found.items()}
    _installed = _Installed(changes, turn, Report(torch.__version__, done))
    _check_or_remove()
    return _installed


def _check_or_remove() -> None:
    from dflash_mp.threads.races import failures_under_shim

    try:
        failures = failures_under_shim()
    except BaseException:
        uninstall()
        raise
    if failures:
        uninstall()
        raise FxShimError(f"on PyTorch {torch.__version__} the shim does not work: {'; '.join(failures)}", _REMEDY)


@contextlib.contextmanager
def _nothing_compiles() -> Iterator[None]:
    if not compile_lock.acquire(timeout=_IDLE_SECONDS):
        raise FxShimError(
            "another thread is compiling or tracing",
            "install the shim before the threads start and remove it after they end",
        )
    try:
        yield
    finally:
        compile_lock.release()
