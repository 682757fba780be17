"""The processes of a run that is being disturbed: real feeders, torchrun, ranks and supervisors, found, aged and killed.

Drafters run in one of two layouts: `hand` (feeders and torchrun are each restarted alone, as an operator would) or `run` (`dflash-mp run`).
Which phase a process is in is read from outside: its threads, its log since it started, `metrics.jsonl` and the
checkpoint directory; `strike` stops the ranks while it looks, so that what it says of a kill is true. Nothing in the product knows that
it is watched.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_mp import run as launcher
from dflash_mp.config_file import LoadedConfig, load_config
from dflash_mp.drafter.schedule import held_out_due
from dflash_mp.process import MARK, children_of, mark_of, marked_processes, send_signal
from dflash_mp.run_view import parse_metrics
from dflash_mp.supervisor import Part, Running

FEEDERS = 2
PHASES = ("starting", "connecting", "compiling", "first pass", "training", "evaluating", "checkpointing")
_PYTHONS_DIRECTORY = re.compile(r"tmp\w{8}")
_COMPILERS_FILE = re.compile(r"cc\w{6}\.(s|o|res|ld|le|ii)")
_UNFINISHED = re.compile(r"\.step-\d{8}\.(\d+)\.tmp")  # a checkpoint that the process of that number writes
_START_SECONDS = 60.0
_ORPHAN_SECONDS = 10.0  # within which whatever a killed process had started must be gone


@dataclass(frozen=True)
class FleetJob:
    """What one process of the drill does below `out`: `kills` kills, for `seconds` at most. JSON can say it."""

    name: str
    out: str
    kills: int
    seed: int
    seconds: float | None
    compiled: bool  # every third run compiles


@dataclass(frozen=True)
class Place:
    """Where the run of a fleet lives, and the options that make it."""

    file: Path
    run_dir: Path
    sockets: Path
    temporary: Path
    options: tuple[str, ...]
    compiled_code: Path  # PyTorch's cache

    def load(self, by_hand: bool) -> LoadedConfig:
        return load_config(self.file, self.overrides(by_hand))

    def overrides(self, by_hand: bool) -> tuple[str, ...]:
        endpoints = ", ".join(f"'ipc://{self.sockets}/{i}.sock'" for i in range(FEEDERS))
        hand = (f"feed.endpoints=[{endpoints}]",) if by_hand else ()
        return (f"run_dir={self.run_dir}", *self.options, *hand)


class Fleet:
    """Feeders that are kept alive, and one start of the drafters at a time."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.feeders: dict[int, Running] = {}
        self.feeder_starts = self.starts = 0
        self._drafters: Running | None = None
        self._layout = ""
        self._log_start = self._metrics_start = 0
        loaded = place.load(by_hand=True)
        self._parts, self._train = launcher.plan(loaded, place.overrides(by_hand=True)), loaded.config.train
        self._run_mark = ""
        self.environment = {
            **launcher.environment(),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(place.temporary),
            "XDG_RUNTIME_DIR": str(place.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(place.compiled_code),
        }
        self._marked = {**self.environment, MARK: mark_of(os.getpid())}

    # -- starting and ending ------------------------------------------------------------------------------------------------------

    def start(self, layout: str) -> None:
        """Start the drafters: torchrun by hand, or `dflash-mp run` with a feeder of its own."""
        self._layout = layout
        log = self.place.run_dir / "logs" / "drafters.log"
        self._log_start = log.stat().st_size if log.exists() else 0
        self._metrics_start = _size(self.place.run_dir / "metrics.jsonl")
        part = self._parts[-1]
        if layout == "run":
            sets = (word for text in self.place.overrides(by_hand=False) for word in ("--set", text))
            command = (part.command[0], "-m", "dflash_mp.cli", "run", "-c", str(self.place.file), *sets)
            part = Part("supervisor", command, self.place.run_dir / "logs" / "run.log")
        self._drafters = Running(part, self._marked)
        # A zombie keeps its start time, so this works even if it died at once.
        self._run_mark = mark_of(self._drafters.process.pid) if layout == "run" else ""
        self.starts += 1

    def keep_feeders(self) -> None:
        """(Re)start each feeder that is managed by hand and does not run."""
        for index, part in enumerate(self._parts[:-1]):
            feeder = self.feeders.get(index)
            if feeder is None or feeder.exit_code is not None:
                self.feeders[index] = Running(part, self._marked)
                self.feeder_starts += 1

    @property
    def exit_code(self) -> int | None:
        """Of the drafters' start."""
        return self._drafters.exit_code if self._drafters else 0

    def said(self) -> int:
        """Bytes that the drafters have logged, over all starts."""
        return _size(self.place.run_dir / "logs" / "drafters.log")

    def last_lines(self) -> str:
        return self._drafters.last_lines() if self._drafters else ""

    def orphans(self) -> list[str]:
        """After the drafters' process ended: kill and name what it left, `_ORPHAN_SECONDS` later."""
        if self._drafters is None:
            return []
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        named = [_command(pid) for pid in left]
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        return named

    def stop_feeders(self) -> None:
        """In order, as an operator would, once they serve: until then the socket of a killed one lies there."""
        deadline = time.monotonic() + _START_SECONDS
        for feeder in self.feeders.values():
            while feeder.exit_code is None and not _talks(feeder.process.pid) and time.monotonic() < deadline:
                time.sleep(0.02)
            feeder.ask_to_stop()
        for feeder in self.feeders.values():
            feeder.process.wait(30.0)

    def kill_all(self) -> None:
        """End whatever is left, for when the tool itself fails."""
        own = [one.process.pid for one in [*self.feeders.values(), *([self._drafters] if self._drafters else [])]]
        for pid in [*self._left(), *own]:
            send_signal(pid, signal.SIGKILL)
        for one in [*self.feeders.values(), *([self._drafters] if self._drafters else [])]:
            one.process.wait(30.0)

    def _left(self) -> list[int]:
        by_hand = {feeder.process.pid for feeder in self.feeders.values()}
        left = [pid for pid in marked_processes(self._marked[MARK]) if pid not in by_hand]
        return left + (marked_processes(self._run_mark) if self._run_mark else [])

    # -- victims ------------------------------------------------------------------------------------------------------------------

    def pids(self, victim: str) -> list[int]:
        """Living processes of a kind: feeder, drafter, torchrun or supervisor."""
        if self._drafters is None:
            return []
        main = self._drafters.process.pid if self._drafters.exit_code is None else None
        if self._layout == "hand":
            torchrun = [main] if main else []
            feeders = [one.process.pid for one in self.feeders.values() if one.exit_code is None]
        else:
            below = {pid: _command(pid) for pid in (_children(main) if main else [])}
            torchrun = [pid for pid, command in below.items() if "dflash_mp.torchrun" in command]
            feeders = [pid for pid, command in below.items() if " feed " in command]
        if victim == "supervisor":
            return [main] if main and self._layout == "run" else []
        if victim == "drafter":
            return [rank for one in torchrun for rank in _children(one)]
        return torchrun if victim == "torchrun" else feeders

    def a_feeder_starts(self) -> bool:
        """Whether one does, or will in this start."""
        pids = self.pids("feeder")
        return any(not _talks(pid) for pid in pids) or (self._layout == "run" and not pids and self.exit_code is None)

    # -- phases -------------------------------------------------------------------------------------------------------------------

    def phase(self, victim: str, pid: int) -> str:
        """What the victim, or the run that it serves, is doing, as far as can be seen from outside."""
        if victim == "feeder" and not _talks(pid):
            return "starting"
        phase = self.run_phase()
        return "waiting" if victim == "feeder" and phase == "starting" else phase

    def run_phase(self) -> str:
        """The phase of the ranks, one of `PHASES`."""
        ranks = self.pids("drafter")
        if not ranks or not any(_talks(rank) for rank in ranks):
            return "starting"
        lines = self._trained()
        if lines and self._writes_checkpoint(ranks):
            return "checkpointing"
        if b"M parameters" not in _since(self.place.run_dir / "logs" / "drafters.log", self._log_start):
            return "connecting"
        if not lines:
            return "compiling" if self._train.compile else "first pass"
        step, kind = lines[-1]
        return "evaluating" if kind == "train" and held_out_due(step, self._train) else "training"

    def strike(self, victim: str, pid: int, aim: str | None) -> str | None:
        """Kill the victim if it is in the phase `aim` (None: in any); the phase that it was in, None if it was spared or gone."""
        with self._ranks_stopped():
            if pid not in self.pids(victim):
                return None
            phase = self.phase(victim, pid)
            if aim not in (None, phase):
                return None
            send_signal(pid, signal.SIGKILL)
            return phase

    @contextlib.contextmanager
    def _ranks_stopped(self) -> Iterator[None]:
        ranks = self.pids("drafter")
        for rank in ranks:
            send_signal(rank, signal.SIGSTOP)
        try:
            yield
        finally:
            for rank in ranks:
                send_signal(rank, signal.SIGCONT)

    def _writes_checkpoint(self, ranks: Sequence[int]) -> bool:
        """Whether one of the ranks is at it; what a killed one left does not count."""
        checkpoints = self.place.run_dir / "checkpoints"
        try:
            found = [_UNFINISHED.fullmatch(name) for name in os.listdir(checkpoints)]
        except FileNotFoundError:
            return False
        return any(match is not None and int(match[1]) in ranks for match in found)

    def step(self) -> int:
        """The last step that this or an earlier start logged."""
        return max((step for step, _ in read_steps(self.place.run_dir)), default=0)

    def _trained(self) -> list[tuple[int, str]]:
        return _steps(_since(self.place.run_dir / "metrics.jsonl", self._metrics_start))


def read_steps(run_dir: Path) -> list[tuple[int, str]]:
    """(step, kind) of each line of metrics.jsonl, over all starts."""
    return _steps(_since(run_dir / "metrics.jsonl", 0))


def _steps(data: bytes) -> list[tuple[int, str]]:
    lines = data.decode(errors="replace").splitlines()
    found = [(parse_metrics(line), line) for line in lines]
    return [(int(f["step"]), "train" if '"kind": "train"' in line else "held_out") for f, line in found if "step" in f]


def _talks(pid: int) -> bool:
    """Whether the process has sockets of the stream: libzmq's threads carry its name."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        return any(Path(f"/proc/{pid}/task/{task}/comm").read_text().startswith("ZMQbg") for task in tasks)
    except OSError:
        return False


def _children(parent: int) -> list[int]:
    """As `children_of`, from the kernel's own list where it keeps one: looking through all of /proc is too slow for each tick."""
    try:
        tasks = os.listdir(f"/proc/{parent}/task")
        return [int(pid) for task in tasks for pid in Path(f"/proc/{parent}/task/{task}/children").read_text().split()]
    except OSError:
        return children_of(parent)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _since(file: Path, offset: int) -> bytes:
    try:
        with file.open("rb") as opened:
            opened.seek(offset)
            return opened.read()
    except FileNotFoundError:
        return b""


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def leftovers(places: Sequence[Path], shared_memory_before: set[str] | None = None) -> list[str]:
    """Files below `places`, but for what PyTorch's compilation puts there, and new ones in /dev/shm that nobody uses."""
    found = [path for place in places if place.exists() for path in sorted(place.rglob("*"))]
    left = [str(path) for path in found if not any(map(_of_compilation, [path, *path.parents]))]
    if shared_memory_before is not None:
        left += shared_memory_left(shared_memory_before)
    return left


def shared_memory_left(before: set[str]) -> list[str]:
    """This user's files in /dev/shm that aren't in `before` and that no living process has open or mapped: what is in use is another's."""
    new = [Path("/dev/shm", name) for name in sorted(set(os.listdir("/dev/shm")) - before)]
    used = _used_shared_memory() if new else set()
    left = []
    for path in new:
        with contextlib.suppress(FileNotFoundError):  # its owner has just removed it
            if path.stat().st_uid == os.getuid() and str(path) not in used:
                left.append(str(path))
    return left


def _used_shared_memory() -> set[str]:
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            used.update(re.findall(r"/dev/shm/\S+", (process / "maps").read_text(encoding="utf-8", errors="replace")))
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    used.add(os.readlink(descriptor))
    return used


def _of_compilation(path: Path) -> bool:
    """PyTorch's cache; and what it, or the C++ compiler, had open when it was killed: a directory with a header and its build, cc….s."""
    if path.name.startswith("torchinductor_") or _COMPILERS_FILE.fullmatch(path.name):
        return True
    return _PYTHONS_DIRECTORY.fullmatch(path.name) is not None and any(path.glob("header*"))
