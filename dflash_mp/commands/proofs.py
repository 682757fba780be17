"""`dflash-mp bench fuzz`, `hostile` and `memory`: that nothing a peer sends or fails to do harms anybody else."""

from __future__ import annotations

import click

from dflash_mp.options import Command


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
