"""`dflash-mp bench fuzz`, `hostile` and `memory`: that nothing a peer sends or fails to do harms anybody else."""

from __future__ import annotations

import sys

import click

from dflash_mp.options import Command, FiniteRange


@click.command(
    "fuzz",
    cls=Command,
    examples=("dflash-mp bench fuzz --messages 1000000 --seed 1", "dflash-mp bench fuzz --messages 20000"),
)
@click.option("--messages", default=1_000_000, show_default=True, type=click.IntRange(100), help="Messages to send.")
@click.option("--seed", default=0, show_default=True, help="Of the messages.")
def fuzz(messages: int, seed: int) -> None:
    """Send feeders and drafters messages that are nearly right, beside honest peers. Fails when that crashes, grows or disturbs anything."""
    from dflash_mp.bench.fuzz import fuzz as run

    for line in run(messages, seed, lambda text: click.echo(text, err=True)).lines():
        click.echo(line)


@click.command(
    "hostile",
    cls=Command,
    examples=("dflash-mp bench hostile", "dflash-mp bench hostile --attack 'a message without end' --transport ipc"),
)
@click.option(
    "--rounds", default=7, show_default=True, type=click.IntRange(1), help="Pairs of windows for each attack."
)
@click.option("--seconds", default=0.5, show_default=True, type=FiniteRange(0, min_open=True), help="Of a window.")
@click.option("--transport", default="tcp", show_default=True, type=click.Choice(["tcp", "ipc"]))
@click.option("--attack", "attacks", multiple=True, help="One of them; may be repeated. Default: all.")
def hostile(rounds: int, seconds: float, transport: str, attacks: tuple[str, ...]) -> None:
    """The speed of a legitimate run beside hostile peers, over its speed alone."""
    from dflash_mp.bench.hostile import GOAL
    from dflash_mp.bench.hostile import hostile as measure

    effects = measure(rounds, seconds, transport, attacks, click.echo)
    slowed = [effect.attack for effect in effects if effect.share < GOAL]
    click.echo(f"below {GOAL:.0%}: {', '.join(slowed) or 'none'}")


@click.command(
    "memory",
    cls=Command,
    examples=("dflash-mp bench memory --rows 10000", "dflash-mp bench memory --transport ipc --shared-memory"),
)
@click.option("--rows", default=10_000, show_default=True, type=click.IntRange(100), help="Rows to take.")
@click.option("--transport", default="tcp", show_default=True, type=click.Choice(["tcp", "ipc"]))
@click.option("--shared-memory", is_flag=True, help="Rows by the shared-memory lane instead of in-band.")
def memory(rows: int, transport: str, shared_memory: bool) -> None:
    """Memory of feeder and drafter over many rows, beside a drafter that stopped reading. Exit code 1 if it grows."""
    from dflash_mp.bench.memory import memory as measure

    report = measure(rows, transport, shared_memory)
    for line in report.lines():
        click.echo(line)
    sys.exit(0 if report.flat else 1)
