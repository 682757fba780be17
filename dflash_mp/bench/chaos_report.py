"""What `dflash-mp bench chaos` prints: kills by victim and phase, what they cost, and whatever differs or was left."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dflash_mp.bench.chaos import VICTIMS, ChaosReport


def print_report(report: ChaosReport, console: Console) -> None:
    """A table of the kills, the costs, and the verdict."""
    places = report.places()
    phases = list(dict.fromkeys(kill.phase for kill in sorted(report.kills, key=lambda kill: kill.phase)))
    table = Table(title=f"{len(report.kills)} kills in {report.runs} runs of {report.steps} steps, seed {report.seed}")
    table.add_column("victim")
    for phase in [*phases, "all"]:
        table.add_column(phase, justify="right")
    for victim in VICTIMS:
        counts = [places[victim, phase] for phase in phases]
        table.add_row(victim, *(str(count or "") for count in counts), str(sum(counts)))
    console.print(table)
    console.print(
        f"starts: {report.drafter_starts} of the drafters, {report.feeder_starts} of feeders by hand; "
        f"{report.steps_again} steps trained again; {report.disturbed_seconds:.0f} s instead of "
        f"{report.runs} × {report.undisturbed_seconds:.0f} s ({report.seconds_lost:.0f} s lost)"
    )
    verdicts = (
        (f"differing of {report.compared_tensors} tensors", report.differing),
        ("orphaned processes", report.orphans),
        ("files left over", report.left),
        ("unexpected ends", report.unexpected),
    )
    for what, found in verdicts:
        console.print(f"{what}: {len(found)}", style="red" if found else "green")
        for one in found:
            console.print(f"  {one}", markup=False)
