"""SIGTERM and SIGINT of a rank: the first asks for a stop, which all ranks then agree on; the second ends the process.

A thread takes the signals, because the main thread may be inside a collective or a compilation for minutes. It also tells the other ranks,
through the store that they met at: one of them may wait for a row that doesn't come, while this rank waits for it. Before training begins there is nothing to save, and the first signal ends the process.
"""

from __future__ import annotations

import logging
import os
import signal
import time

import torch.distributed as dist

from dflash_mp.process import SAME_SIGNAL_SECONDS, watch_signals
from dflash_mp.stream.client_patience import StopRequest

log = logging.getLogger(__name__)
_ASK_SECONDS = 0.5  # between two looks at what other ranks say
_KEY = "dflash_mp/stop"


class Stopping:
    """`requested`: the request that this process got. `training` is set when there is something to save. Make it in the main thread."""

    def __init__(self) -> None:
        self.requested: StopRequest | None = None
        self.training = False
        self._told: StopRequest | None = None  # by another rank
        self._store: dist.Store | None = None
        self._asked_at = 0.0
        watch_signals((signal.SIGTERM, signal.SIGINT), self._on_signal)

    def share(self, store: dist.Store | None) -> None:
        """Exchange requests with the other ranks through `store`; None in a world of one."""
        if store is not None:  # a connection of its own: waits on the other don't hold it up
            self._store = store.clone()  # type: ignore[attr-defined]  # the stubs lack it

    def finished(self) -> None:
        """All is saved: a late signal must not make a failure of it. Call it from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def anywhere(self) -> StopRequest | None:
        """The request of this process or, found out at most twice a second, of another rank. For use while waiting."""
        if self.requested is not None or self._told is not None or self._store is None:
            return self.requested or self._told
        now = time.monotonic()
        if now - self._asked_at > _ASK_SECONDS:
            self._asked_at = now
            try:
                if self._store.check([_KEY]):
                    self._told = StopRequest(signal.Signals(int(self._store.get(_KEY))), now)
            except (
                RuntimeError,
                ValueError,
            ) as error:  # the process that held the store has gone, and torchrun with it
                self._lose_store(error)
        return self._told

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if not self.training or (self.requested is not None and now - self.requested.at > SAME_SIGNAL_SECONDS):
            os._exit(128 + number)
        if self.requested is None:
            self.requested = StopRequest(number, now)
            self._tell(number)

    def _tell(self, number: signal.Signals) -> None:
        if self._store is not None:
            try:
                self._store.set(_KEY, str(int(number)))
            except RuntimeError as error:
                self._lose_store(error)

    def _lose_store(self, error: Exception) -> None:
        self._store = None
        log.warning("the other ranks can't be asked whether to stop: %s", str(error).splitlines()[0])
