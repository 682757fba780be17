"""Prompts for decoding: the held-out share of a prepared dataset, or files; told to the target as it was in training.

A record of a file asks with `prompt` (a text, or a list of messages), `turns` (the first counts), a conversation (up to its last answer, which is
left out), or goes on from `text`. Conversations go through the target's chat template, with the generation prompt and the thinking
mode given. Everything wrong in a file is a `DataError` with file and line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_mp.config import SourceConfig
from dflash_mp.data.chat_template import ChatTemplate, TemplateProblem, Thinking
from dflash_mp.data.documents import Record, to_document
from dflash_mp.data.sources import read_source
from dflash_mp.data.store import PreparedDataset, Prompt
from dflash_mp.errors import DataError

HELD_OUT = "held_out"  # the name, among files of prompts, of the prepared dataset's held-out share


@dataclass(frozen=True)
class PromptSet:
    """Prompts that are measured together."""

    name: str
    prompts: list[Prompt]


def held_out_prompts(dataset: PreparedDataset, limit: int) -> PromptSet:
    """At most `limit` held-out prompts, spread evenly over all of them. Raises `DataError` when there are none."""
    prompts = list(dataset.held_out_prompts())
    if not prompts:
        raise DataError(
            f"{dataset.path} holds out no prompts", "prepare with data.held_out above 0, or name files in eval.prompts"
        )
    count = min(limit, len(prompts))
    return PromptSet(HELD_OUT, [prompts[i * len(prompts) // count] for i in range(count)])


def read_prompts(path: str, limit: int) -> PromptSet:
    """The first `limit` prompts of a .jsonl, .jsonl.gz or .parquet file. Raises `DataError`."""
    records = read_source(SourceConfig(path=path, limit=limit))
    return PromptSet(Path(path).name.split(".")[0], [_prompt(record) for record in records])


class PromptEncoder:
    """Turns prompts into tokens with a transformers tokenizer."""

    def __init__(self, tokenizer: Any, thinking: Thinking) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, thinking) if tokenizer.chat_template else None
        probe = tokenizer("a")["input_ids"]
        self._first = [probe[0]] if len(probe) > 1 and probe[0] == tokenizer.bos_token_id else []

    def encode(self, prompt: Prompt, device: torch.device) -> torch.Tensor:
        """int64 [n], n ≥ 1. Raises `DataError`."""
        if prompt.messages is None:
            ids = self._first + self._ids(prompt.text or "")
        else:
            ids = self._ids(self._render(prompt.messages, prompt))
        if not ids:
            raise DataError(f"{prompt.source}: the prompt is empty", "remove it")
        return torch.tensor(ids, device=device)

    def _render(self, messages: list[dict[str, Any]], prompt: Prompt) -> str:
        if self._template is None:
            raise DataError(
                f"{prompt.source} is a conversation, but the target's tokenizer has no chat template",
                "use the target's instruction-tuned version, or prompts with text",
            )
        try:
            return self._template.render(messages, prompt.tools, prompt=True)
        except TemplateProblem as problem:
            raise DataError(f"{prompt.source}: {problem}", "change or remove the prompt") from problem

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def ask(text: str, source: str = "the prompt") -> Prompt:
    """A prompt of one user message."""
    return Prompt([{"role": "user", "content": text}], None, source)


def _prompt(record: Record) -> Prompt:
    place, fields = record
    asked = fields.get("prompt")
    turns = fields.get("turns")
    if asked is None and isinstance(turns, Sequence) and turns:
        asked = turns[0]
    if isinstance(asked, str):
        return ask(asked, place)
    document = to_document(Record(place, {"messages": asked, "tools": fields.get("tools")} if asked else fields))
    if document.messages is None:
        return Prompt(None, document.text, place)
    messages = document.messages
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError(f"{place}: nothing is asked, there are only answers", "remove the record")
    return Prompt(messages, None, place, document.tools)
