"""`dflash-mp bench rows`: rows between a device and the memory that feeder and drafter share, against plain copies of pinned memory.

A feeder process and a drafter, which is this process, on the same device or two. In turn, several times: copies between the device and
pinned memory that PyTorch made, one way and both ways at once; the same copies from and to slots of the stream, in shared memory and in-band, which shows whether they are as good;
and rows through the real stream, each copied from the feeder's device into its slot and from there to the drafter's, all on side
streams, so both ways at once when the feeder writes them. Medians. Before anything is measured, rows that went that way are compared with what was sent. On a CPU the same is
done with plain copies, to test it.
"""

from __future__ import annotations

import multiprocessing
import re
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

import torch

from dflash_mp.bench.feeder_child import start_marked
from dflash_mp.bench.stream_source import pool_row
from dflash_mp.bench.synthetic import RUN, synthetic_expectations, synthetic_plan, synthetic_weights
from dflash_mp.bench.timing import timed
from dflash_mp.config import StreamConfig
from dflash_mp.data.row import RowKey
from dflash_mp.errors import ConfigError, DflashError
from dflash_mp.process import die_with_parent
from dflash_mp.stream.arrival import ARRIVED, Arrival
from dflash_mp.stream.client import ReceivedRow, RowClient
from dflash_mp.stream.feeder import FeederService
from dflash_mp.stream.handshake import SHARED_MEMORY
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.plan import StreamPlan
from dflash_mp.stream.shared_memory import Ring
from dflash_mp.stream.slots import make_slots

_TOKENS = 1024
_SLOTS = 6
_MOST_SLOTS = 16  # as many of them as the default window holds
_IN_FLIGHT = 2
_SEED = 11
_AS_THEY_ARE = 1 << 40  # rows from this number on are not written: whatever is in the slot is sent
_START_SECONDS = 120.0


@dataclass(frozen=True)
class Rate:
    """One way's median, and that of what it is compared with, in GB/s."""

    way: str
    gigabytes_per_second: float
    compared: float

    def line(self) -> str:
        share = self.gigabytes_per_second / self.compared
        return f"{self.way:44} {self.gigabytes_per_second:7.2f} GB/s  {share:5.2f}"


@dataclass(frozen=True)
class RowRates:
    """The result."""

    row_bytes: int
    rows: int
    device: str
    rates: tuple[Rate, ...]

    def lines(self) -> list[str]:
        """The result in words."""
        head = f"{self.rows} rows of {self.row_bytes / 2**20:.1f} MiB on {self.device}; medians, and shares of the plain copy that way"
        return [head, *(rate.line() for rate in self.rates)]


class Copier:
    """Copies on a stream of its own, at most `_IN_FLIGHT` at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, to: torch.Tensor, of: torch.Tensor) -> Arrival:
        """Copy `of` into `to`, one of them on the device."""
        if self._stream is None:
            to.copy_(of)
            return ARRIVED
        with torch.cuda.stream(self._stream):
            to.copy_(of, non_blocking=True)
        return self._stream.record_event()

    def all(self, to: Sequence[torch.Tensor], of: Sequence[torch.Tensor], count: int) -> None:
        """Copy `count` times, taking turns."""
        under_way: deque[Arrival] = deque()
        for number in range(count):
            under_way.append(self.start(to[number % len(to)], of[number % len(of)]))
            if len(under_way) > _IN_FLIGHT:
                under_way.popleft().synchronize()
        for arrival in under_way:
            arrival.synchronize()


def bench_rows(
    row_mib: float = 64, rows: int = 64, repeats: int = 5, feeder: str = "cuda:0", drafter: str = "cuda:0"
) -> RowRates:
    """Measure rows of about `row_mib`. Raises `DflashError` if a device isn't there, a row arrives changed, or memory can't be shared."""
    device, feeder_device = checked_devices(drafter, feeder)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    hidden = max(32, int(row_mib * 2**20 / _TOKENS / 4) // 32 * 32)
    plan = synthetic_plan(_TOKENS, hidden)
    nbytes = RowLayout.of(plan).nbytes
    with (
        tempfile.TemporaryDirectory(prefix="dflash-mp-bench-") as directory,
        _feeder(f"ipc://{directory}/f.sock", plan, feeder) as ask,
        _client(f"ipc://{directory}/f.sock", plan, device, 0, shared_memory=True) as client,
        _client(f"ipc://{directory}/f.sock", plan, device, 1, shared_memory=False) as inband,
    ):
        drafters = _Drafter(client, device, nbytes)
        drafters.check()
        ways: dict[str, tuple[str, Callable[[], float]]] = {}
        plain_in, plain_out = "pinned memory → device", "device → pinned memory"
        plain_both = "pinned memory ⇄ device, both at once"
        pinned = [slot.buffer for slot in make_slots(0, _SLOTS, nbytes, pin=True, remedy="measure smaller rows")]
        # As many as a drafter's slots below: buffers that are used again soon lie in a cache.
        few, other = pinned[: _IN_FLIGHT + 1], pinned[-_IN_FLIGHT - 1 :]
        there = torch.zeros(nbytes, dtype=torch.uint8, device=feeder_device)
        ways[plain_in] = plain_in, lambda: drafters.copies(few, rows)
        ways["a drafter's slots of shared memory → device"] = plain_in, lambda: drafters.slots(client, rows)
        ways["a drafter's slots in-band → device"] = plain_in, lambda: drafters.slots(inband, rows)
        ways["rows through the stream → device"] = plain_in, lambda: drafters.stream(rows, _AS_THEY_ARE)
        ways[plain_out] = plain_out, lambda: ask(("pinned", rows))
        ways["device → a feeder's slots of shared memory"] = plain_out, lambda: ask(("ring", rows))
        ways[plain_both] = plain_both, lambda: drafters.both_ways(few, other, there, rows)
        ways["device → slot → device through the stream"] = plain_both, lambda: drafters.stream(rows, 0)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(-1, repeats):  # the first is a warm-up
            for name, (_, measure) in ways.items():
                spent = measure()
                if repeat >= 0:
                    seconds[name].append(spent)
    speed = {name: rows * nbytes / statistics.median(spent) / 1e9 for name, spent in seconds.items()}
    rates = [Rate(name, speed[name], speed[plain]) for name, (plain, _) in ways.items()]
    where = f"{feeder}, {drafter}" + (f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "")
    return RowRates(nbytes, rows, where, tuple(rates))


def checked_devices(*names: str) -> list[torch.device]:
    """The devices of these names. Raises `ConfigError` for one that is neither `cpu` nor the `cuda:N` of a GPU that is here."""
    for name in names:
        if not re.fullmatch(r"cpu|cuda:\d+", name):
            raise ConfigError(f"{name!r} is no device", "cpu or cuda:N")
        if name != "cpu" and int(name.removeprefix("cuda:")) >= torch.cuda.device_count():
            raise ConfigError(
                f"there is no {name} here: PyTorch sees {torch.cuda.device_count()} CUDA devices", "cpu or cuda:N"
            )
    return [torch.device(name) for name in names]


class _Drafter:
    """This process: takes rows and copies them to its device."""

    def __init__(self, client: RowClient, device: torch.device, nbytes: int) -> None:
        self._client, self._device, self._nbytes = client, device, nbytes
        self._copier = Copier(device)
        self._there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(_IN_FLIGHT + 1)]
        self._next = {0: 0, _AS_THEY_ARE: _AS_THEY_ARE}

    def copies(self, buffers: Sequence[torch.Tensor], count: int) -> float:
        return timed(lambda: self._copier.all(self._there, buffers, count), self._device)

    def both_ways(
        self, of: Sequence[torch.Tensor], to: Sequence[torch.Tensor], there: torch.Tensor, count: int
    ) -> float:
        """Copies of `of` to this device while as many of `there`, on the feeder's, are copied to `to`."""
        out = Copier(there.device)

        def copy() -> None:
            under_way: deque[tuple[Arrival, Arrival]] = deque()
            for number in range(count):
                into = self._copier.start(self._there[number % len(self._there)], of[number % len(of)])
                under_way.append((into, out.start(to[number % len(to)], there)))
                if len(under_way) > _IN_FLIGHT:
                    _await(under_way.popleft())
            for pair in under_way:
                _await(pair)

        return timed(copy, self._device)

    def slots(self, client: RowClient, count: int) -> float:
        """Copies out of the slots in which rows of `client` lie."""
        keys = self._keys(_AS_THEY_ARE, _IN_FLIGHT + 1)
        client.schedule(iter(keys))
        rows = [client.take(key) for key in keys]
        seconds = self.copies([row.buffer for row in rows], count)
        for row in rows:
            row.release()
        return seconds

    def stream(self, count: int, first: int) -> float:
        """Rows from the feeder, each given back when it is on the device."""
        return timed(lambda: self._take(self._keys(first, count)), self._device)

    def check(self) -> None:
        """Compare some rows, on the device, with what was sent. Raises `DflashError`."""
        right = pool_row(_SEED, self._nbytes)
        for _ in range(_IN_FLIGHT + 1):
            for there in self._there:
                there.fill_(0xA5)
            self.stream(len(self._there), 0)
            if not all(torch.equal(there.cpu(), right) for there in self._there):
                raise DflashError("a row arrived changed on the device", "do not trust this machine's figures")

    def _take(self, keys: Sequence[RowKey]) -> None:
        self._client.schedule(iter(keys))
        under_way: deque[tuple[ReceivedRow, Arrival]] = deque()
        for number, key in enumerate(keys):
            row = self._client.take(key)
            under_way.append((row, self._copier.start(self._there[number % len(self._there)], row.buffer)))
            if len(under_way) > _IN_FLIGHT:
                self._give_back(*under_way.popleft())
        for pair in under_way:
            self._give_back(*pair)

    def _give_back(self, row: ReceivedRow, copied: Arrival) -> None:
        copied.synchronize()
        row.release()

    def _keys(self, first: int, count: int) -> list[RowKey]:
        start = self._next[first]
        self._next[first] += count
        return [RowKey("train", start + number) for number in range(count)]


def _await(arrivals: Sequence[Arrival]) -> None:
    for arrival in arrivals:
        arrival.synchronize()


class _Ask(Protocol):
    def __call__(self, what: tuple[str, int]) -> float:
        """Seconds of so many copies to ring or pinned memory in the feeder's process."""


@contextmanager
def _client(
    endpoint: str, plan: StreamPlan, device: torch.device, rank: int, *, shared_memory: bool
) -> Iterator[RowClient]:
    nbytes = RowLayout.of(plan).nbytes
    window = StreamConfig(window_mib=_window_rows(nbytes) * nbytes / 2**20, row_seconds=60)
    client = RowClient(
        [endpoint],
        synthetic_expectations(plan),
        rank=rank,
        world=2,
        stream=window,
        held=_IN_FLIGHT + 1,
        pin=device.type == "cuda",
        shared_memory=shared_memory,
    )
    with client:
        client.connect()
        if (client.lanes[endpoint] == SHARED_MEMORY) != shared_memory:
            raise DflashError("the rows don't fit into shared memory here", "measure smaller rows (--row-mib)")
        yield client


def _window_rows(nbytes: int) -> int:
    """Rows that the drafter's window holds: those of the default window, within reason."""
    return min(_MOST_SLOTS, max(_SLOTS, int(StreamConfig().window_mib * 2**20) // nbytes))


@contextmanager
def _feeder(endpoint: str, plan: StreamPlan, device: str) -> Iterator[_Ask]:
    """A feeder process; it takes questions."""
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=_feed, args=(theirs, endpoint, plan, device))
    start_marked(process)
    theirs.close()

    def answer() -> float:
        if not pipe.poll(_START_SECONDS):
            raise DflashError(f"the feeder does not answer within {_START_SECONDS:.0f} s", "its error is above")
        try:
            return float(pipe.recv())
        except EOFError:
            raise DflashError("the feeder ended", "its error is above") from None

    def ask(what: tuple[str, int]) -> float:
        pipe.send(what)
        return answer()

    try:
        answer()
        yield ask
    finally:
        pipe.close()
        process.join(10)
        process.kill()
        process.join()


def _feed(pipe: Connection, endpoint: str, plan: StreamPlan, name: str) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    device = torch.device(name)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    nbytes, copier, stop = RowLayout.of(plan).nbytes, Copier(device), threading.Event()
    source = pool_row(_SEED, nbytes).to(device)
    ring = Ring(nbytes, _SLOTS, cuda_device=torch.cuda.current_device() if cuda else None)
    slots = {
        "pinned": [slot.buffer for slot in make_slots(0, _SLOTS, nbytes, pin=True, remedy="")],
        "ring": [slot.buffer for _ in range(_SLOTS) if (slot := ring.take()) is not None],
    }

    def compute(key: RowKey, buffer: torch.Tensor) -> Arrival:
        return ARRIVED if key.ordinal >= _AS_THEY_ARE else copier.start(buffer, source)

    def serve() -> None:
        if cuda:
            torch.cuda.set_device(device)  # a thread has its own
        service.serve(compute, stop, 1e9)

    memory = 2 * (_window_rows(nbytes) + _SLOTS) * nbytes / 2**20  # two drafters: a ring may have half
    with FeederService(endpoint, plan, synthetic_weights(plan), run=RUN, memory_mib=memory, pin=cuda) as service:
        serving = threading.Thread(target=serve)
        serving.start()
        try:
            pipe.send(time.monotonic())
            while True:
                kind, count = pipe.recv()
                to = slots[kind]
                pipe.send(timed(lambda: copier.all(to, [source], count), device))  # noqa: B023  # called here
        except (EOFError, BrokenPipeError):  # the parent has what it wanted, or has failed
            return
        finally:
            stop.set()
            serving.join()
