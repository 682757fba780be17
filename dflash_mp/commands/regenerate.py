"""`dflash-mp regenerate`: the options of `dflash_mp.regenerate`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from dflash_mp.options import Command, FiniteRange, log_options, start_logs

log = logging.getLogger(__name__)

_EXAMPLES = (
    "dflash-mp regenerate --target demo/SmolLM2-135M-Instruct --prompts demo/codeio.jsonl --out answers.jsonl --batch 512",
    "dflash-mp regenerate --server http://127.0.0.1:8000/v1 --model Qwen/Qwen3-8B --prompts prompts.jsonl --out answers.jsonl",
)


_HERE = ("batch", "max_prompt_tokens", "device", "dtype", "attention", "revision", "trust_remote_code", "cuda_graphs")
_SAMPLING = {"top_p": 1.0, "top_k": 0, "seed": 0}  # and the values that change nothing
_THERE = ("concurrency", "attempts", "request_seconds", "api_key_env")


@click.command(cls=Command, examples=_EXAMPLES)
@log_options
@click.option("--target", metavar="PATH", help="Hugging Face directory, hub id or .gguf file: generate here.")
@click.option(
    "--server", metavar="URL", help="OpenAI-compatible server, such as http://127.0.0.1:8000/v1: generate there."
)
@click.option("--model", metavar="NAME", help="The target's name at the server.")
@click.option(
    "--prompts",
    multiple=True,
    required=True,
    metavar="SOURCE",
    help=".jsonl, .jsonl.gz, .parquet, a directory, hf:NAME.",
)
@click.option("--subset", help="Of an hf: data set.")
@click.option("--split", default="train", show_default=True, help="Of an hf: data set.")
@click.option("--limit", type=click.IntRange(1), help="The first N records of each source only.")
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help=".jsonl file of answers.")
@click.option("--max-new-tokens", default=1024, show_default=True, type=click.IntRange(1), help="Longest answer.")
@click.option("--max-prompt-tokens", type=click.IntRange(1), help="Longer prompts get no answer; default: what fits.")
@click.option("--temperature", default=0.0, show_default=True, type=FiniteRange(0), help="0: greedy.")
@click.option("--top-p", default=1.0, show_default=True, type=FiniteRange(0, 1, min_open=True), help="1: off.")
@click.option("--top-k", default=0, show_default=True, type=click.IntRange(0), help="0: off.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, (1 << 63) - 1), help="Of the sampling.")
@click.option(
    "--thinking",
    type=click.Choice(["default", "on", "off"]),
    default="default",
    show_default=True,
    help="As data.thinking.",
)
@click.option("--batch", default=128, show_default=True, type=click.IntRange(1), help="Conversations at a time, here.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True
)
@click.option("--attention", type=click.Choice(["auto", "sdpa", "eager"]), default="auto", show_default=True)
@click.option("--revision", help="Of a target from the hub.")
@click.option("--trust-remote-code", is_flag=True, help="Run the target's own Python code.")
@click.option("--cuda-graphs/--no-cuda-graphs", default=True, show_default=True, help="Record each forward pass once.")
@click.option("--concurrency", default=64, show_default=True, type=click.IntRange(1), help="Requests at a time, there.")
@click.option("--attempts", default=6, show_default=True, type=click.IntRange(1), help="For each request.")
@click.option(
    "--request-seconds",
    default=600.0,
    show_default=True,
    type=FiniteRange(0, min_open=True),
    help="For an answer.",
)
@click.option(
    "--api-key-env", default="OPENAI_API_KEY", show_default=True, metavar="NAME", help="Variable that holds the key."
)
@click.option("--force", is_flag=True, help="Start over, whatever is there.")
def regenerate(**options: Any) -> None:
    """Let the target answer the prompts, for `prepare`. The same command goes on where it was ended."""
    here = options["target"] is not None
    if here == (options["server"] is not None) or here == (options["model"] is not None):
        raise click.UsageError("give either --target, or --server and --model")
    _refuse_idle_options(*(("--target", _THERE) if here else ("--server", _HERE)))
    if options["temperature"] == 0:
        given = tuple(name for name, off in _SAMPLING.items() if options[name] != off)
        _refuse_idle_options("--temperature 0, which is greedy; to sample, give one above 0", given)
    from dflash_mp.config import SourceConfig, TargetConfig
    from dflash_mp.decode.sampling import Sampling
    from dflash_mp.regenerate.choice import AnswerOptions
    from dflash_mp.regenerate.command import Request
    from dflash_mp.regenerate.command import regenerate as answer
    from dflash_mp.regenerate.server import ServerOptions

    sources = [
        SourceConfig(path=path, subset=options["subset"], split=options["split"], limit=options["limit"])
        for path in options["prompts"]
    ]
    sampling = Sampling(options["temperature"], options["top_p"], options["top_k"])
    target = server = None
    if here:
        chosen = {key: options[key] for key in ("device", "dtype", "attention", "revision", "trust_remote_code")}
        target = TargetConfig.model_validate({"path": options["target"], "taps": 1, **chosen})
    else:
        server = ServerOptions(
            options["server"],
            options["model"],
            options["concurrency"],
            options["attempts"],
            options["request_seconds"],
            options["api_key_env"],
        )
    request = Request(
        sources=sources,
        out=options["out"],
        answers=AnswerOptions(options["max_new_tokens"], sampling, options["seed"], options["thinking"]),
        target=target,
        server=server,
        batch=options["batch"],
        max_prompt_tokens=options["max_prompt_tokens"],
        cuda_graphs=options["cuda_graphs"],
        force=options["force"],
    )
    start_logs("regenerate")
    outcome = answer(request, log.info)
    if outcome.reasons:
        click.echo(outcome.line())


def _refuse_idle_options(way: str, idle: tuple[str, ...]) -> None:
    """Raise `click.UsageError` if one of the `idle` options was given."""
    context = click.get_current_context()
    given = [name for name in idle if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if given:
        words = ", ".join(parameter.opts[0] for parameter in context.command.params if parameter.name in given)
        raise click.UsageError(f"{words}: without effect with {way}")
