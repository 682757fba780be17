"""A feeder's message handling without sockets: hostile drafters beside an honest one, a million messages in minutes.

The service is the real one; its ROUTER is replaced by queues, and its two threads by calls in turn; a seed and a corpus repeat everything.
The honest drafter checks each row that it gets, bit for bit.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from dataclasses import replace

import numpy as np
import torch
import xxhash
import zmq

from dflash_mp.bench.fuzz_mutations import Frames, Mutator, Tally
from dflash_mp.bench.synthetic import RUN, synthetic_expectations, synthetic_row, synthetic_weights
from dflash_mp.data.row import RowKey, Split
from dflash_mp.errors import DflashError
from dflash_mp.stream import messages as m
from dflash_mp.stream.feeder import FeederService
from dflash_mp.stream.feeder_peer import OUTSTANDING
from dflash_mp.stream.plan import StreamPlan

_ROOM = 16  # messages that a peer's pipe holds, as in `set_feeder_options`
_HOSTILE = 3
encoded = functools.lru_cache(maxsize=256)(m.encode)


class FakeRouter:
    """As much of a ROUTER as the I/O thread uses, in memory."""

    def __init__(self) -> None:
        self.incoming: deque[tuple[bytes, bool]] = deque()
        self.outgoing: dict[bytes, deque[Frames]] = {}

    def put(self, identity: bytes, frames: Frames) -> None:
        """A message has come."""
        for index, frame in enumerate([identity, *frames]):
            self.incoming.append((frame, index < len(frames)))

    def recv(self, flags: int = 0, copy: bool = True) -> _Frame:
        if not self.incoming:
            raise zmq.Again()
        return _Frame(*self.incoming.popleft())

    def send_multipart(self, frames: list[bytes | memoryview], flags: int = 0, copy: bool = True) -> None:
        identity, *rest = (bytes(frame) for frame in frames)
        pipe = self.outgoing.setdefault(identity, deque())
        if len(pipe) >= _ROOM:
            raise zmq.Again()
        pipe.append(rest)


class _Frame:
    def __init__(self, data: bytes, more: bool) -> None:
        self.bytes, self.more = data, more

    def get(self, option: int) -> int:
        return -1


class FeederFuzz:
    """`step` sends one hostile message; `finish` checks that the honest drafter still gets its rows."""

    def __init__(self, endpoint: str, plan: StreamPlan, seed: int, corpus: list[Frames]) -> None:
        self.tally = Tally()
        self.rows = 0  # of the honest drafter
        self._plan = plan
        self._draw = random.Random(seed)
        self._mutator = Mutator(self._draw, corpus)
        self._service = FeederService(endpoint, plan, synthetic_weights(plan), run=RUN, memory_mib=1.0)
        self._io, self._real = self._service._io, self._service._io._router
        self._router = FakeRouter()
        self._io._router = self._router  # type: ignore[assignment]
        self._drafters = [_Drafter(b"hostile%d" % n, f"rank {n}", plan) for n in range(_HOSTILE)]
        self._honest = _Drafter(b"honest", "honest", plan)
        self._past: deque[Frames] = deque(maxlen=64)
        self._messages = 0
        self._known: dict[RowKey, bytes] = {}

    def step(self) -> None:
        """One message of one hostile drafter."""
        drafter = self._draw.choice(self._drafters)
        self._hear(drafter)
        message = drafter.next_message(self._draw)
        frames, kind = [encoded(message)], "as it should be"
        chance = self._draw.random() * (1.0 if drafter.greeted else 2.5)  # most conversations begin
        if chance < 0.1 and self._past:
            kind, frames = "replay", self._draw.choice(self._past)
        elif chance < 0.5:
            kind, frames = self._mutator.mutate(frames)
        else:
            self._past.append(frames)
        self.tally.sent(message, kind)
        self._router.put(drafter.identity, frames)
        self._messages += 1
        self._serve()
        if self._messages % 40 == 0:
            self.honest_step()

    def honest_step(self) -> None:
        """The honest drafter takes what has come, checks it, and asks for more."""
        for message, payload in self._honest.hear(self._router):
            if isinstance(message, m.Refused):
                raise DflashError(f"an honest drafter was refused: {message.reason}")
            if isinstance(message, m.Row):
                if payload != self._bits(message.key) or xxhash.xxh3_64_intdigest(payload) != message.checksum:
                    raise DflashError(f"an honest drafter got wrong bits for {message.key}")
                self.rows += 1
        self._router.put(self._honest.identity, [encoded(self._honest.next_message(self._draw, honest=True))])
        self._serve()

    def finish(self) -> None:
        """Raises `DflashError` unless the honest drafter gets rows as before."""
        before = self.rows
        for _ in range(20):
            self.honest_step()
        if self.rows - before < 5:
            raise DflashError(f"an honest drafter got {self.rows - before} rows in 20 rounds after the fuzzing")

    def close(self) -> None:
        """End the service."""
        self._io._router = self._real
        self._service.close()

    def _serve(self) -> None:
        """What the feeder's two threads do, in turn, until there is nothing to do."""
        self._io._read(len(self._router.incoming))
        while self._service._turn(self._compute, 0.0):
            pass
        while self._io._write()[0]:
            pass
        self._io.notes.clear()

    def _compute(self, key: RowKey, buffer: torch.Tensor) -> None:
        buffer.numpy()[:] = np.frombuffer(self._bits(key), np.uint8)

    def _bits(self, key: RowKey) -> bytes:
        if key not in self._known:
            row = torch.empty(self._service.layout.nbytes, dtype=torch.uint8)
            synthetic_row(key, row)
            self._known = {**(self._known if len(self._known) < 64 else {}), key: row.numpy().tobytes()}
        return self._known[key]

    def _hear(self, drafter: _Drafter) -> None:
        if self._draw.random() < 0.05 and len(self._router.outgoing.get(drafter.identity, ())) < _ROOM:
            return  # it doesn't read now
        for message, _ in drafter.hear(self._router):
            if isinstance(message, m.Refused):
                self.tally.refused(message.code, message.reason)


class _Drafter:
    """One end of the conversation: knows what it may say next."""

    def __init__(self, identity: bytes, peer: str, plan: StreamPlan) -> None:
        self.identity = identity
        hello = m.Hello(m.VERSION, peer, "1", 0, 9, synthetic_expectations(plan), None, ("inband",))
        self._hellos = [hello, hello, hello, replace(hello, plan=plan)]
        self.greeted = False
        self._asked: set[int] = set()
        self._held: list[m.Release] = []
        self._number = 0

    def hear(self, router: FakeRouter) -> list[tuple[m.Message, bytes]]:
        """All that has come for it."""
        pipe, heard = router.outgoing.get(self.identity, deque()), []
        while pipe:
            head, *payload = pipe.popleft()
            message = m.decode(head)
            heard.append((message, payload[0] if payload else b""))
            if isinstance(message, m.Welcome):
                self.greeted = True
                self._asked.clear()
                self._held.clear()
            elif isinstance(message, m.Refused | m.Bye):
                self.greeted = False
            elif isinstance(message, m.Row):
                self._held.append(m.Release(message.request, message.slot))
            elif isinstance(message, m.RowError):
                self._asked.discard(message.request)
        return heard

    def next_message(self, draw: random.Random, honest: bool = False) -> m.Message:
        """One that is right in this state."""
        if not self.greeted:
            return draw.choice(self._hellos)
        if self._held:
            release = self._held.pop()
            self._asked.discard(release.request)
            return release
        chance = draw.random()
        if len(self._asked) < OUTSTANDING and (honest or chance < 0.6):
            self._number += 1
            self._asked.add(self._number)
            split: Split = "held_out" if not honest and chance < 0.1 else "train"
            return m.Get((m.RowRequest(self._number, RowKey(split, draw.randrange(12))),))
        if not honest and chance < 0.8:
            return m.GetWeights(draw.choice(("embedding", "head")), draw.choice((0, 64, 4096)))
        if not honest and chance < 0.83:
            return m.Bye("done", "enough")
        return m.Ping(self._number, 0)
