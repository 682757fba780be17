"""`dflash-mp bench`: the parts against what they could be."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Literal

import click

from dflash_mp.options import FiniteRange, Group, log_options, start_logs
from dflash_mp.process import unwinding

log = logging.getLogger(__name__)


@click.group(cls=Group)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure the parts against what they could be."""
    context.with_resource(unwinding())


@bench.command(
    "chaos",
    examples=(
        "dflash-mp bench chaos --kills 200 --seed 0 --out chaos",
        "dflash-mp bench chaos --kills 20 --seconds 360 --parallel 2 --no-compile --out chaos",
    ),
)
@log_options
@click.option("--kills", default=200, show_default=True, type=click.IntRange(1), help="SIGKILLs to deal out.")
@click.option("--seed", default=0, show_default=True, help="Of the plan of kills, the data and the weights.")
@click.option(
    "--out", default="chaos", show_default=True, type=click.Path(path_type=Path, file_okay=False), help="New directory."
)
@click.option("--seconds", type=FiniteRange(min=0, min_open=True), help="Kill for so long at most.")
@click.option(
    "--parallel",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Fleets of some five processes each, disturbed at once; one for every four cores.",
)
@click.option(
    "--compile/--no-compile", "compiled", default=None, help="Compile in every third run; default: if there is g++."
)
def bench_chaos(kills: int, seed: int, out: Path, seconds: float | None, parallel: int, compiled: bool | None) -> None:
    """Kill a real run's processes at random, and compare its result with an undisturbed run's. Exit code 1 if anything differs."""
    from rich.console import Console

    from dflash_mp.bench.chaos import chaos as disturb
    from dflash_mp.bench.chaos_report import print_report

    start_logs("chaos")
    console = Console(highlight=False, soft_wrap=True)
    report = disturb(
        kills,
        seed,
        out,
        seconds,
        log.info,
        parallel=parallel,
        compiled=compiled,
    )
    print_report(report, console)
    sys.exit(0 if report.ok else 1)


@bench.command(
    "capture",
    examples=(
        "dflash-mp bench capture --case 8b",
        "dflash-mp bench capture --case 8b --tensor-parallel 2",
        "dflash-mp bench capture --target Qwen/Qwen3-0.6B --tokens 2048",
        "dflash-mp bench capture --target demo/SmolLM2-135M-Instruct --device cpu --threads 1",
    ),
)
@click.option("--target", help="Hugging Face directory, hub id or .gguf file.")
@click.option("--case", help="Instead: a shape with random weights: 8b (of Qwen3-8B), 0.6b or tiny.")
@click.option("--tokens", type=click.IntRange(2), help="Tokens of a row; default: 4096 on CUDA, else 512.")
@click.option("--documents", default=12, show_default=True, type=click.IntRange(1), help="Documents of a row.")
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(1), help="Measured pairs; medians are compared."
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N, the first of several.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
)
@click.option(
    "--compile/--no-compile", "compiled", default=None, help="Compile the target's layers; default: on CUDA only."
)
@click.option(
    "--tensor-parallel",
    "ways",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Share the target among so many processes, against one.",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads.")
def bench_capture(
    target: str | None,
    case: str | None,
    tokens: int | None,
    documents: int,
    rounds: int,
    device: str,
    dtype: str,
    compiled: bool | None,
    ways: int,
    threads: int | None,
) -> None:
    """A feeder's truncated forward against the model's own forward with all hidden states."""
    import torch

    from dflash_mp.bench.capture import bench_capture as measure
    from dflash_mp.bench.capture import case_target, default_tokens
    from dflash_mp.bench.capture_split import SplitWork, bench_split
    from dflash_mp.config import TargetConfig
    from dflash_mp.target.load import load_target
    from dflash_mp.target.model import target_device

    if (target is None) == (case is None):
        raise click.UsageError("give either --target or --case")
    if threads is not None:
        torch.set_num_threads(threads)
    if compiled and target_device(device).type == "cpu":
        raise click.UsageError("--compile: on a CPU the target has its own attention, which is not compiled")
    start_logs("capture")
    if ways > 1:
        first = target_device(device)
        lowest = first.index or 0
        devices = [target_device(f"cuda:{lowest + i}") if first.type == "cuda" else first for i in range(ways)]
        work = SplitWork(target, case, dtype, tokens or default_tokens(first), documents, compiled, threads)
        for line in bench_split(work, devices, rounds).lines():
            click.echo(line)
        return
    if case is not None:
        loaded = case_target(case, device, dtype)
    else:
        loaded = load_target(TargetConfig.model_validate({"path": target, "device": device, "dtype": dtype}))
    for line in measure(loaded, tokens, rounds, documents=documents, compiled=compiled).lines():
        click.echo(line)


@bench.command(
    "prepare",
    examples=(
        "dflash-mp bench prepare --target demo/SmolLM2-135M-Instruct --megabytes 2",
        "dflash-mp bench prepare -c run.yaml",
    ),
)
@click.option("--target", help="Hugging Face directory, hub id or .gguf file, for its tokenizer.")
@click.option(
    "-c", "--config", "config_file", type=click.Path(path_type=Path), help="Use this run's target and sources."
)
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(1), help="Measured pairs; the median ratio counts."
)
@click.option(
    "--megabytes",
    default=8.0,
    show_default=True,
    type=FiniteRange(0, min_open=True),
    help="Text of the standard library to use without --config.",
)
def bench_prepare(target: str | None, config_file: Path | None, rounds: int, megabytes: float) -> None:
    """`prepare` against the tokenizer alone, on the same text."""
    from dflash_mp.bench.prepare import bench_prepare as measure
    from dflash_mp.config import TargetConfig
    from dflash_mp.config_file import load_config
    from dflash_mp.target.tokenizer import load_tokenizer

    if (target is None) == (config_file is None):
        raise click.UsageError("give either --target or --config")
    config = load_config(config_file).config if config_file else None
    tokenizer = load_tokenizer(config.target if config else TargetConfig.model_validate({"path": target}))
    for line in measure(tokenizer, config.data if config else None, rounds, megabytes).lines():
        click.echo(line)


@bench.command(
    "regenerate",
    examples=(
        "dflash-mp bench regenerate --target demo/SmolLM2-135M-Instruct --batch 1024",
        "dflash-mp bench regenerate --case 8b --batch 256 --prompt-tokens 500 --new-tokens 500 --compare",
    ),
)
@click.option("--target", help="Hugging Face directory, hub id or .gguf file.")
@click.option("--case", help="Instead: a shape with random weights: 8b (of Qwen3-8B), 0.6b or tiny.")
@click.option("--batch", default=1024, show_default=True, type=click.IntRange(1), help="Texts side by side.")
@click.option(
    "--prompt-tokens", default=160, show_default=True, type=click.IntRange(1), help="Of a prompt, on average."
)
@click.option("--new-tokens", default=256, show_default=True, type=click.IntRange(1), help="Of each answer.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="Measured; the median counts.")
@click.option("--compare", is_flag=True, help="Measure the model's own attention and norms, too.")
@click.option("--temperature", default=0.0, show_default=True, type=FiniteRange(0), help="0: greedy.")
@click.option("--top-k", default=0, show_default=True, type=click.IntRange(0), help="0: off.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
)
def bench_regenerate(
    target: str | None,
    case: str | None,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    compare: bool,
    temperature: float,
    top_k: int,
    device: str,
    dtype: str,
) -> None:
    """The target writing many texts side by side, against the bytes that it must read."""
    from dflash_mp.bench.capture import case_target
    from dflash_mp.bench.regenerate import Work
    from dflash_mp.bench.regenerate import bench_regenerate as measure
    from dflash_mp.config import TargetConfig
    from dflash_mp.decode.sampling import Sampling
    from dflash_mp.target.load import load_target

    if (target is None) == (case is None):
        raise click.UsageError("give either --target or --case")
    if top_k and temperature == 0:
        raise click.UsageError(
            "--top-k: without effect with --temperature 0, which is greedy; to sample, give one above 0"
        )
    if case is not None:
        loaded = case_target(case, device, dtype)
    else:
        loaded = load_target(TargetConfig.model_validate({"path": target, "device": device, "dtype": dtype, "taps": 1}))
    work = Work(batch, prompt_tokens, new_tokens, Sampling(temperature, top_k=top_k))
    for line in measure(loaded, work, rounds, compare):
        click.echo(line)


@bench.command(
    "step",
    examples=(
        "dflash-mp bench step --case 8b-a --case 8b-b",
        "dflash-mp bench step --case 8b-a --precision fp8",
        "dflash-mp bench step --device cpu --repeats 3",
    ),
)
@click.option("--case", "cases", multiple=True, help="Drafter and rows; may be repeated. An unknown one lists all.")
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]))
@click.option(
    "--repeats",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Turns, each of some passes and then products in a row; medians count.",
)
@click.option(
    "--precision",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "fp32", "bf16", "fp8"]),
    help="Of the drafter; auto: fp32 on a CPU, bf16 on CUDA. fp8 is measured by turns with bf16.",
)
def bench_step(
    cases: tuple[str, ...], device: str, repeats: int, precision: Literal["auto", "fp32", "bf16", "fp8"]
) -> None:
    """The trainer's forward and backward pass, against the device's matrix rate."""
    from dflash_mp.bench.step import bench_cases as measure

    for result in measure(cases or ("smollm2",), device, repeats, precision):
        click.echo(result.line())


@bench.command(
    "stream",
    examples=(
        "dflash-mp bench stream",
        "dflash-mp bench stream --row-mib 1 --rows 8 --repeats 3",
    ),
)
@click.option("--row-mib", default=16.0, show_default=True, type=FiniteRange(0.1), help="Size of a row in MiB.")
@click.option("--rows", default=24, show_default=True, type=click.IntRange(1), help="Rows of one measurement.")
@click.option(
    "--repeats",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="Measurements of each way; medians are compared.",
)
def bench_stream(row_mib: float, rows: int, repeats: int) -> None:
    """Rows from a feeder to a drafter, against raw sockets and plain copies."""
    from dflash_mp.bench.stream import bench_stream as measure

    for line in measure(row_mib, rows, repeats).lines():
        click.echo(line)
