"""Lets one thread end another's `zmq.Poller.poll` early."""

from __future__ import annotations

import contextlib
import os
import threading


class Wakeup:
    """An eventfd: `set` from any thread, any number of times; register `fd` with a poller and `clear` it when it reads ready."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_set = False

    def set(self) -> None:
        with self._lock:
            if self.fd >= 0 and not self._is_set:
                self._is_set = True
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with self._lock:
            self._is_set = False
            with contextlib.suppress(BlockingIOError):  # not set
                os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
