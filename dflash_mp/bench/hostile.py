"""`dflash-mp bench hostile`: a legitimate run beside hostile peers, against the same run alone.

A feeder whose rows take a fixed time to make (a sleep: a GPU's work, not this machine's) serves an honest drafter by tcp or ipc, each byte of whose rows
is compared. A third process attacks the feeder in one way at a time; connections that say nothing are as many as the feeder keeps. Short windows with and without the attack take turns within one
run and the median of their ratios counts, so other work on the machine touches both alike; the attacker's own CPU time is in
the result. Fails with `DflashError` when a row is wrong or late, or the feeder dies.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import zmq

from dflash_mp.bench import zmtp
from dflash_mp.bench.feeder_child import SPAWN, CheckingDrafter, FeederChild, FeederChildOptions, start_marked
from dflash_mp.bench.synthetic import synthetic_expectations, synthetic_plan
from dflash_mp.data.row import RowKey
from dflash_mp.errors import DflashError
from dflash_mp.process import die_with_parent
from dflash_mp.stream import messages as m
from dflash_mp.stream.connections import most_connections
from dflash_mp.stream.plan import StreamPlan

_SECONDS_PER_ROW = 0.004
_CONNECTIONS = most_connections()  # as many as the feeder keeps, which was given the same limit of files
_PAUSE = 0.001  # between two attempts
GOAL = 0.9

GoOn = Callable[[], bool]
Attack = Callable[[str, StreamPlan, GoOn], int]


@dataclass
class Effect:
    """Of one attack: rows per second in the windows without and with it."""

    attack: str
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    attempts: int = 0
    growth_bytes: int = 0  # most, of the feeder's memory

    @property
    def share(self) -> float:
        """Median of the speed beside the attack over that of the windows around it."""
        return statistics.median(b / a for a, b in zip(self.alone, self.beside, strict=True))

    def line(self) -> str:
        return (
            f"{self.attack:28} {self.share:5.2f} of {statistics.median(self.alone):6.1f} rows/s; "
            f"{self.attempts:>7} attempts, feeder +{self.growth_bytes / 2**20:.0f} MiB at most"
        )


def hostile(
    rounds: int = 7,
    seconds: float = 0.5,
    transport: str = "tcp",
    attacks: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda text: None,
) -> list[Effect]:
    """Measure `attacks` (default: all), `rounds` pairs of windows of so many seconds each. Raises what the module's docstring says."""
    unknown = [name for name in attacks if name not in ATTACKS]
    if unknown:
        raise DflashError(f"there is no attack {unknown[0]!r}", f"the attacks are {', '.join(ATTACKS)}")
    plan = synthetic_plan(row_tokens=256, hidden_size=64)
    effects = []
    with tempfile.TemporaryDirectory(prefix="dmp-hostile-") as directory:
        endpoint = "tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{directory}/feeder.sock"
        with FeederChild(FeederChildOptions(endpoint, plan, _SECONDS_PER_ROW)) as feeder:
            drafter = CheckingDrafter(feeder.endpoint, plan)
            try:
                with _attacker(feeder.endpoint, plan) as attacker:
                    drafter.rate(seconds)
                    for name in attacks or ATTACKS:
                        effects.append(_measure(name, attacker, feeder, drafter, rounds, seconds))
                        say(effects[-1].line())
            finally:
                drafter.client.close()
    return effects


def _measure(
    name: str, attacker: Connection, feeder: FeederChild, drafter: CheckingDrafter, rounds: int, seconds: float
) -> Effect:
    effect, before = Effect(name), feeder.resident
    for _ in range(rounds):
        first = drafter.rate(seconds / 2)
        attacker.send(name)
        attacker.recv()  # it is under way
        effect.beside.append(drafter.rate(seconds))
        effect.growth_bytes = max(effect.growth_bytes, feeder.resident - before)
        attacker.send("")
        while not attacker.poll(0):  # its end is not the window's business, but rows go on
            drafter.take()
        effect.attempts += attacker.recv()
        drafter.rate(seconds / 2)  # meanwhile the feeder closes what the attack had opened
        effect.alone.append((first + drafter.rate(seconds / 2)) / 2)
    return effect


# -- the attacker's process -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _attacker(endpoint: str, plan: StreamPlan) -> Iterator[Connection]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_attack, args=(theirs, endpoint, plan), daemon=True)
    start_marked(process)
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _attack(pipe: Connection, endpoint: str, plan: StreamPlan) -> None:
    """For each name received: attack, say that it is under way, and go on until the next word; then say how often it was tried."""
    die_with_parent()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    while True:
        attempts = ATTACKS[pipe.recv()](endpoint, plan, _UntilTold(pipe))
        pipe.recv()
        pipe.send(attempts)


class _UntilTold:
    """Whether to go on; the first question says that the attack is under way."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._told = pipe, False

    def __call__(self) -> bool:
        if not self._told:
            self._told = True
            self._pipe.send(None)
        return not self._pipe.poll(0)


def _again_and_again(once: Callable[[str], None]) -> Attack:
    """Do it, count it, pause; that the feeder hangs up is what an attacker expects."""

    def attack(endpoint: str, plan: StreamPlan, go_on: GoOn) -> int:
        attempts = 0
        while go_on():
            with contextlib.suppress(OSError):
                once(endpoint)
            attempts += 1
            time.sleep(_PAUSE)
        return attempts

    return attack


def _frame_too_large(endpoint: str) -> None:
    with zmtp.dealer(endpoint) as connection:
        connection.sendall(zmtp.frame(bytes(m.HEADER_BYTES + 1)))
        connection.recv(1)


def _sizes_that_lie(endpoint: str) -> None:
    """A frame that says 2^62 bytes; one that says 64 KiB and brings 10; a message that says it goes on and doesn't."""
    for says, more in ((1 << 62, False), (m.HEADER_BYTES, False), (10, True)):
        with zmtp.dealer(endpoint) as connection:
            connection.sendall(zmtp.frame(bytes(10), more, says))


def _endless_message(endpoint: str) -> None:
    part = zmtp.frame(b"x", more=True) * 20_000
    with zmtp.dealer(endpoint) as connection:
        connection.settimeout(2.0)
        for _ in range(1000):
            connection.sendall(part)
    time.sleep(0.05)


def _connections(open_one: Callable[[str], socket.socket], count: int) -> Attack:
    """Hold so many connections, and replace those that the feeder cuts off."""

    def attack(endpoint: str, plan: StreamPlan, go_on: GoOn) -> int:
        held: list[socket.socket] = []
        attempts = 0

        def fill() -> None:
            nonlocal attempts
            while len(held) < count:
                with contextlib.suppress(OSError):
                    held.append(open_one(endpoint))
                attempts += 1

        fill()
        while go_on():
            time.sleep(0.05)
            held[:] = [each for each in held if not _hung_up(each)]
            fill()
        for each in held:
            each.close()
        return attempts

    return attack


def _half_open(endpoint: str) -> socket.socket:
    connection = zmtp.connect(endpoint)
    connection.sendall(zmtp.GREETING[:11])
    return connection


def _hung_up(connection: socket.socket) -> bool:
    connection.settimeout(0.0)
    try:
        return connection.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _never_reads(endpoint: str, plan: StreamPlan, go_on: GoOn) -> int:
    """Asks for rows and weights, says that it lives, and reads nothing."""
    hello = m.Hello(m.VERSION, "deaf", os.urandom(4).hex(), 0, 2, synthetic_expectations(plan), None, ("inband",))
    gets = [m.RowRequest(number, RowKey("train", number)) for number in range(3)]
    attempts = 0
    with zmtp.dealer(endpoint) as connection:
        messages: list[m.Message] = [hello, m.Get(tuple(gets)), *[m.GetWeights("embedding", 0)] * 4]
        for message in messages:
            connection.sendall(zmtp.frame(m.encode(message)))
        while go_on():
            with contextlib.suppress(OSError):
                connection.sendall(zmtp.frame(m.encode(m.Ping(attempts, 0))))
            attempts += 1
            time.sleep(_PAUSE)
    return attempts


def _conversation(plan: StreamPlan) -> list[bytes]:
    """HELLO and what may follow it."""
    hello = m.Hello(m.VERSION, "parrot", os.urandom(4).hex(), 0, 2, synthetic_expectations(plan), None, ("inband",))
    said: list[m.Message] = [hello, m.Get((m.RowRequest(1, RowKey("train", 1)),)), m.Release(1, 0), m.Ping(1, 1)]
    return [m.encode(message) for message in [*said, m.Bye("done", "")]]


def _replays(endpoint: str, plan: StreamPlan, go_on: GoOn) -> int:
    """What was right when it was first said, said again and again, forwards and backwards, after one greeting."""
    hello, *said = _conversation(plan)
    return _flood(endpoint, [*said, *reversed(said), *said[:2]], go_on, first=hello)


def _guests(endpoint: str, plan: StreamPlan, go_on: GoOn) -> int:
    """Whole conversations: each is a drafter that may come, takes its turn with the rows that it asks for, and goes."""
    return _flood(endpoint, _conversation(plan), go_on)


def _garbage(endpoint: str, plan: StreamPlan, go_on: GoOn) -> int:
    return _flood(endpoint, [os.urandom(200) for _ in range(50)], go_on)


def _flood(endpoint: str, frames: list[bytes], go_on: GoOn, first: bytes | None = None) -> int:
    attempts = 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        if first is not None:
            dealer.send(first)
        while go_on():
            for frame in frames[attempts % len(frames) :][:10]:
                with contextlib.suppress(zmq.Again):
                    dealer.send(frame, zmq.DONTWAIT)
                attempts += 1
            while dealer.poll(0):
                dealer.recv_multipart()
            time.sleep(10 * _PAUSE)
    return attempts


ATTACKS: dict[str, Attack] = {
    "frames too large": _again_and_again(_frame_too_large),
    "sizes that lie": _again_and_again(_sizes_that_lie),
    "a message without end": _again_and_again(_endless_message),
    "garbage": _garbage,
    "replays": _replays,
    "drafters that come and go": _guests,
    "a peer that never reads": _never_reads,
    "idle connections": _connections(zmtp.dealer, _CONNECTIONS),
    "half handshakes": _connections(_half_open, _CONNECTIONS),
}
