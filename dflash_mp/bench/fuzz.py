"""`dflash-mp bench fuzz`: messages that are nearly right, to both sides, while honest peers beside them must get the right bits.

A real conversation is written down first: it is the corpus. Most messages are then handled without sockets, one at a time, by a real feeder's
and a real drafter's own code (`fuzz_feeder`, `fuzz_drafter`): a seed and a corpus repeat them. The others go through real sockets, from hostile
drafters to a feeder and from hostile feeders to a drafter, that serve each other meanwhile. It fails with `DflashError` when an
honest peer is refused or gets a wrong bit, with whatever a message made crash, and when memory grows. About a minute for 100,000 messages.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import zmq

from dflash_mp.bench.fuzz_drafter import DrafterFuzz
from dflash_mp.bench.fuzz_feeder import FeederFuzz, encoded
from dflash_mp.bench.fuzz_mutations import Frames, Mutator, Tally
from dflash_mp.bench.synthetic import RUN, synthetic_expectations, synthetic_plan, synthetic_row, synthetic_weights
from dflash_mp.config import StreamConfig
from dflash_mp.data.row import RowKey
from dflash_mp.errors import DflashError, StreamError
from dflash_mp.stream import messages as m
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.feeder import FeederService
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.plan import StreamPlan

_SOCKET_SHARE = 0.1
_GROWTH_BYTES = 64 << 20  # more is a leak: no side may hold more than its rows
_LIARS = 4


@dataclass
class FuzzReport:
    """What was sent, by side, and what it did."""

    seed: int
    feeder: Tally = field(default_factory=Tally)  # messages to feeders
    drafter: Tally = field(default_factory=Tally)
    by_sockets: int = 0
    rows: int = 0  # that honest drafters got, bit for bit
    drafters: int = 0  # started
    growth_bytes: int = 0  # of resident memory, from a tenth of each part (without sockets, with them) to its end
    seconds: float = 0.0

    @property
    def messages(self) -> int:
        return self.feeder.types.total() + self.drafter.types.total()

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.messages} messages ({self.by_sockets} of them through sockets) in {self.seconds:.0f} s, seed {self.seed}; "
            f"{self.rows} rows for honest drafters, each right; resident memory grew by {self.growth_bytes / 2**20:.1f} MiB"
        )
        for name, tally in (("to feeders", self.feeder), ("to drafters", self.drafter)):
            yield f"{name}: {tally.types.total()}"
            yield f"  made from: {_counts(tally.types)}"
            yield f"  changes: {_counts(tally.changes)}"
            yield f"  refused: {tally.reasons.total()}, for {len(tally.reasons)} reasons; the most frequent:"
            yield from (f"    {count:>8}  {reason}" for reason, count in tally.reasons.most_common(12))


def fuzz(messages: int, seed: int, say: Callable[[str], None] = lambda text: None) -> FuzzReport:
    """Send `messages` messages. Raises what the module's docstring says."""
    report, begun, plan = FuzzReport(seed), time.monotonic(), synthetic_plan(row_tokens=16, hidden_size=16)
    by_sockets = int(messages * _SOCKET_SHARE)
    in_process = messages - by_sockets
    with tempfile.TemporaryDirectory(prefix="dmp-fuzz-") as directory, _quiet():
        corpus = record(Path(directory), plan)
        say(f"a conversation of {len(corpus)} messages is the corpus")
        _in_process(Path(directory), plan, seed, corpus, in_process, report, say)
        say(f"{in_process} messages without sockets in {time.monotonic() - begun:.0f} s")
        _through_sockets(Path(directory), plan, seed, corpus, by_sockets, report)
    report.seconds = time.monotonic() - begun
    if report.growth_bytes > _GROWTH_BYTES:
        raise DflashError(
            f"resident memory grew by {report.growth_bytes / 2**20:.0f} MiB\n" + "\n".join(report.lines())
        )
    return report


def _in_process(
    directory: Path,
    plan: StreamPlan,
    seed: int,
    corpus: list[Frames],
    messages: int,
    report: FuzzReport,
    say: Callable[[str], None],
) -> None:
    feeder = FeederFuzz(f"ipc://{directory}/fuzz.sock", plan, seed, corpus)
    drafter = DrafterFuzz(plan, seed, corpus)
    resident = 0
    try:
        for number in range(messages):
            (feeder if number % 2 else drafter).step()
            if number == messages // 10:
                resident = _resident()
            if number and number % 50_000 == 0:
                say(f"{number} messages, {_resident() / 2**20:.0f} MiB")
        feeder.finish()
        drafter.finish()
        report.growth_bytes += max(0, _resident() - resident)
    finally:
        feeder.close()
        drafter.close()
    report.feeder.add(feeder.tally)
    report.drafter.add(drafter.tally)
    report.rows, report.drafters = feeder.rows + drafter.rows, drafter.drafters


def record(directory: Path, plan: StreamPlan) -> list[Frames]:
    """The frames of a real conversation, both ways, as a relay between drafter and feeder sees them."""
    seen: list[Frames] = []
    with _serving(FeederService(f"ipc://{directory}/far.sock", plan, synthetic_weights(plan), run=RUN)) as service:
        near, done = f"ipc://{directory}/near.sock", threading.Event()
        relay = threading.Thread(target=_relay, args=(near, service.endpoint, done, seen))
        relay.start()
        stream = StreamConfig(window_mib=8 * service.layout.nbytes / 2**20, row_seconds=30, connect_seconds=30)
        with RowClient([near], synthetic_expectations(plan), stream=stream, shared_memory=False) as client:
            client.connect()
            client.fetch_weights()
            keys = [RowKey("train", n) for n in range(8)]
            client.schedule(iter([*keys, RowKey("held_out", plan.data.held_out_rows)]))  # and one that there is not
            for key in keys:
                client.take(key).release()
            with contextlib.suppress(StreamError):
                client.take(RowKey("held_out", plan.data.held_out_rows))
            time.sleep(1.5)  # a PING and its PONG
        done.set()
        relay.join()
    return [*seen, [m.encode(m.Refused("stranger", "this feeder does not know you: say HELLO"))]]


def _relay(near: str, far: str, done: threading.Event, seen: list[Frames]) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        router.linger = dealer.linger = 0
        router.bind(near)
        dealer.connect(far)
        identity = b""
        while not done.is_set():
            router.poll(5)
            with contextlib.suppress(zmq.Again):
                identity, *frames = router.recv_multipart(zmq.DONTWAIT)
                seen.append(frames)
                dealer.send_multipart(frames)
            with contextlib.suppress(zmq.Again):
                frames = dealer.recv_multipart(zmq.DONTWAIT)
                seen.append(frames)
                router.send_multipart([identity, *frames])


# -- through sockets ------------------------------------------------------------------------------------------------------------------


def _through_sockets(
    directory: Path, plan: StreamPlan, seed: int, corpus: list[Frames], messages: int, report: FuzzReport
) -> None:
    """A feeder that hostile drafters write to, and a drafter that has hostile feeders too, serve each other."""
    draw, done = random.Random(seed + 1), threading.Event()
    service = FeederService(f"ipc://{directory}/honest.sock", plan, synthetic_weights(plan), run=RUN)
    liars = [f"ipc://{directory}/liar-{n}.sock" for n in range(_LIARS)]
    tallies = [Tally() for _ in liars]
    with _serving(service), contextlib.ExitStack() as stack:
        stream = StreamConfig(window_mib=8 * service.layout.nbytes / 2**20, row_seconds=60)
        client = stack.enter_context(
            RowClient([service.endpoint, *liars], synthetic_expectations(plan), rank=1, world=2, stream=stream)
        )
        client.connect()  # the first feeder that answers is believed, so the liars come later
        for endpoint, tally in zip(liars, tallies, strict=True):
            arguments = (endpoint, plan, random.Random(f"{seed} {endpoint[-6]}"), corpus, done, tally)
            thread = threading.Thread(target=_lie, args=arguments)
            thread.start()
            stack.callback(thread.join)
        stack.callback(done.set)
        hostile = stack.enter_context(_Flood(service.endpoint, draw, corpus))
        taken, ordinals = 0, iter(range(10**9))
        client.schedule(RowKey("train", n) for n in ordinals)
        resident = 0
        while report.by_sockets < messages:
            if not resident and report.by_sockets >= messages // 10:
                resident = _resident()
            hostile.send(64, report.feeder)
            taken += _take_right(client, RowKey("train", taken))
            report.by_sockets = hostile.messages + sum(tally.types.total() for tally in tallies)
        for _ in range(50):
            taken += _take_right(client, RowKey("train", taken))
        report.rows += taken
        for tally in tallies:
            report.drafter.add(tally)
        report.growth_bytes += max(0, _resident() - resident)


def _take_right(client: RowClient, key: RowKey) -> int:
    with client.take(key) as row:
        right = torch.empty_like(row.buffer)
        synthetic_row(key, right)
        if not torch.equal(row.buffer, right):
            raise DflashError(f"a drafter got wrong bits for {key} from {row.feeder}, through a socket")
    return 1


class _Flood:
    """Hostile drafters: some connections that introduce themselves now and then and say what nobody should."""

    def __init__(self, endpoint: str, draw: random.Random, corpus: list[Frames]) -> None:
        self.messages = 0
        self._draw, self._mutator, self._corpus = draw, Mutator(draw, corpus), corpus
        self._hello = [next(frames for frames in corpus if isinstance(_decoded(frames), m.Hello))]
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.DEALER) for _ in range(4)]
        for each in self._sockets:
            each.linger = 0
            each.connect(endpoint)

    def __enter__(self) -> _Flood:
        return self

    def __exit__(self, *error: object) -> None:
        self._context.destroy(linger=0)

    def send(self, count: int, tally: Tally) -> None:
        for _ in range(count):
            dealer = self._draw.choice(self._sockets)
            frames = self._draw.choice(self._hello if self._draw.random() < 0.3 else self._corpus)
            original, kind = _decoded(frames), "as it should be"
            if self._draw.random() < 0.7:
                kind, frames = self._mutator.mutate(frames)
            try:
                dealer.send_multipart(frames or [b""], zmq.DONTWAIT)
            except zmq.Again:
                continue
            if original is not None:
                tally.sent(original, kind)
                self.messages += 1
        for dealer in self._sockets:
            while dealer.poll(0):
                answer = _decoded(dealer.recv_multipart())
                if isinstance(answer, m.Refused):
                    tally.refused(answer.code, answer.reason)


def _lie(
    endpoint: str, plan: StreamPlan, draw: random.Random, corpus: list[Frames], done: threading.Event, tally: Tally
) -> None:
    """Be a feeder that welcomes everybody, mostly rightly, and then sends whatever it likes but the words that rightly end a drafter."""
    mutator, nbytes = Mutator(draw, corpus), RowLayout.of(plan).nbytes
    lines = [f for f in corpus if not isinstance(_decoded(f), m.Refused | m.RowError)]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(endpoint)
        while not done.is_set():
            if not router.poll(20):
                continue
            identity, *frames = router.recv_multipart()
            if isinstance(_decoded(frames), m.Hello) and draw.random() < 0.7:
                original: m.Message | None = m.Welcome(m.VERSION, endpoint[-40:], plan, "inband", nbytes, 3)
                kind, frames = "as it should be", [encoded(original)]
            else:
                frames = draw.choice(lines)
                original = _decoded(frames)
                kind, frames = mutator.mutate(frames)
                if isinstance(_decoded(frames), m.Refused | m.RowError):
                    continue
            if original is not None:
                tally.sent(original, kind)
            router.send_multipart([identity, *(frames or [b""])])


def _decoded(frames: Frames) -> m.Message | None:
    try:
        return m.decode(frames[0])
    except (StreamError, IndexError):
        return None


# -- around it ------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _serving(service: FeederService) -> Iterator[FeederService]:
    stop, failure = threading.Event(), list[BaseException]()

    def serve() -> None:
        try:
            service.serve(synthetic_row, stop, 1e9)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield service
    finally:
        stop.set()
        thread.join()
    if failure:
        raise failure[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Each refusal is logged: hundreds of thousands of lines."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())
