"""Who a feeder serves, what each has asked for, and where its rows are: the state shared by the feeder's two threads.

Everything here is bounded: a peer may have a few rows asked for, and holds at most `SLOTS_PER_PEER` slots of memory (`MOST_SLOTS` where
all drafters of the run, and one more, can), or those of its own ring of shared memory. No more peers are admitted than there is memory
for. One that asks for more than it was told breaks the protocol, which the I/O thread answers by dropping it. Peers take turns, one
row each; a peer's own rows keep its order. A slot is reused when its drafter released it or is gone: never because a send was
reported done.

All methods may be called from either thread. The compute thread waits in `next_job`; nothing else waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import replace
from typing import Literal

from dflash_mp.data.row import RowKey
from dflash_mp.stream.codec import ProtocolError
from dflash_mp.stream.feeder_peer import Job, Peer, Transfer
from dflash_mp.stream.feeder_snapshot import DrafterStatus, Snapshot, TimeSpent
from dflash_mp.stream.messages import (
    CHUNK_BYTES,
    Get,
    GetWeights,
    Hello,
    Message,
    Placed,
    Refused,
    Release,
    RowError,
    Weights,
)
from dflash_mp.stream.shared_memory import Ring
from dflash_mp.stream.slots import Slot, SlotPool
from dflash_mp.stream.weights import WeightsServer

SLOTS_PER_PEER = 2  # that are surely there: a row is made while another is sent
MOST_SLOTS = 3  # where memory allows: one is made, one sent, and one received, whose last bytes are not there yet
_WEIGHT_REQUESTS = 8


class Peers:
    """The peers of a feeder whose rows have `row_bytes` bytes."""

    def __init__(self, pool: SlotPool, row_bytes: int, held_out_rows: int) -> None:
        self.busy: tuple[RowKey, float] | None = None  # the row in the making that comes next, and since when it does
        self.rows = 0
        self.delivered = 0  # rows that their drafter took over
        self.failed_rows = {True: 0, False: 0}  # by whether another attempt may help
        self._pool = pool
        self._row_bytes = row_bytes
        self._held_out_rows = held_out_rows
        self._slots_per_peer = min(SLOTS_PER_PEER, pool.capacity)
        self._peers: dict[bytes, Peer] = {}
        self._turns: deque[Peer] = deque()  # the peer served longest ago first
        self._making: list[Job] = []  # in the order in which they were started
        self._changed = threading.Condition()
        self._spent = TimeSpent()
        self._doing: Literal["computing", "idle", "blocked"] = "idle"
        self._since = time.monotonic()

    @property
    def capacity(self) -> int:
        """Rows that the feeder's memory holds."""
        return self._pool.capacity

    # -- I/O thread ---------------------------------------------------------------------------------------------------------------

    def greet(
        self, identity: bytes, hello: Hello, ring: Ring | None = None, reserved: int = 0
    ) -> tuple[Refused | None, list[Peer]]:
        """Admit a drafter, with `reserved` rows of memory set aside for rings of others that have not said HELLO yet; returns a refusal or
        None, and the peers whose place it takes (they are removed).
        """
        with self._changed:
            replaced = [p for p in self._peers.values() if p.hello.peer == hello.peer or p.identity == identity]
            others = len(self._peers) - len(replaced)
            rows = self._rows(replaced, [ring]) + reserved
            if rows > self._pool.capacity:
                self._take_back()
                rows = self._rows(replaced, [ring]) + reserved
            if rows > self._pool.capacity:
                needed = rows * self._row_bytes / 2**20
                return Refused(
                    "full",
                    f"the feeder has memory for {others} drafters of {self._row_bytes / 2**20:.1f} MiB rows",
                    f"start it with feed.memory_mib of at least {needed:.0f}, or start another feeder",
                ), []
            for old in replaced:
                self._remove(old)
            peer = Peer(identity, hello, time.monotonic(), ring)
            if ring is None:
                plenty = MOST_SLOTS * (max(len(self._peers) + 1, hello.world) + 1) <= self._pool.capacity
                spare = self._pool.capacity - rows
                peer.slots = self._slots_per_peer + (min(spare, MOST_SLOTS - SLOTS_PER_PEER) if plenty else 0)
            self._peers[identity] = peer
            self._turns.append(peer)
            return None, replaced

    def find(self, identity: bytes) -> Peer | None:
        """The admitted peer with this identity; being asked for counts as a sign of life."""
        with self._changed:
            peer = self._peers.get(identity)
            if peer is not None:
                peer.heard = time.monotonic()
            return peer

    def rows_in_use(self, but: str) -> int:
        """Rows of memory that belong to peers, those named `but` left out."""
        with self._changed:
            return self._rows([peer for peer in self._peers.values() if peer.hello.peer == but], [])

    def get(self, peer: Peer, message: Get) -> None:
        """Queue the rows asked for. Raises `ProtocolError` if there are too many or one is asked for twice."""
        with self._changed:
            for request in message.requests:
                asked = {r.request for r in peer.waiting} | set(peer.transfers) | {e.request for e in peer.errors}
                if request.request in asked:
                    raise ProtocolError(f"GET uses the request number {request.request} twice")
                if peer.outstanding >= peer.most:
                    raise ProtocolError(f"GET asks for more than {peer.most} rows at once")
                if request.key.split == "held_out" and request.key.ordinal >= self._held_out_rows:
                    why = f"there are {self._held_out_rows} held-out rows"
                    peer.errors.append(RowError(request.request, request.key, why, retryable=False))
                else:
                    peer.waiting.append(request)
            self._changed.notify()

    def get_weights(self, peer: Peer, message: GetWeights) -> None:
        with self._changed:
            if len(peer.weights) >= _WEIGHT_REQUESTS:
                raise ProtocolError(f"GET_WEIGHTS asks for more than {_WEIGHT_REQUESTS} chunks at once")
            peer.weights.append(message)

    def release(self, peer: Peer, message: Release) -> None:
        """Free the slot of a row. Raises `ProtocolError` unless all of that row was sent to this peer from that slot."""
        with self._changed:
            transfer = peer.transfers.get(message.request)
            if transfer is None or transfer.slot.index != message.slot or transfer.offset < self._row_bytes:
                raise ProtocolError(
                    f"RELEASE of request {message.request}, slot {message.slot}, which it does not hold"
                )
            del peer.transfers[message.request]
            self._give_back(peer, transfer)
            peer.rows += 1
            self.delivered += 1
            if any(each.waiting for each in self._peers.values()):
                self._changed.notify()

    def remove(self, peer: Peer) -> None:
        """Forget the peer and free what it holds."""
        with self._changed:
            self._remove(peer)

    def remove_silent(self, before: float) -> list[Peer]:
        """Remove and return the peers not heard of since the time `before`."""
        with self._changed:
            silent = [peer for peer in self._peers.values() if peer.heard < before]
            for peer in silent:
                self._remove(peer)
            return silent

    def excuse_silence(self) -> None:
        """Count every peer as heard now: this process itself was stopped for a while."""
        with self._changed:
            for peer in self._peers.values():
                peer.heard = time.monotonic()

    def all(self) -> list[Peer]:
        with self._changed:
            return list(self._peers.values())

    def queued(self) -> int:
        with self._changed:
            return sum(len(peer.waiting) for peer in self._peers.values())

    def snapshot(self) -> Snapshot:
        """Everything that is counted, up to now."""
        with self._changed:
            self._now(self._doing)
            peers = list(self._peers.values())
            return Snapshot(
                made=self.rows,
                delivered=self.delivered,
                failed=dict(self.failed_rows),
                queued=sum(len(peer.waiting) for peer in peers),
                held=sum(len(peer.transfers) for peer in peers),
                ring_rows=sum(peer.ring.rows for peer in peers if peer.ring is not None),
                current_seconds=0.0 if self.busy is None else max(0.0, time.monotonic() - self.busy[1]),
                spent=replace(self._spent),
                drafters=tuple(
                    DrafterStatus(peer.hello.peer, peer.hello.rank, peer.lane, peer.outstanding, peer.rows)
                    for peer in peers
                ),
            )

    def time_spent(self) -> TimeSpent:
        """Up to now, what is under way included."""
        with self._changed:
            self._now(self._doing)
            return replace(self._spent)

    def next_outgoing(self, peer: Peer, weights: WeightsServer) -> tuple[Message, memoryview | None] | None:
        """What to send to the peer next. Call `sent` when it has been sent; until then it stays what is next."""
        with self._changed:
            if peer.errors:
                return peer.errors[0], None
            if peer.weights:
                return weights.chunk(peer.weights[0])
            if not peer.ready:
                return None
            row = peer.ready[0]
            if peer.ring is not None:
                return Placed(row.request.request, row.request.key, row.slot.index, row.checksum), None
        return row.frame(self._row_bytes, peer.hello.running_checksums)

    def sent(self, peer: Peer, message: Message) -> None:
        """`message`, got from `next_outgoing`, is on its way."""
        with self._changed:
            if isinstance(message, RowError):
                peer.errors.popleft()
            elif isinstance(message, Weights):
                peer.weights.popleft()
            else:
                peer.ready[0].offset += self._row_bytes if isinstance(message, Placed) else CHUNK_BYTES
                if peer.ready[0].offset >= self._row_bytes:
                    peer.ready.popleft()

    # -- compute thread -----------------------------------------------------------------------------------------------------------

    def next_job(self, seconds: float) -> Job | None:
        """The next row to make, of the peer whose turn it is; None after `seconds` without one. Others may still be in the making."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                job, wanted = self._take_turn()
                if job is not None:
                    self._making.append(job)
                self._now("computing" if self._making else "blocked" if wanted else "idle")
                if job is not None and self.busy is None:
                    self.busy = job.key, self._since
                if job is not None or self._since >= deadline:
                    return job
                self._changed.wait(deadline - self._since)

    def finish(self, job: Job, checksum: int) -> None:
        """The row is in its slot: send it."""
        with self._changed:
            self._made(job)
            self.rows += 1
            if job.peer.gone:
                self._give_back(job.peer, job.transfer)
                return
            job.transfer.made, job.transfer.checksum = True, checksum
            job.peer.ready.append(job.transfer)

    def fail(self, job: Job, why: str, retryable: bool) -> None:
        """The row could not be made: say so to who asked."""
        with self._changed:
            self._made(job)
            self.failed_rows[retryable] += 1
            self._give_back(job.peer, job.transfer)
            if not job.peer.gone:
                request = job.transfer.request
                del job.peer.transfers[request.request]
                job.peer.errors.append(RowError(request.request, request.key, why, retryable))

    def _take_turn(self) -> tuple[Job | None, bool]:
        wanted = False
        for peer in list(self._turns):
            if not peer.waiting:
                continue
            wanted = True
            slot = self._slot_for(peer)
            if slot is not None:
                self._turns.remove(peer)
                self._turns.append(peer)
                transfer = Transfer(peer.waiting.popleft(), slot)
                peer.transfers[transfer.request.request] = transfer
                return Job(peer, transfer), True
        return None, wanted

    def _slot_for(self, peer: Peer) -> Slot | None:
        if peer.ring is not None:
            return peer.ring.take()
        return self._pool.take() if len(peer.transfers) < peer.slots else None

    def _take_back(self) -> None:
        """Let nobody hold more slots than are surely there, but for those held now."""
        for peer in self._peers.values():
            peer.slots = min(peer.slots, max(self._slots_per_peer, len(peer.transfers)))

    def _give_back(self, peer: Peer, transfer: Transfer) -> None:
        (peer.ring or self._pool).give_back(transfer.slot)
        if peer.gone:
            self._trim()

    def _trim(self) -> None:
        """Let go of memory that no peer who is here can use."""
        self._pool.trim(sum(peer.slots for peer in self._peers.values()))

    def _rows(self, leaving: list[Peer], joining: list[Ring | None]) -> int:
        """Rows of memory that the peers take up at most, once those `leaving` have left, and others came with these rings, or without one."""
        stay = [peer for peer in self._peers.values() if peer not in leaving]
        used = self._pool.used - sum(len(peer.transfers) for peer in leaving if peer.ring is None)
        inband = joining.count(None) * self._slots_per_peer + sum(peer.slots for peer in stay)
        rings = [peer.ring for peer in stay] + joining
        return max(inband, used) + sum(ring.rows for ring in rings if ring is not None)

    def _made(self, job: Job) -> None:
        """It is in the making no longer."""
        next_before = self._making[0]
        self._making.remove(job)
        self._now("computing" if self._making else "idle")
        if next_before is job:
            self.busy = (self._making[0].key, self._since) if self._making else None

    def _now(self, doing: Literal["computing", "idle", "blocked"]) -> None:
        """Book the time since the last call on what was done, and begin `doing`."""
        now = time.monotonic()
        setattr(self._spent, self._doing, getattr(self._spent, self._doing) + now - self._since)
        self._doing, self._since = doing, now

    def _remove(self, peer: Peer) -> None:
        if self._peers.pop(peer.identity, None) is None:
            return
        self._turns.remove(peer)
        peer.gone = True
        for transfer in peer.transfers.values():
            if transfer.made:  # the compute thread gives back the slots that it is filling
                self._give_back(peer, transfer)
        peer.ready.clear()
        self._trim()
        self._changed.notify()
