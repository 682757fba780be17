"""What can be put between threads that compile: nothing, three kinds of lock, the shim, and the older shim.

A guard has two sides. `installed` surrounds the whole run (a shim changes PyTorch there). `turns` gives each drafter thread a `Turn`, entered when
a micro-batch is ready and left when the step is over or the next one is asked for: what lies between is the forward pass, the backward
pass and, in the last micro-batch, the optimizer's update. The update is included because, since 2.13, a compilation in another
thread tells AdamW that it is being compiled. Locks wait at most `LOCK_SECONDS`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from dflash_mp.errors import ConfigError, DflashError

LOCK_SECONDS = 900.0


class LockTimeout(DflashError):
    """A drafter thread waited too long for its turn: the thread whose turn it is hangs."""


class Turn(Protocol):
    """One thread's side of a guard."""

    def enter(self, tokens: int) -> None:
        """Before the forward pass of a micro-batch whose rows have `tokens` tokens."""

    def leave(self, completed: bool) -> None:
        """After it; harmless when not entered. `completed`: the step ended without an error."""


@dataclass(frozen=True)
class Guard:
    """`turns()` is called once per run; what it returns, and `in_thread`, are called once in each drafter thread."""

    name: str
    says: str
    turns: Callable[[], Callable[[], Turn]]
    installed: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    in_thread: Callable[[], None] = lambda: None


class _Free:
    def enter(self, tokens: int) -> None:
        return

    def leave(self, completed: bool) -> None:
        return


class _Locked:
    """Holds `lock` during turns: all of them, or until the first step is completed."""

    def __init__(self, lock: threading.Lock, first_only: bool) -> None:
        self._lock, self._first_only, self._free, self._held = lock, first_only, False, False

    def enter(self, tokens: int) -> None:
        if not self._free:
            if not self._lock.acquire(timeout=LOCK_SECONDS):
                raise _too_long()
            self._held = True

    def leave(self, completed: bool) -> None:
        if self._held:
            self._held = False
            self._free = self._first_only and completed
            self._lock.release()


class _Readers:
    """Any number of threads share it, or one has it alone. Who wants it alone goes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing, self._alone, self._wanting = 0, False, 0

    def share(self) -> None:
        with self._changed:
            self._wait(lambda: not self._alone and self._wanting == 0)
            self._sharing += 1

    def take(self) -> None:
        with self._changed:
            self._wanting += 1
            try:
                self._wait(lambda: not self._alone and self._sharing == 0)
                self._alone = True
            finally:
                self._wanting -= 1

    def give_back(self) -> None:
        with self._changed:
            if self._alone:
                self._alone = False
            else:
                self._sharing -= 1
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool]) -> None:
        if not self._changed.wait_for(condition, LOCK_SECONDS):
            raise _too_long()


class _NewShapes:
    """Alone for a length that this thread has not completed yet, shared for the others."""

    def __init__(self, readers: _Readers) -> None:
        self._readers, self._seen, self._now = readers, set[int](), 0

    def enter(self, tokens: int) -> None:
        if tokens in self._seen:
            self._readers.share()
        else:
            self._readers.take()
        self._now = tokens

    def leave(self, completed: bool) -> None:
        if self._now:
            if completed:
                self._seen.add(self._now)
            self._now = 0
            self._readers.give_back()


def _too_long() -> LockTimeout:
    return LockTimeout(f"a drafter thread waited {LOCK_SECONDS:.0f} s for its turn", "train in separate processes")


def _all_free() -> Callable[[], Turn]:
    return _Free


def _lock(first_only: bool) -> Callable[[], Callable[[], Turn]]:
    def turns() -> Callable[[], Turn]:
        lock = threading.Lock()
        return lambda: _Locked(lock, first_only)

    return turns


def _new_shapes() -> Callable[[], Turn]:
    readers = _Readers()
    return lambda: _NewShapes(readers)


@contextlib.contextmanager
def _shim() -> Iterator[None]:
    from dflash_mp.threads.fx_shim import isolated

    with isolated():
        yield


def _compile_backward_ahead() -> None:
    """Backward graphs are compiled in the forward pass, so that the device's autograd thread has nothing to compile."""
    import torch._functorch.config

    torch._functorch.config.force_non_lazy_backward_lowering = True


def _own_backward() -> None:
    """Autograd work of the calling thread, tracing's included, is done by it, not by the thread that all share for the device."""
    import torch

    torch.autograd.set_multithreading_enabled(False)


@contextlib.contextmanager
def _module_replacement() -> Iterator[None]:
    from dflash_mp.threads.module_replacement import replaced

    with replaced():
        yield


GUARDS = {
    guard.name: guard
    for guard in (
        Guard("none", "the original", _all_free),
        Guard("first-call-lock", "a lock until a thread's first step is done", _lock(first_only=True)),
        Guard("full-lock", "one lock around every forward, backward and update", _lock(first_only=False)),
        Guard("new-shape-lock", "alone for a thread's new lengths, together for known ones", _new_shapes),
        Guard(
            "module-replacement",
            "the older shim: torch.fx._symbolic_trace replaced by a wrapper",
            _all_free,
            _module_replacement,
        ),
        Guard("shim", "PyTorch's states made thread-local (fx_shim)", _all_free, _shim),
        Guard(
            "shim-eager-backward",
            "the shim, backward graphs compiled in the forward pass",
            _all_free,
            _shim,
            _compile_backward_ahead,
        ),
        Guard(
            "shim-own-backward",
            "the shim, each backward pass in the thread that asked for it",
            _all_free,
            _shim,
            _own_backward,
        ),
    )
}


def guard_named(name: str) -> Guard:
    """Raises `ConfigError` for a name that is not in `GUARDS`."""
    if name not in GUARDS:
        raise ConfigError(f"there is no guard {name!r}", f"choose from {', '.join(GUARDS)}")
    return GUARDS[name]
