"""A drafter's message handling without sockets: a hostile feeder beside an honest one.

The I/O object and its window are the real ones; a link's sockets are replaced by queues, the stream's thread by calls in turn, the thread
that takes checksums by calls at random times, and the clock by `FuzzTime`, so that a seed and a corpus repeat all. Each row that comes out
of the window, whichever feeder it came from, is compared bit for bit. That a feeder which is in use refuses a row for good, or says that
another drafter took this one's place, ends the drafter with a `StreamError`; that is counted, and the next drafter begins.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import torch
import xxhash
import zmq

from dflash_mp.bench.fuzz_feeder import encoded
from dflash_mp.bench.fuzz_mutations import Frames, Mutator, Tally
from dflash_mp.bench.fuzz_time import FuzzTime
from dflash_mp.bench.synthetic import synthetic_expectations, synthetic_row, synthetic_weights
from dflash_mp.data.row import RowKey
from dflash_mp.errors import DflashError, StreamError
from dflash_mp.stream import messages as m
from dflash_mp.stream.client_io import ClientIo
from dflash_mp.stream.client_link import Link
from dflash_mp.stream.dealing import RowTime
from dflash_mp.stream.handshake import INBAND
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.plan import StreamPlan
from dflash_mp.stream.slots import make_slots
from dflash_mp.stream.weights import WeightsBuilder, WeightsServer
from dflash_mp.stream.window import Request, Window

_SLOTS = 4
_BYE = m.Bye("done", "enough")
_HONEST, _HOSTILE = "ipc:///honest", "ipc:///hostile"


class FakeDealer:
    """As much of a DEALER as a link uses, in memory."""

    def __init__(self) -> None:
        self.incoming: deque[Frames] = deque()
        self.sent: deque[bytes] = deque(maxlen=64)
        self._rest: Frames = []

    @property
    def rcvmore(self) -> bool:
        return bool(self._rest)

    def send(self, frame: bytes, flags: int = 0) -> None:
        self.sent.append(frame)

    def recv(self, flags: int = 0, copy: bool = True) -> bytes:
        if not self._rest:
            if not self.incoming:
                raise zmq.Again()
            self._rest = list(self.incoming.popleft())
        return self._rest.pop(0)

    def recv_into(self, place: memoryview, flags: int = 0) -> int:
        frame = self.recv(flags)
        fits = min(len(place), len(frame))
        place[:fits] = frame[:fits]
        return len(frame)


class FuzzLink(Link):
    """A link without a transport: what it opens stands at once."""

    def approach(self, hello: m.Hello, *_: object) -> None:
        self.post(replace(hello, lanes=(INBAND,)))
        self._enter("greeting")

    def disconnected(self) -> bool:
        return False

    @property
    def dealer(self) -> FakeDealer:
        if not isinstance(self._socket, FakeDealer):
            raise RuntimeError("the link is closed")
        return self._socket

    def retry(self) -> None:
        """The wait after a refusal is over."""
        self._open()

    def _open(self) -> None:
        self._socket = FakeDealer()  # type: ignore[assignment]
        self.row_time = RowTime()
        self._enter("connecting")

    def _close(self, linger_ms: int) -> list[Request]:
        self._socket = None
        return super()._close(linger_ms)


class _NotYet(StreamError):
    """The row that is next hasn't come."""


class DrafterFuzz:
    """`step` has the hostile feeder send one message; `finish` checks that rows still come."""

    def __init__(self, plan: StreamPlan, seed: int, corpus: list[Frames]) -> None:
        self.tally = Tally()
        self.rows = self.drafters = 0
        self._plan = plan
        self._layout = RowLayout.of(plan)
        self._draw = random.Random(seed)
        self._mutator = Mutator(self._draw, corpus)
        self._past: deque[Frames] = deque(maxlen=64)
        self._server = WeightsServer(synthetic_weights(plan), plan)
        self._known: dict[RowKey, bytes] = {}
        self._time = FuzzTime(seed)
        with self._time.step():
            self._begin()

    def step(self) -> None:
        """One message of the hostile feeder, and all that follows from it."""
        with self._time.step():
            try:
                self._hostile_message()
                self._go_on()
            except StreamError as error:
                self._io._wakeup.close()
                self.tally.refused("ended", str(error))
                self._begin()

    def finish(self) -> None:
        """Raises `DflashError` unless the drafter gets rows from the honest feeder as before."""
        before = self.rows
        for _ in range(100):
            with self._time.step():
                if self._hostile.state != "refused":
                    self._io._again(self._hostile.refuse(m.Refused("full", "the fuzzing is over")))
                self._go_on()
        if self.rows - before < 50:
            raise DflashError(f"a drafter got {self.rows - before} rows in 100 rounds after the fuzzing")

    def close(self) -> None:
        """End the drafter."""
        self._io._wakeup.close()

    # -- one drafter --------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.drafters += 1
        expects = synthetic_expectations(self._plan)
        hello = m.Hello(m.VERSION, "rank 0", "1", 0, 1, expects, None, (INBAND,))
        self._io = ClientIo([], lambda plan: replace(hello, plan=plan), "rank 0", 1e9)
        context, poller = self._io._context, self._io._poller
        self._honest, self._hostile = (FuzzLink(endpoint, context, poller) for endpoint in (_HONEST, _HOSTILE))
        self._io.links += [self._honest, self._hostile]
        context.term()
        self._owed: deque[m.Message] = deque(maxlen=256)  # what the hostile feeder was asked and didn't answer
        self._numbers = itertools.count()
        self._next = RowKey("train", next(self._numbers))
        self._io._attend(self._honest)
        self._honest_feeder()
        self._io._attend(self._honest)
        self._io.settled()
        self._window = self._io.window = Window(make_slots(0, _SLOTS, self._layout.nbytes, pin=False, remedy=""))
        self._window.schedule(RowKey("train", n) for n in itertools.count())
        self._io.weights = WeightsBuilder(self._plan)

    def _go_on(self) -> None:
        """A round of the stream's threads, of the honest feeder, and of the trainer."""
        for link in (self._hostile, self._honest):
            if link.state not in ("refused", "closed"):
                self._io._attend(link)
        self._take_sums()
        self._io._ask_for_weights()
        self._io._ask_for_rows()
        self._honest_feeder()
        with contextlib.suppress(_NotYet):
            while True:
                self._take()
        if self._io.weights is None and self._draw.random() < 0.02:
            self._io.weights = WeightsBuilder(self._plan)

    def _take_sums(self) -> None:
        """As many as a thread may get done meanwhile: none to all."""
        sums = self._io._sums
        while not sums._jobs.empty() and self._draw.random() < 0.9:
            sums._one()
        sums.pump()

    def _take(self) -> None:
        want = self._window.take(self._next, 0.0, lambda want: _NotYet("not yet"))
        if bytes(want.slot.view) != self._bits(want.key):
            raise DflashError(f"a drafter got wrong bits for {want.key} from {want.feeder}")
        self.rows += 1
        self._next = RowKey("train", next(self._numbers))
        self._window.release(want)

    def _bits(self, key: RowKey) -> bytes:
        if key not in self._known:
            if len(self._known) > 64:
                self._known.clear()
            row = torch.empty(self._layout.nbytes, dtype=torch.uint8)
            synthetic_row(key, row)
            self._known[key] = row.numpy().tobytes()
        return self._known[key]

    # -- the feeders --------------------------------------------------------------------------------------------------------------

    def _honest_feeder(self) -> None:
        if self._honest.state in ("refused", "closed"):
            raise DflashError(f"the drafter refused an honest feeder: {self._honest.refusal}")
        dealer = self._honest.dealer
        while dealer.sent:
            for _, frames in self._answers(m.decode(dealer.sent.popleft()), "honest"):
                dealer.incoming.append(frames)

    def _answers(self, asked: m.Message, name: str) -> Iterator[tuple[m.Message, Frames]]:
        """What a feeder says to it, as it should be."""
        answer: m.Message
        if isinstance(asked, m.Hello):
            answer = m.Welcome(m.VERSION, name, self._plan, INBAND, self._layout.nbytes, 3)
            yield answer, [encoded(answer)]
        elif isinstance(asked, m.Get):
            for request in asked.requests:
                bits = self._bits(request.key)
                answer = m.Row(request.request, request.key, 0, 0, len(bits), xxhash.xxh3_64_intdigest(bits))
                yield answer, [encoded(answer), bits]
        elif isinstance(asked, m.GetWeights):
            answer, payload = self._server.chunk(asked)
            yield answer, [encoded(answer), bytes(payload)]
        elif isinstance(asked, m.Ping):
            answer = m.Pong(asked.sequence, 1, 0, None, 0.0)
            yield answer, [encoded(answer)]

    def _hostile_message(self) -> None:
        if self._hostile.state == "refused":
            if self._hostile.refusal is not None:
                self.tally.refused(self._hostile.refusal.code, self._hostile.refusal.reason)
            self._hostile.retry()
        if self._hostile.state == "connecting":
            self._io._attend(self._hostile)
            self._owed.clear()
        dealer = self._hostile.dealer
        self._owed.extend(m.decode(dealer.sent.popleft()) for _ in range(len(dealer.sent)))
        asked = self._owed.popleft() if self._owed else m.Ping(1, 1)
        if isinstance(asked, m.Get) and len(asked.requests) > 1:
            self._owed.extendleft(m.Get((request,)) for request in asked.requests[1:])
            asked = m.Get(asked.requests[:1])
        message, frames = next(self._answers(asked, "hostile"), (_BYE, [m.encode(_BYE)]))
        begins = isinstance(asked, m.Hello)  # as most conversations do
        kind, chance = "as it should be", self._draw.random() * (2.5 if begins else 1.0)
        if chance < 0.1 and self._past:
            kind, frames = "replay", self._draw.choice(self._past)
        elif chance < 0.5:
            kind, frames = self._mutator.mutate(frames)
        else:
            self._past.append(frames)
        if kind != "as it should be" and not begins:
            self._owed.append(asked)
        self.tally.sent(message, kind)
        dealer.incoming.append(frames)
