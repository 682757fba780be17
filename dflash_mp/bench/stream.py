"""`dflash-mp bench stream`: rows from a feeder process to a drafter process, against what the machine can do.

The same rows go several ways, in turn, several times: copied once into memory that two processes share, through raw Unix and TCP sockets into
preallocated buffers, and through the real feeder and client: by the shared-memory lane, with and without checksums, and by the in-band
lane over ipc:// and tcp://127.0.0.1. The checksum alone is measured, too. Medians are compared. CPU seconds per GB, of both processes, say
more than GB/s on a machine that has other work. Before anything is measured, rows received are compared with what was sent. Takes about a minute.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash

from dflash_mp.bench.stream_source import cpu_seconds, pool_row, pool_rows
from dflash_mp.bench.synthetic import synthetic_expectations, synthetic_plan
from dflash_mp.config import StreamConfig
from dflash_mp.data.row import RowKey
from dflash_mp.errors import DflashError
from dflash_mp.process import MARK, mark_of
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.handshake import SHARED_MEMORY
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.plan import StreamPlan
from dflash_mp.stream.slots import make_slots

_TOKENS = 1024
_SLOTS = 6
_COPY = "one copy"


@dataclass(frozen=True)
class Way:
    """How rows of the real stream go: `copies` of a row in user space after the target has written it; `raw` is what it's compared with."""

    name: str
    transport: str
    raw: str | None
    copies: int
    shared_memory: bool
    checksums: bool


WAYS = [
    Way("shared memory", "ipc", None, 0, True, False),
    Way("shared memory, summed", "ipc", None, 0, True, True),
    Way("in-band, ipc://", "ipc", "raw Unix socket", 1, False, True),
    Way("in-band, tcp://", "tcp", "raw TCP socket", 1, False, True),
]
_RAW = {"raw Unix socket": "ipc", "raw TCP socket": "tcp"}
_CHECKSUM = "a checksum alone"


@dataclass
class Samples:
    """One way's measurements."""

    gigabytes_per_second: list[float] = field(default_factory=list)
    cpu_per_gigabyte: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return statistics.median(self.gigabytes_per_second)

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_per_gigabyte)


@dataclass
class StreamSpeed:
    """The result: samples by way."""

    row_bytes: int
    rows: int
    samples: dict[str, Samples]

    def lines(self) -> list[str]:
        """The result in words."""
        repeats = len(self.samples[_COPY].cpu_per_gigabyte)
        lines = [
            f"{self.rows} rows of {self.row_bytes / 2**20:.1f} MiB, each way {repeats} times in turn; medians",
            f"{'':22}  GB/s   CPU s/GB  of one copy  of its raw socket  copies  checksums",
        ]
        for name, sample in self.samples.items():
            way = next((way for way in WAYS if way.name == name), None)
            share = "" if way is None or way.raw is None else f"{sample.speed / self.samples[way.raw].speed:.2f}"
            about = "" if way is None else f"{way.copies:7}  {'both sides' if way.checksums else 'none':>10}"
            part = f"{sample.speed / self.samples[_COPY].speed:.2f}"
            lines.append(
                f"{name:22}  {sample.speed:5.2f}  {sample.cpu:8.2f}  {part:>11}  {share:>17}  {about}".rstrip()
            )
        lines.append(
            "Copies in user space of a row that the target has written; one, in all ways, is the target's writing. A checksum is taken twice."
        )
        return lines


def bench_stream(row_mib: float = 16, rows: int = 24, repeats: int = 5) -> StreamSpeed:
    """Measure. Raises `DflashError` if a row arrives changed."""
    hidden = max(32, int(row_mib * 2**20 / _TOKENS / 4) // 32 * 32)
    plan = synthetic_plan(_TOKENS, hidden)
    nbytes = RowLayout.of(plan).nbytes
    with _Source(_TOKENS, hidden, nbytes) as source:
        streams: list[_Stream] = []
        try:
            ways: dict[str, Callable[[int], float]] = {_COPY: source.copy, _CHECKSUM: source.raws["ipc"].checksum}
            for name, kind in _RAW.items():
                source.raws[kind].check()
                ways[name] = source.raws[kind].take
            for rank, way in enumerate(WAYS):
                stream = _Stream(plan, source.endpoints[way.transport], way, rank)
                streams.append(stream)
                stream.check()
                ways[way.name] = stream.take
            samples = {name: Samples() for name in ways}
            for repeat in range(-1, repeats):  # the first is a warm-up
                for name in random.Random(repeat).sample(list(ways), len(ways)):
                    before = source.cpu() + cpu_seconds()
                    seconds = ways[name](rows)
                    cpu = source.cpu() + cpu_seconds() - before
                    if repeat >= 0:
                        samples[name].gigabytes_per_second.append(rows * nbytes / seconds / 1e9)
                        samples[name].cpu_per_gigabyte.append(cpu / (rows * nbytes / 1e9))
        finally:
            for stream in streams:
                stream.client.close()
    return StreamSpeed(nbytes, rows, samples)


class _Stream:
    """Rows through the real client."""

    def __init__(self, plan: StreamPlan, endpoint: str, way: Way, rank: int) -> None:
        self._nbytes = RowLayout.of(plan).nbytes
        window = StreamConfig(window_mib=_SLOTS * self._nbytes / 2**20, row_seconds=60)
        self.client = RowClient(
            [endpoint],
            synthetic_expectations(plan),
            rank=rank,
            world=len(WAYS),
            stream=window,
            shared_memory=way.shared_memory,
            checksums=way.checksums,
        )
        self.client.connect()
        lane = self.client.lanes[endpoint]
        if (lane == SHARED_MEMORY) != way.shared_memory:
            self.client.close()
            raise DflashError(
                f"rows of {self._nbytes / 2**20:.1f} MiB can't go by {way.name}: the lane is {lane}",
                "see the reason in the log; measure smaller rows (--row-mib)",
            )
        self._next = 0

    def take(self, rows: int) -> float:
        keys = self._schedule(rows)
        start = time.perf_counter()
        for key in keys:
            self.client.take(key).release()
        return time.perf_counter() - start

    def check(self) -> None:
        """Compare a few rows with what they should be."""
        for key in self._schedule(3):
            with self.client.take(key) as row:
                _compare(row.buffer, key.ordinal, self._nbytes, row.feeder)

    def _schedule(self, rows: int) -> list[RowKey]:
        keys = [RowKey("train", self._next + n) for n in range(rows)]
        self._next += rows
        self.client.schedule(iter(keys))
        return keys


class _Raw:
    """Rows through a raw socket, into as many slots as the stream has."""

    def __init__(self, connection: socket.socket, nbytes: int) -> None:
        self._connection, self._nbytes = connection, nbytes
        self._slots = make_slots(0, _SLOTS, nbytes, pin=False, remedy="measure smaller rows (--row-mib)")

    def take(self, rows: int) -> float:
        start = time.perf_counter()
        self._connection.sendall(rows.to_bytes(8, "little"))
        for number in range(rows):
            view, received = self._slots[number % _SLOTS].view, 0
            while received < self._nbytes:
                received += self._connection.recv_into(view[received:])
        return time.perf_counter() - start

    def checksum(self, rows: int) -> float:
        start = time.perf_counter()
        for number in range(rows):
            xxhash.xxh3_64_intdigest(self._slots[number % _SLOTS].view)
        return time.perf_counter() - start

    def check(self) -> None:
        self.take(2)
        _compare(self._slots[1].buffer, 1, self._nbytes, "the raw socket")


class _Source:
    """The sending process."""

    def __init__(self, tokens: int, hidden: int, nbytes: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="dflash-mp-bench-")
        command = [
            sys.executable,
            "-m",
            "dflash_mp.bench.stream_source",
            self._directory.name,
            str(tokens),
            str(hidden),
        ]
        environment = {**os.environ, MARK: mark_of(os.getpid())}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        ports = self._read()
        self.endpoints = dict(zip(("ipc", "tcp"), ports["feeders"], strict=True))
        unix = socket.socket(socket.AF_UNIX)
        unix.connect(str(Path(self._directory.name) / "raw.sock"))
        tcp = socket.create_connection(("127.0.0.1", ports["tcp_port"]))
        self._sockets = (unix, tcp)
        self.raws = {"ipc": _Raw(unix, nbytes), "tcp": _Raw(tcp, nbytes)}

    def copy(self, rows: int) -> float:
        return float(self._ask(f"copy {rows}")["seconds"])

    def cpu(self) -> float:
        return float(self._ask("cpu ")["cpu"])

    def __enter__(self) -> _Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for connection in self._sockets:
            connection.close()
        self._process.communicate()
        self._directory.cleanup()

    def _ask(self, command: str) -> dict[str, Any]:
        if self._process.stdin is None:
            raise RuntimeError("the source has no standard input")
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        if not line:
            raise DflashError("the sending process ended early", "its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _compare(received: torch.Tensor, number: int, nbytes: int, way: str) -> None:
    if not torch.equal(received, pool_row(number % pool_rows(nbytes), nbytes)):
        raise DflashError(
            f"row {number} arrived changed through {way}", "do not trust this machine's figures, nor its memory"
        )
