"""`dflash-mp eval`: how many tokens of a drafter the target accepts, how much faster that is, and whether the output stays the same.

Each prompt is decoded by the target alone and with each drafter, in turn, after a short warm-up. Greedy outputs are compared token by
token; differences are counted and reported, not raised, since they are a finding about the target's arithmetic (in float32 there
must be none). Prompts that don't fit the target's context are left out and counted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from dflash_mp.config import RunConfig
from dflash_mp.data.chat_template import Thinking, chat_template_fingerprint
from dflash_mp.data.store import PreparedDataset
from dflash_mp.decode.drafters import TrainedDrafter, fit, read_drafter, untrained_drafter
from dflash_mp.decode.measure import Answer, DecodeOptions, Figures, answer, figures, first_difference
from dflash_mp.decode.prompts import HELD_OUT, PromptEncoder, PromptSet, held_out_prompts, read_prompts
from dflash_mp.decode.report import print_report
from dflash_mp.decode.sampling import Sampling
from dflash_mp.decode.speculative import ModelDrafter
from dflash_mp.decode.verifier import Verifier
from dflash_mp.drafter import checkpoint
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.errors import ConfigError, DataError, DflashError
from dflash_mp.target.load import Target, load_target

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class DrafterResult:
    """A drafter on a set of prompts. `differing`: (number of the prompt, first token that differs) where greedy output isn't the target's."""

    name: str
    figures: Figures
    speed_up: float
    differing: list[tuple[int, int]] | None  # None when sampling


@dataclass(frozen=True)
class SetResult:
    """A set of prompts, decoded by the target alone and with each drafter."""

    name: str
    left_out: int  # prompts too long for the target's context
    plain: Figures
    drafters: list[DrafterResult]


@dataclass(frozen=True)
class Evaluation:
    """All that `dflash-mp eval` finds out."""

    target: str
    dtype: str
    device: str
    thinking: str
    options: dict[str, Any]
    sets: list[SetResult]

    def write_json(self, path: Path) -> None:
        """Write everything to `path`. Raises `DflashError`."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise DflashError(f"cannot write {path}: {error.strerror or error}", "name another file") from None


def evaluate(config: RunConfig, drafter: Path | None, *, untrained: bool, console: Console) -> Evaluation:
    """Evaluate `drafter`, by default the run's newest checkpoint, as `config.eval` says; `untrained`: and an untrained one.

    Without any checkpoint the untrained drafter is evaluated alone. Prints the tables. Raises `DflashError` before anything is decoded if drafters, prompts and target don't go together.
    """
    alone = untrained and drafter is None and checkpoint.find(config.run_dir) is None
    loaded = [] if alone else [read_drafter(drafter or config.run_dir)]
    sets, manifest_thinking, template = _prompt_sets(config)
    target = load_target(eval_target(config))
    if template is not None and template != chat_template_fingerprint(target.tokenizer):
        raise DataError(
            f"{config.data.path} was prepared with another chat template than the target's",
            "run dflash-mp prepare --force, or name prompts in eval.prompts",
        )
    thinking = thinking_mode(config, manifest_thinking, loaded)
    if untrained:
        shape = loaded[0].shape if loaded else DrafterShape.from_config(config.drafter, target.info)
        loaded.insert(0, untrained_drafter(shape, config.seed))
    drafters = {item.name: fit(item, target) for item in loaded}
    layer_ids = loaded[0].shape.layer_ids
    options = decode_options(config, target)
    runs = _Runs(target, Verifier.of(target, layer_ids), drafters, options, PromptEncoder(target.tokenizer, thinking))
    result = Evaluation(
        target=target.info.name,
        dtype=target.info.dtype,
        device=str(target.device),
        thinking=thinking,
        options={**asdict(options.sampling), "max_new_tokens": options.max_new_tokens, "seed": options.seed},
        sets=[runs.measure(prompts, console) for prompts in sets],
    )
    print_report(result, console)
    return result


def eval_target(config: RunConfig) -> Any:
    """The target's configuration on the device that `eval.device` names."""
    if config.eval.device == "auto":
        return config.target
    return config.target.model_copy(update={"device": config.eval.device})


def thinking_mode(config: RunConfig, prepared: str | None, drafters: Sequence[TrainedDrafter]) -> Thinking:
    """The thinking mode of the prepared dataset whose prompts are used, else the drafter's, else the configured one.

    Raises `ConfigError` when a drafter was trained in another.
    """
    trained = [d.origin.thinking for d in drafters if d.origin is not None]
    mode = prepared or (trained[0] if trained else config.data.thinking)
    for drafter in drafters:
        if drafter.origin is not None and drafter.origin.thinking != mode:
            raise ConfigError(
                f"the drafter ({drafter.name}) was trained with thinking {drafter.origin.thinking}, the prompts are prepared with {mode}",
                f"evaluate on data prepared with data.thinking {drafter.origin.thinking}, or on files (eval.prompts)",
            )
    modes: dict[str, Thinking] = {"default": "default", "on": "on", "off": "off"}
    if mode not in modes:
        raise ConfigError(f"unknown thinking mode {mode!r}", "data.thinking: default, on or off")
    return modes[mode]


def decode_options(config: RunConfig, target: Target) -> DecodeOptions:
    """`config.eval` as the decoder wants it; texts end at the target's end-of-text tokens."""
    return DecodeOptions(
        max_new_tokens=config.eval.max_new_tokens,
        stop_tokens=frozenset(target.info.eos_token_ids),
        sampling=Sampling(config.eval.temperature, config.eval.top_p, config.eval.top_k),
        seed=config.seed,
    )


def _prompt_sets(config: RunConfig) -> tuple[list[PromptSet], str | None, str | None]:
    """The sets, and thinking mode and template hash of the prepared dataset if it is one of them."""
    sets: list[PromptSet] = []
    thinking, template = None, None
    for name in config.eval.prompts or [HELD_OUT]:
        if name == HELD_OUT:
            dataset = PreparedDataset.open(config.data.path)
            thinking, template = dataset.manifest.thinking, dataset.manifest.chat_template
            sets.append(held_out_prompts(dataset, config.eval.limit))
        else:
            sets.append(read_prompts(name, config.eval.limit))
    return sets, thinking, template


@dataclass(frozen=True)
class _Runs:
    target: Target
    verifier: Verifier
    drafters: dict[str, ModelDrafter]
    options: DecodeOptions
    encoder: PromptEncoder

    def measure(self, prompts: PromptSet, console: Console) -> SetResult:
        encoded = [self.encoder.encode(prompt, self.target.device) for prompt in prompts.prompts]
        room = self.target.info.max_positions - self.options.max_new_tokens
        fitting = [tokens for tokens in encoded if tokens.shape[0] <= room]
        if not fitting:
            raise DataError(
                f"no prompt of {prompts.name} leaves room for {self.options.max_new_tokens} new tokens in the target's context "
                f"of {self.target.info.max_positions}",
                "lower eval.max_new_tokens, or use shorter prompts",
            )
        self._warm_up(fitting[0])
        plain: list[Answer] = []
        drafted: dict[str, list[Answer]] = {name: [] for name in self.drafters}
        shown = track(fitting, prompts.name, console=console, transient=True, disable=not console.is_terminal)
        for number, tokens in enumerate(shown):
            plain.append(answer(self.verifier, tokens, None, self.options, number))
            for name, drafter in self.drafters.items():
                drafted[name].append(answer(self.verifier, tokens, drafter, self.options, number))
        baseline = figures(plain, 1)
        results = [self._result(name, answers, plain, baseline) for name, answers in drafted.items()]
        return SetResult(prompts.name, len(encoded) - len(fitting), baseline, results)

    def _result(self, name: str, answers: list[Answer], plain: list[Answer], baseline: Figures) -> DrafterResult:
        found = figures(answers, self.drafters[name].block_size)
        differing = None
        if self.options.sampling.greedy:
            places = [first_difference(a.tokens, b.tokens) for a, b in zip(answers, plain, strict=True)]
            differing = [(number, place) for number, place in enumerate(places) if place is not None]
        speed = baseline.tokens_per_second
        return DrafterResult(name, found, found.tokens_per_second / speed if speed else 0.0, differing)

    def _warm_up(self, tokens: torch.Tensor) -> None:
        short = replace(self.options, max_new_tokens=_WARM_UP_TOKENS)
        for drafter in (None, *self.drafters.values()):
            answer(self.verifier, tokens, drafter, short)
