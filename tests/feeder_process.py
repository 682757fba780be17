"""Real feeder processes for tests: started from a fork server (torch is imported once), killed, stopped, paused, asked how they are."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from hosts import enter_namespace

from dflash_mp.bench.synthetic import RUN, synthetic_plan, synthetic_row, synthetic_weights
from dflash_mp.data.row import RowKey
from dflash_mp.errors import DataError
from dflash_mp.stream.feeder import FeederService, FeederStatus
from dflash_mp.stream.feeder_peer import Peer
from dflash_mp.stream.feeder_peers import Peers
from dflash_mp.stream.keys import FeederKeys
from dflash_mp.stream.messages import Message, Placed, Row
from dflash_mp.stream.plan import StreamPlan
from dflash_mp.stream.weights import WeightsServer

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["dflash_mp.bench.synthetic", "dflash_mp.stream.feeder"])  # what takes long to import
START_SECONDS = 150.0  # of the first process: the fork server imports torch before, seconds on a quiet machine


@dataclass(frozen=True)
class Behaviour:
    """What a feeder does besides serving synthetic rows. `fails`: ordinal → whether another attempt may help."""

    seconds_per_row: float = 0.0
    fails: dict[int, bool] = field(default_factory=dict)
    stuck_at: int | None = None  # ordinal that is computed for ever
    stuck_after: int | None = None  # all behind this ordinal are
    corrupts: int = 0  # the first rows, after their checksum was taken
    silent_seconds: float = 4.0
    memory_mib: float = 64.0
    run: str = RUN
    keys: Path | None = None
    log: Path | None = None
    host: Path | None = None  # the network namespace that it runs in


class FeederProcess:
    """A feeder that listens when the constructor returns."""

    def __init__(self, endpoint: str, plan: StreamPlan | None = None, behaviour: Behaviour = Behaviour()) -> None:
        self._pipe, theirs = SERVER.Pipe()
        self._process = SERVER.Process(target=_main, args=(theirs, endpoint, plan or synthetic_plan(), behaviour))
        self._process.start()
        theirs.close()
        if not self._pipe.poll(START_SECONDS):
            self.kill()
            raise TimeoutError("the feeder process does not listen")
        self.endpoint: str = self._pipe.recv()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def stop(self) -> int | None:
        """SIGTERM; returns the exit code, None after ten seconds without one."""
        self._process.terminate()
        self._process.join(10)
        return self._process.exitcode

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def look(self) -> tuple[FeederStatus, int, int]:
        """Its status, bytes of its row slots, and resident bytes of the process."""
        self._pipe.send(None)
        status, slot_bytes, resident = self._pipe.recv()
        return status, slot_bytes, resident

    def close(self) -> None:
        if self._process.is_alive():
            self.kill()
        self._pipe.close()


@contextlib.contextmanager
def feeders(*processes: FeederProcess) -> Iterator[list[FeederProcess]]:
    """Kill what is left of `processes`, and of those that were added to the list, at the end: Python waits for them before it exits."""
    started = list(processes)
    try:
        yield started
    finally:
        for process in started:
            process.close()


def until(condition: object, seconds: float = 10.0) -> None:
    """Wait until `condition()` is true; fails the test after `seconds`."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def _main(pipe: Connection, endpoint: str, plan: StreamPlan, behaviour: Behaviour) -> None:
    if behaviour.host is not None:
        enter_namespace(behaviour.host)
    torch.set_num_threads(1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if behaviour.log is not None:
        logging.basicConfig(filename=behaviour.log, level=logging.INFO, format="%(message)s")
    if behaviour.corrupts:
        _corrupt(behaviour.corrupts)
    service = FeederService(
        endpoint,
        plan,
        synthetic_weights(plan),
        run=behaviour.run,
        silent_seconds=behaviour.silent_seconds,
        memory_mib=behaviour.memory_mib,
        keys=None if behaviour.keys is None else FeederKeys.load(behaviour.keys),
    )
    threading.Thread(target=_answer, args=(pipe, service), daemon=True).start()
    pipe.send(service.endpoint)

    def compute(key: RowKey, buffer: torch.Tensor) -> None:
        time.sleep(behaviour.seconds_per_row)
        after = behaviour.stuck_after
        if key.ordinal == behaviour.stuck_at or (after is not None and key.ordinal > after):
            time.sleep(3600)
        if key.ordinal in behaviour.fails:
            raise RuntimeError("a passing trouble") if behaviour.fails[key.ordinal] else DataError("row is broken")
        synthetic_row(key, buffer)

    service.serve(compute, stop, stats_seconds=3600)


def _answer(pipe: Connection, service: FeederService) -> None:
    with contextlib.suppress(EOFError, OSError):  # the test has gone
        while True:
            pipe.recv()
            with open("/proc/self/statm", encoding="ascii") as file:
                resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            pipe.send((service.status(), service.slot_bytes, resident))


def _corrupt(rows: int) -> None:
    outgoing, spoilt = Peers.next_outgoing, set[tuple[bytes, int]]()

    def wrong(self: Peers, peer: Peer, weights: WeightsServer) -> tuple[Message, memoryview | None] | None:
        found = outgoing(self, peer, weights)
        if found is not None and isinstance(found[0], Row | Placed):
            row = peer.identity, found[0].request
            if len(spoilt) < rows and row not in spoilt:
                spoilt.add(row)
                peer.ready[0].slot.buffer[peer.ready[0].offset] ^= 0xFF
        return found

    Peers.next_outgoing = wrong  # type: ignore[method-assign]
