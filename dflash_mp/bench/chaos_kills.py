"""One fleet of `dflash-mp bench chaos`, a process of its own: `python -m dflash_mp.bench.chaos_kills JOB`.

Which victim is to be hit in which phase is a card; a shuffled deck holds each combination once, so a long enough drill reaches
all. A card waits until its phase is seen; a card whose phase is over in this start goes back. Lines on standard output say what is
done; the report is `chaos.json` in the fleet's directory. A job without kills makes the undisturbed runs.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_mp.bench.chaos_fleet import PHASES, Fleet, FleetJob, Place, leftovers, read_steps
from dflash_mp.bench.chaos_report import VICTIMS, ChaosReport, Kill, compare
from dflash_mp.config_file import load_config
from dflash_mp.errors import DflashError
from dflash_mp.process import die_with_parent

_END_SECONDS = 300.0  # the longest time without a line from the drafters
_TICK_SECONDS = 0.004
_REACH_SECONDS = (
    30.0  # or five times the undisturbed run: the longest wait for a card's phase; then whatever phase it is
)
_LONGEST_REACH_SECONDS = 90.0
# How long after a phase began the kill may come, in seconds. Starting is mostly imports.
_SPREAD = {
    "starting": 3.0,
    "connecting": 0.5,
    "compiling": 2.0,
    "first pass": 0.2,
    "training": 0.5,
    "evaluating": 0.02,
    "checkpointing": 0.01,
}


@dataclass(frozen=True)
class Card:
    """Hit `victim` in `phase`, when a `share` of the phase's spread has passed."""

    victim: str
    phase: str
    share: float


class Deck:
    """Cards in a seeded order, for ever: used up ones are dealt anew."""

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._cards = draw, list[Card]()

    def next(self, fits: Callable[[Card], bool]) -> Card:
        """Take the first card that fits; one of a fresh deck must."""
        while True:
            for index, card in enumerate(self._cards):
                if fits(card):
                    return self._cards.pop(index)
            fresh = [Card(victim, phase, self._draw.random()) for victim in VICTIMS for phase in PHASES]
            self._draw.shuffle(fresh)
            self._cards += fresh

    def back(self, card: Card) -> None:
        """Put it on top."""
        self._cards.insert(0, card)


class Drill:
    """The kills of one fleet."""

    def __init__(self, job: FleetJob, sockets: Path, temporary: Path) -> None:
        self._job, self._sockets, self._temporary = job, sockets, temporary
        self._draw = random.Random(f"{job.seed} {job.name}")
        self._deck = Deck(self._draw)
        self._ends = None if job.seconds is None else time.monotonic() + job.seconds
        self._out = Path(job.out)
        self.report = ChaosReport(job.seed)
        self._begun = 0.0

    def undisturbed(self) -> None:
        """The runs to compare with, plain and compiled."""
        for compiled in (False, True)[: 1 + self._job.compiled]:
            place = self._place(_UNDISTURBED[compiled], compiled)
            fleet, begun = Fleet(place), time.monotonic()
            try:
                fleet.start("run")
                if code := _await_end(fleet):
                    raise DflashError(f"even undisturbed the run ends with exit code {code}:\n{fleet.last_lines()}")
            finally:
                fleet.kill_all()
            seconds = time.monotonic() - begun
            (place.run_dir / "seconds").write_text(f"{seconds:.3f}\n", encoding="utf-8")
            print(f"{place.run_dir.name}: {seconds:.1f} s", flush=True)

    def disturbed(self) -> None:
        """Runs, until all kills are made or the time is over."""
        number = int(self._job.name.rpartition("-")[2])
        while self.report.runs == 0 or not self._enough():
            self.report.runs += 1
            compiled = self._job.compiled and (number + self.report.runs) % 3 == 0
            place = self._place(f"run-{self.report.runs}", compiled)
            reference = self._out / "undisturbed" / _UNDISTURBED[compiled]
            self._run(place, compiled, float((reference / "seconds").read_text(encoding="utf-8")))
            compare(reference, place.run_dir, self.report)

    def _place(self, name: str, compiled: bool) -> Place:
        home = self._out / self._job.name
        options = (f"seed={self._job.seed}", *(("train.compile=true",) if compiled else ()))
        return Place(
            self._out / "run.yaml", home / name, self._sockets, self._temporary, options, home / "compiled-code"
        )

    def _enough(self) -> bool:
        return len(self.report.kills) >= self._job.kills or (self._ends is not None and time.monotonic() > self._ends)

    def _run(self, place: Place, compiled: bool, undisturbed_seconds: float) -> None:
        """One run to its end: starts and kills until it is done or enough was killed, then a start that nothing disturbs."""
        fleet, report, self._begun = Fleet(place), self.report, time.monotonic()
        phases = tuple(phase for phase in PHASES if phase != ("first pass" if compiled else "compiling"))
        patience = min(max(_REACH_SECONDS, 5 * undisturbed_seconds), _LONGEST_REACH_SECONDS)
        try:
            done = False
            while not done and not self._enough():
                self._deck.back(first := self._deck.next(lambda card: card.phase in phases))
                by_run = first.victim == "supervisor" or self._draw.random() < 0.2
                layout = "run" if by_run else "hand"
                if layout == "hand":
                    fleet.keep_feeders()
                fleet.start(layout)
                made = self._start(fleet, layout, phases, patience)
                code = _await_end(fleet)
                report.orphans += fleet.orphans()
                done = code == 0
                if not made and not done:
                    report.unexpected.append(f"a start that nothing killed ended with {code}:\n{fleet.last_lines()}")
                    break
            fleet.start("run")  # also takes away what a killed `run` had to leave: its socket
            if code := _await_end(fleet):
                report.unexpected.append(f"the last, undisturbed start ended with {code}:\n{fleet.last_lines()}")
            report.orphans += fleet.orphans()
            fleet.stop_feeders()
        finally:
            fleet.kill_all()
        report.drafter_starts += fleet.starts
        report.feeder_starts += fleet.feeder_starts
        report.undisturbed_seconds += undisturbed_seconds
        report.disturbed_seconds += time.monotonic() - self._begun
        _count_again(place, report)

    def _start(self, fleet: Fleet, layout: str, phases: tuple[str, ...], patience: float) -> int:
        """Kill until the drafters are hit, and sometimes once more while the rest is stopping. The number of kills that can end the start."""
        fatal, hit = 0, set[int]()
        victims = tuple(victim for victim in VICTIMS if layout == "run" or victim != "supervisor")
        while not self._enough() and fleet.exit_code is None:
            card = self._deck.next(lambda card: card.victim in victims and _can_come(card, fleet, phases))
            struck = self._reach(fleet, card, phases, hit, 0.0 if fatal else patience)
            if struck is None:
                self._deck.back(card)
                if fatal:
                    break
                continue
            pid, phase = struck
            hit.add(pid)
            by_hand = card.victim == "feeder" and layout == "hand"
            phase = "stopping" if fatal and not by_hand else phase
            run = f"{self._job.name}/{fleet.place.run_dir.name}"
            kill = Kill(card.victim, phase, layout, run, fleet.step(), time.monotonic() - self._begun)
            self.report.kills.append(kill)
            print(
                f"kill {len(self.report.kills)}: {card.victim}, {phase} ({layout}, {run}, step {kill.step})", flush=True
            )
            fatal += not by_hand
            if fatal and self._draw.random() < 0.7:
                break
        return fatal

    def _reach(
        self, fleet: Fleet, card: Card, phases: tuple[str, ...], hit: set[int], patience: float
    ) -> tuple[int, str] | None:
        """Wait for a victim in the card's phase and kill it; pid and phase, None when that can't come any more.

        After `patience` seconds whatever phase it is in will do.
        """
        deadline, seen = time.monotonic() + patience, False
        while fleet.exit_code is None:
            if fleet.feeders:
                fleet.keep_feeders()
            late = time.monotonic() >= deadline
            for pid in [pid for pid in fleet.pids(card.victim) if pid not in hit]:
                if not late and fleet.phase(card.victim, pid) != card.phase:
                    continue
                if not seen and not late:
                    seen = True
                    time.sleep(card.share * _SPREAD[card.phase])
                if (phase := fleet.strike(card.victim, pid, None if late else card.phase)) is not None:
                    return pid, phase
            if late or not _can_come(card, fleet, phases):
                return None
            time.sleep(_TICK_SECONDS)
        return None


_UNDISTURBED = {False: "plain", True: "compiled"}


def _can_come(card: Card, fleet: Fleet, phases: tuple[str, ...]) -> bool:
    """Whether this start can still reach the card's phase; those of training alternate."""
    if card.victim == "feeder" and card.phase == "starting":
        return fleet.a_feeder_starts()
    now = fleet.run_phase()
    passed = min(phases.index(now), phases.index("training")) if now in phases else 0
    return card.phase in phases[passed:]


def _await_end(fleet: Fleet) -> int:
    """The exit code of the drafters' start, which must not go for `_END_SECONDS` without a word."""
    said, deadline = -1, 0.0
    while (code := fleet.exit_code) is None:
        if (now_said := fleet.said()) != said:
            said, deadline = now_said, time.monotonic() + _END_SECONDS
        if time.monotonic() > deadline:
            raise DflashError(f"the drafters neither end nor go on for {_END_SECONDS:.0f} s:\n{fleet.last_lines()}")
        if fleet.feeders:
            fleet.keep_feeders()
        time.sleep(0.02)
    return code


def _count_again(place: Place, report: ChaosReport) -> None:
    train, lines = load_config(place.file).config.train, read_steps(place.run_dir)
    for kind, rows in (("train", train.rows_per_step), ("held_out", train.held_out_rows)):
        steps = [step for step, its_kind in lines if its_kind == kind]
        again = len(steps) - len(set(steps))
        report.steps_again += again if kind == "train" else 0
        report.rows_again += again * rows


def main(job: FleetJob) -> None:
    """Do `job` and write its report."""
    die_with_parent()
    home = Path(job.out) / job.name
    home.mkdir()
    with tempfile.TemporaryDirectory(prefix="dmp-") as short:  # a socket's path may not be long
        sockets, temporary = Path(short, "s"), Path(short, "t")
        temporary.mkdir()
        drill = Drill(job, sockets, temporary)
        if job.kills:
            drill.disturbed()
        else:
            drill.undisturbed()
        drill.report.left = leftovers([sockets, temporary])
    drill.report.write_json(home / "chaos.json")


if __name__ == "__main__":
    main(FleetJob(**json.loads(sys.argv[1])))
