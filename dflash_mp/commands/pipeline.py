"""`dflash-mp bench end-to-end` and `rows`: feeders and drafters together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from dflash_mp.options import Command, FiniteRange, NewFile


@click.command(
    "end-to-end",
    cls=Command,
    examples=(
        "dflash-mp bench end-to-end --case 8b --feeders cuda:0 --drafters cuda:1,cuda:2,cuda:3 --kill-feeder-at 30 --out whole.json",
        "dflash-mp bench end-to-end --case 8b --feeders cuda:0 --drafters cuda:0",
        "dflash-mp bench end-to-end --case tiny --feeders cpu --drafters cpu,cpu --seconds 5 --alone-seconds 2",
    ),
)
@click.option("--case", default="tiny", show_default=True, help="Target and drafter. An unknown one lists all.")
@click.option("--feeders", default="cpu", show_default=True, help="Device of each feeder: cpu or cuda:N, by commas.")
@click.option("--drafters", default="cpu", show_default=True, help="Device of each drafter; the same may appear again.")
@click.option("--seconds", default=60.0, show_default=True, type=FiniteRange(1), help="Of the whole run.")
@click.option("--alone-seconds", default=15.0, show_default=True, type=FiniteRange(1), help="Of each side alone.")
@click.option(
    "--kill-feeder-at", type=FiniteRange(0), metavar="SECONDS", help="Kill feeder 0 then, and start it again."
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one option of the run.")
@click.option(
    "--start-seconds", default=240.0, show_default=True, type=FiniteRange(1), help="Longest wait for a start."
)
@click.option("--out", type=NewFile(), help="Write the figures as JSON, too, after each phase.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the logs of all processes there; default: beside --out, in OUT.logs.",
)
def end_to_end(
    case: str,
    feeders: str,
    drafters: str,
    seconds: float,
    alone_seconds: float,
    kill_feeder_at: float | None,
    overrides: tuple[str, ...],
    start_seconds: float,
    out: Path | None,
    keep: Path | None,
) -> None:
    """A whole run on random weights, against what its feeders and its drafters manage alone."""
    from dflash_mp.bench.end_to_end import bench_end_to_end
    from dflash_mp.bench.end_to_end_place import Processes

    def save(tree: dict[str, Any]) -> None:
        if out is not None:
            out.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")

    if keep is None and out is not None:
        keep = out.with_name(f"{out.name}.logs")
    result = bench_end_to_end(
        case,
        Processes(tuple(feeders.split(",")), tuple(drafters.split(","))),
        seconds=seconds,
        alone_seconds=alone_seconds,
        kill_feeder_at=kill_feeder_at,
        overrides=overrides,
        say=lambda text: click.echo(text, err=True),
        save=save,
        keep=keep,
        start_seconds=start_seconds,
    )
    for line in result.lines():
        click.echo(line)


@click.command(
    "rows",
    cls=Command,
    examples=(
        "dflash-mp bench rows --row-mib 16 --rows 256",
        "dflash-mp bench rows --row-mib 80 --feeder cuda:0 --drafter cuda:1",
        "dflash-mp bench rows --row-mib 1 --rows 8 --feeder cpu --drafter cpu",
    ),
)
@click.option("--row-mib", default=64.0, show_default=True, type=FiniteRange(0.1), help="Size of a row in MiB.")
@click.option("--rows", default=64, show_default=True, type=click.IntRange(1), help="Rows of one measurement.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1), help="Measurements of each way.")
@click.option("--feeder", default="cuda:0", show_default=True, help="The target's device: cuda:N, or cpu to try it.")
@click.option("--drafter", default="cuda:0", show_default=True, help="The drafter's device.")
def rows(row_mib: float, rows: int, repeats: int, feeder: str, drafter: str) -> None:
    """Rows from device to device through shared memory, against plain copies of pinned memory."""
    from dflash_mp.bench.rows import bench_rows as measure

    for line in measure(row_mib, rows, repeats, feeder, drafter).lines():
        click.echo(line)
