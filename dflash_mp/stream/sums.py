"""The drafter's checksums of what comes through a socket, on a thread of their own: the stream's thread only copies.

xxh3 and numpy's copy both let other threads run, so one chunk is summed while the next one is copied. Chunks are
summed where they lie, in order; memory that gets other contents meanwhile gives another sum, and whoever asked has to know that. The thread
holds on to nothing that it has summed. If it fails, `pump` raises its error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import xxhash


class Sums:
    """`start`, then `close`. Queued work can't grow beyond what it names: slots and tensors that are there anyway."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called, by this thread, when `pump` has something to do."""
        self._wake = wake
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ended: deque[Callable[[], None]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="sums", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float) -> None:
        """End the thread after the piece that it is at, and wait for that at most `seconds`. What is queued is dropped."""
        self._closed = True
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(seconds)

    # -- stream's thread ----------------------------------------------------------------------------------------------------------

    def add(self, digest: xxhash.xxh3_64, piece: memoryview) -> None:
        """`digest`, which is this thread's from now on, is to take in `piece` (format B)."""
        self._jobs.put(partial(digest.update, piece))

    def end(self, digest: xxhash.xxh3_64, then: Callable[[int], None]) -> None:
        """Nothing follows: `pump` is to call `then` with the sum."""
        self._jobs.put(partial(self._end, digest, then))

    def pump(self) -> None:
        """Hand out the sums that have ended; raises what ended the thread."""
        while self._ended:
            self._ended.popleft()()

    # -- the thread ---------------------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while self._one():
                pass
        except BaseException as error:
            self._ended.append(partial(_raise, error))
            self._wake()

    def _one(self) -> bool:
        """The next job, kept no longer than it takes; False if there is to be none."""
        job = self._jobs.get()
        if job is None or self._closed:
            return False
        job()
        return True

    def _end(self, digest: xxhash.xxh3_64, then: Callable[[int], None]) -> None:
        self._ended.append(partial(then, digest.intdigest()))
        self._wake()


def _raise(error: BaseException) -> None:
    raise error
