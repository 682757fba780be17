"""One drafter that a feeder serves: what it has asked for, and which slots its rows are in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import xxhash

from dflash_mp.data.row import RowKey
from dflash_mp.stream.handshake import INBAND, SHARED_MEMORY
from dflash_mp.stream.messages import CHUNK_BYTES, GetWeights, Hello, Row, RowError, RowRequest
from dflash_mp.stream.shared_memory import Ring
from dflash_mp.stream.slots import Slot

OUTSTANDING = 3  # rows a drafter may ask one feeder for: one waiting, one in the making, one on the wire
RING_OUTSTANDING = 8  # by shared memory: what is made waits in the drafter's own ring


@dataclass
class Transfer:
    """A row in a slot: being made, then sent from `offset` on, then kept until it is released."""

    request: RowRequest
    slot: Slot
    made: bool = False
    checksum: int = 0
    offset: int = 0
    digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)  # of the first `summed` bytes
    summed: int = 0

    def frame(self, row_bytes: int, running: bool) -> tuple[Row, memoryview]:
        """What comes next of the row. Not locked, since a checksum takes long: only the I/O thread, which calls this, sends or frees a row."""
        payload = self.slot.view[self.offset : self.offset + CHUNK_BYTES]
        if running and self.summed == self.offset:
            self.digest.update(payload)
            self.summed, self.checksum = self.offset + len(payload), self.digest.intdigest()
        key, number = self.request.key, self.request.request
        return Row(number, key, self.slot.index, self.offset, row_bytes, self.checksum), payload


@dataclass(eq=False)
class Peer:
    """One drafter on one connection."""

    identity: bytes
    hello: Hello
    heard: float
    ring: Ring | None = None  # of the shared-memory lane; dies with this conversation: nobody else's rows are in it
    slots: int = 0  # of the feeder's memory that it may hold
    waiting: deque[RowRequest] = field(default_factory=deque)
    transfers: dict[int, Transfer] = field(default_factory=dict)  # by request
    ready: deque[Transfer] = field(default_factory=deque)  # made, not wholly sent
    errors: deque[RowError] = field(default_factory=deque)
    weights: deque[GetWeights] = field(default_factory=deque)
    rows: int = 0
    gone: bool = False

    @property
    def outstanding(self) -> int:
        """Rows asked for and not delivered. A row in the peer's own ring is delivered when it has been told where. Read it locked."""
        held = sum(t.offset == 0 for t in self.transfers.values()) if self.ring else len(self.transfers)
        return len(self.waiting) + held + len(self.errors)

    @property
    def most(self) -> int:
        """Rows that it may ask for at once."""
        return OUTSTANDING if self.ring is None else RING_OUTSTANDING

    @property
    def checksummed_whole(self) -> bool:
        """Whether its rows are checksummed before they are sent: in a ring that nobody else has, only if it asked for that."""
        return not self.hello.running_checksums if self.ring is None else self.ring.checksums

    @property
    def lane(self) -> str:
        return INBAND if self.ring is None else SHARED_MEMORY


@dataclass(eq=False)
class Job:
    """A row to be made for `peer`."""

    peer: Peer
    transfer: Transfer

    @property
    def key(self) -> RowKey:
        return self.transfer.request.key
