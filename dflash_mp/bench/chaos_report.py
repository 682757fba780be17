"""What `dflash-mp bench chaos` found: kills by victim and phase, what they cost, whatever differs, and whatever was left."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from dflash_mp.bench.chaos_fleet import PHASES

VICTIMS = ("feeder", "drafter", "torchrun", "supervisor")
STEPS = 60


@dataclass(frozen=True)
class Kill:
    """A SIGKILL: what it hit, in which phase, after which logged step of which run, `layout` as in `chaos_fleet`."""

    victim: str
    phase: str
    layout: str
    run: str
    step: int
    seconds: float  # since that run began


@dataclass
class ChaosReport:
    """What was done and found. `ok` when nothing differs and nothing was left."""

    seed: int
    steps: int = STEPS
    kills: list[Kill] = field(default_factory=list)
    runs: int = 0
    drafter_starts: int = 0
    feeder_starts: int = 0
    steps_again: int = 0
    rows_again: int = 0  # of those steps, and of held-out measurements made again
    undisturbed_seconds: float = 0.0  # what the runs would have taken without kills
    disturbed_seconds: float = 0.0  # what they took
    wall_seconds: float = 0.0
    compared_tensors: int = 0
    differing: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.differing or self.orphans or self.left or self.unexpected)

    @property
    def seconds_lost(self) -> float:
        return self.disturbed_seconds - self.undisturbed_seconds

    def places(self) -> Counter[tuple[str, str]]:
        """Kills by (victim, phase)."""
        return Counter((kill.victim, kill.phase) for kill in self.kills)

    def add(self, other: ChaosReport) -> None:
        """Take in what another fleet did and found."""
        for name, value in vars(other).items():
            if name not in ("seed", "steps", "wall_seconds"):
                setattr(self, name, getattr(self, name) + value)

    def write_json(self, file: Path) -> None:
        by_place = {f"{victim}, {phase}": count for (victim, phase), count in sorted(self.places().items())}
        facts = {**asdict(self), "ok": self.ok, "seconds_lost": self.seconds_lost, "kills_by_place": by_place}
        file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read_json(file: Path) -> ChaosReport:
        """What `write_json` wrote."""
        facts = json.loads(file.read_text(encoding="utf-8"))
        report = ChaosReport(facts["seed"])
        for name in vars(report):
            setattr(report, name, facts[name])
        report.kills = [Kill(**kill) for kill in facts["kills"]]
        return report


def compare(undisturbed: Path, run_dir: Path, report: ChaosReport) -> None:
    """Add to `report` which tensors of the last checkpoints differ in a bit, or that one is missing."""
    last = Path("checkpoints", f"step-{STEPS:08d}")
    for name in ("weights.safetensors", "optimizer.safetensors"):
        if not (run_dir / last / name).exists():
            report.differing.append(f"{run_dir / last / name} is missing")
            continue
        ours, theirs = load_file(undisturbed / last / name), load_file(run_dir / last / name)
        keys = sorted(ours.keys() | theirs.keys())
        report.compared_tensors += len(keys)
        for key in keys:
            if key not in ours or key not in theirs or not _same_bits(ours[key], theirs[key]):
                report.differing.append(f"{run_dir.name}: {name}: {key}")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_form = a.shape == b.shape and a.dtype == b.dtype
    return same_form and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def print_report(report: ChaosReport, console: Console) -> None:
    """A table of the kills, the costs, and the verdict."""
    kills, places = len(report.kills), report.places()
    seen = {phase for _, phase in places}
    phases = [*(phase for phase in PHASES if phase in seen), *sorted(seen.difference(PHASES))]
    table = Table(title=f"{kills} kills in {report.runs} runs of {report.steps} steps, seed {report.seed}")
    table.add_column("victim")
    for phase in [*phases, "all"]:
        table.add_column(phase, justify="right")
    for victim in VICTIMS:
        _add_row(table, victim, [places[victim, phase] for phase in phases])
    _add_row(table, "all", [sum(places[victim, phase] for victim in VICTIMS) for phase in phases])
    console.print(table)
    console.print(
        f"starts: {report.drafter_starts} of the drafters, {report.feeder_starts} of feeders by hand; "
        f"made again: {report.steps_again} steps, {report.rows_again} rows"
    )
    console.print(
        f"the runs took {report.disturbed_seconds:.0f} s instead of {report.undisturbed_seconds:.0f} s: "
        f"{report.seconds_lost / max(1, kills):.1f} s lost per kill; all in all {report.wall_seconds:.0f} s"
    )
    verdicts: Sequence[tuple[str, list[str]]] = (
        (f"differing of {report.compared_tensors} tensors", report.differing),
        ("orphaned processes", report.orphans),
        ("files left over", report.left),
        ("unexpected ends", report.unexpected),
    )
    for what, found in verdicts:
        console.print(f"{what}: {len(found)}", style="red" if found else "green")
        for one in found:
            console.print(f"  {one}", markup=False)


def _add_row(table: Table, name: str, counts: list[int]) -> None:
    table.add_row(name, *(str(count or "") for count in counts), str(sum(counts)))
