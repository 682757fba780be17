"""A drafter's question for a feeder's shared memory: asked by a thread of its own before each conversation, answered or given up in seconds.

It is given up early enough for HELLO to come before the feeder cuts the connection off. A feeder takes the memory before it answers, which is no wait for the stream's thread. Whatever goes wrong is a reason to use the
in-band lane, never an error.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dflash_mp.stream import ring_messages as rm
from dflash_mp.stream.codec import ProtocolError
from dflash_mp.stream.fd_passing import LaneError, connect, lane_address, receive, send
from dflash_mp.stream.handshake import RING_PATIENCE
from dflash_mp.stream.shared_memory import MappedRing

_LONGEST_SECONDS = 15.0  # without a sign of progress


@dataclass(frozen=True)
class LaneWishes:
    """What a drafter asks its feeders for. `cuda_device`: the ring is pinned for it."""

    request: rm.RingRequest
    cuda_device: int | None = None

    def share(self, feeders: int) -> LaneWishes:
        """What to ask one of so many feeders for, if `request` is for all: rows of one window lie in all rings together."""
        return replace(self, request=replace(self.request, window_bytes=self.request.window_bytes // max(1, feeders)))


def lane_wishes(rank: int, world: int, *, window_bytes: int, least: int, pin: bool, checksums: bool) -> LaneWishes:
    """What rank `rank` asks its feeders for: rings of `window_bytes`, or of `least` rows if those are more."""
    pin = pin and torch.cuda.is_available()
    request = rm.RingRequest(rm.VERSION, f"rank {rank}", world, window_bytes, least, pin, checksums)
    return LaneWishes(request, torch.cuda.current_device() if pin else None)


class LaneRequest:
    """Under way from construction on. When `done`, `ring` is there or `why` says why not; `wake` is called then."""

    def __init__(self, endpoint: str, wishes: LaneWishes | None, seconds: float, wake: Callable[[], None]) -> None:
        self.ring: MappedRing | None = None
        self.why = ""
        self.checksums = wishes is not None and wishes.request.checksums
        self.done = False
        self._settling = threading.Lock()
        self._seconds = min(RING_PATIENCE * seconds, 10 * _LONGEST_SECONDS)
        self._since = time.monotonic()
        if wishes is None:
            self._deny(LaneError("switched off"))
            return
        try:
            address = lane_address(endpoint)
        except LaneError as error:
            self._deny(error)
            return
        ask = (address, wishes, min(seconds, _LONGEST_SECONDS), self._seconds, wake)
        threading.Thread(target=self._main, args=ask, name="lane", daemon=True).start()

    def expire(self, now: float) -> None:
        """Give up if it has taken too long, whatever it is at: it may be pinning memory."""
        if not self.done and now - self._since > self._seconds:
            self._deny(_too_late(self._seconds))

    def _main(self, address: str, wishes: LaneWishes, silence: float, seconds: float, wake: Callable[[], None]) -> None:
        try:
            ring = _ask(address, wishes, silence, seconds)
            with self._settling:
                if not self.done:
                    self.ring, self.done = ring, True
        except (LaneError, ProtocolError) as error:
            self._deny(error)
        except Exception as error:
            self._deny(LaneError(f"{type(error).__name__}: {error}", "this is a bug: report it"))
        wake()

    def _deny(self, error: LaneError | ProtocolError) -> None:
        with self._settling:
            if not self.done:
                self.why = f"{error.what}; {error.remedy}" if error.remedy else error.what
                self.done = True


def _too_late(seconds: float) -> LaneError:
    return LaneError(f"its memory was not there after {seconds:.0f} s")


def _ask(address: str, wishes: LaneWishes, silence: float, seconds: float) -> MappedRing:
    deadline = time.monotonic() + seconds
    with connect(address, silence) as connection:
        send(connection, rm.encode(wishes.request))
        while time.monotonic() < deadline:
            data, fd = receive(connection)
            try:
                answer = rm.decode(data)
                if isinstance(answer, rm.RingDenied):
                    raise LaneError(answer.reason, answer.remedy)
                if isinstance(answer, rm.RingOffer) and fd is not None:
                    return MappedRing(fd, answer, cuda_device=wishes.cuda_device)
                if not isinstance(answer, rm.RingProgress):
                    raise ProtocolError("the lane's socket gave no answer to the request")
            finally:
                if fd is not None:
                    os.close(fd)
    raise _too_late(seconds)
