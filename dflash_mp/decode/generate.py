"""`dflash-mp generate`: one prompt, its answer as it is decoded, the drafter's tokens told apart by colour."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dflash_mp.config import RunConfig
from dflash_mp.data.store import Prompt
from dflash_mp.decode.drafters import fit, read_drafter
from dflash_mp.decode.evaluate import decode_options, eval_target, thinking_mode
from dflash_mp.decode.prompts import PromptEncoder, ask
from dflash_mp.decode.speculative import Block, decode
from dflash_mp.decode.verifier import Verifier
from dflash_mp.errors import DataError
from dflash_mp.target.load import load_target

_ACCEPTED, _OWN = "green", "yellow"


def generate(
    config: RunConfig, drafter_path: Path | None, text: str, *, raw: bool, colour: bool, write: Callable[[str], None]
) -> None:
    """Answer `text` (`raw`: continue it, without the chat template) with the drafter; `write` gets pieces of text as they come."""
    drafter = read_drafter(drafter_path or config.run_dir)
    target = load_target(eval_target(config))
    fitted = fit(drafter, target)
    encoder = PromptEncoder(target.tokenizer, thinking_mode(config, None, [drafter]))
    prompt = encoder.encode(Prompt(None, text, "the prompt") if raw else ask(text), target.device)
    options = decode_options(config, target)
    if prompt.shape[0] + options.max_new_tokens > target.info.max_positions:
        raise DataError(
            f"{prompt.shape[0]} tokens of prompt and {options.max_new_tokens} new ones exceed the target's context of {target.info.max_positions}",
            "shorten the prompt, or lower eval.max_new_tokens",
        )
    blocks = decode(
        Verifier.of(target, drafter.shape.layer_ids),
        prompt,
        fitted,
        max_new_tokens=options.max_new_tokens,
        stop_tokens=options.stop_tokens,
        sampling=options.sampling,
        generator=options.generator(0, target.device),
    )
    stream = TextStream(target.tokenizer)
    first = next(blocks)
    started = time.perf_counter()
    _show(first, stream, colour, write)
    lengths = []
    for block in blocks:
        _show(block, stream, colour, write)
        lengths.append(len(block.tokens))
    seconds = time.perf_counter() - started
    write(stream.finish() + "\n\n")
    if lengths:
        tau = sum(lengths) / len(lengths)
        rate = sum(lengths) / seconds
        write(f"τ {tau:.2f} over {len(lengths)} blocks · {1 + sum(lengths)} tokens · {rate:.1f} tokens/s\n")


class TextStream:
    """Tokens to text, piece by piece: a character is shown once all its bytes are there, whatever tokens they are spread over."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # tokens whose text was returned
        self._context = 0  # where decoding starts: tokens just before decide about blanks

    def add(self, token: int) -> str:
        """The text that is certain with `token`; empty while a character is incomplete."""
        self._ids.append(token)
        text = self._pending()
        if text.endswith("\ufffd"):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def finish(self) -> str:
        """What is left, complete or not."""
        text = self._pending()
        self._context = self._shown = len(self._ids)
        return text

    def _pending(self) -> str:
        return self._decode(self._ids[self._context :])[len(self._decode(self._ids[self._context : self._shown])) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _show(block: Block, stream: TextStream, colour: bool, write: Callable[[str], None]) -> None:
    for place, token in enumerate(block.tokens):
        text = stream.add(token)
        if text:
            write(click.style(text, fg=_ACCEPTED if place < block.accepted else _OWN) if colour else text)
