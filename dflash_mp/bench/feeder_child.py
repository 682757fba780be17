"""A feeder of synthetic rows in a process of its own, whose memory can be looked at; and a drafter that only takes and checks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType

import torch

from dflash_mp.bench.synthetic import RUN, synthetic_expectations, synthetic_row, synthetic_weights
from dflash_mp.config import StreamConfig
from dflash_mp.data.row import RowKey
from dflash_mp.errors import DflashError
from dflash_mp.process import MARK, die_with_parent, mark_of
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.feeder import FeederService
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.plan import StreamPlan

SPAWN = multiprocessing.get_context("spawn")
_START_SECONDS = 120.0


@dataclass(frozen=True)
class FeederChildOptions:
    """`seconds_per_row` are slept: the time of a GPU."""

    endpoint: str
    plan: StreamPlan
    seconds_per_row: float = 0.0
    memory_mib: float = 64.0


class FeederChild:
    """Listens when the constructor returns; leaving the context ends it."""

    def __init__(self, options: FeederChildOptions) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_main, args=(theirs, options))
        start_marked(self._process)
        theirs.close()
        if not self._pipe.poll(_START_SECONDS):
            raise DflashError(f"the feeder does not listen after {_START_SECONDS:.0f} s", "its error is above")
        self.endpoint: str = self._pipe.recv()
        self.pid = self._process.pid or 0

    @property
    def resident(self) -> int:
        """Bytes of its resident memory. Raises `DflashError` if it is dead."""
        if not self._process.is_alive():
            raise DflashError(f"the feeder ended with exit code {self._process.exitcode}", "its error is above")
        return resident(self.pid)

    def __enter__(self) -> FeederChild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.join(10)
        self._process.kill()
        self._process.join()


class CheckingDrafter:
    """Takes rows in order and compares every byte."""

    def __init__(self, endpoint: str, plan: StreamPlan, rank: int = 0, shared_memory: bool = False) -> None:
        stream = StreamConfig(window_mib=6 * RowLayout.of(plan).nbytes / 2**20, row_seconds=60, connect_seconds=60)
        expects = synthetic_expectations(plan)
        self.client = RowClient([endpoint], expects, rank=rank, world=2, stream=stream, shared_memory=shared_memory)
        self.client.connect()
        self._ordinals = iter(range(10**9))
        self.client.schedule(RowKey("train", n) for n in self._ordinals)
        self.rows = 0

    def take(self) -> None:
        """The next row. Raises `DflashError` if a byte is wrong."""
        key = RowKey("train", self.rows)
        with self.client.take(key) as row:
            right = torch.empty_like(row.buffer)
            synthetic_row(key, right)
            if not torch.equal(row.buffer, right):
                raise DflashError(f"{key} arrived with wrong bits", "this is a bug: report it")
        self.rows += 1

    def rate(self, seconds: float) -> float:
        """Rows per second over so long."""
        before, start = self.rows, time.perf_counter()
        while time.perf_counter() - start < seconds:
            self.take()
        return (self.rows - before) / (time.perf_counter() - start)


def start_marked(process: SpawnProcess) -> None:
    """Start it so that it can tell whose child it is (`dflash_mp.process.die_with_parent`)."""
    before = os.environ.get(MARK)
    os.environ[MARK] = mark_of(os.getpid())
    try:
        process.start()
    finally:
        if before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = before


def resident(pid: int) -> int:
    """Bytes of a process's resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _main(pipe: Connection, options: FeederChildOptions) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    plan = options.plan
    with FeederService(
        options.endpoint, plan, synthetic_weights(plan), run=RUN, memory_mib=options.memory_mib
    ) as service:
        pipe.send(service.endpoint)

        def compute(key: RowKey, buffer: torch.Tensor) -> None:
            time.sleep(options.seconds_per_row)
            synthetic_row(key, buffer)

        service.serve(compute, stop, stats_seconds=1e9)
