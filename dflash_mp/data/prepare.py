"""Make a prepared dataset: read, render, tokenise, split, pack and store, in one pass.

The same sources, settings and tokenizer give the same files, bit for bit, whatever the number of threads and wherever the sources
lie. Memory holds one batch of documents, the open rows, and at most one shard of rows per split, however many documents there are.
A failure leaves nothing behind. A document belongs to the held-out share by a hash of its content, keyed with the seed: its copies
go where it goes, and adding a source moves none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dflash_mp.config import DataConfig, SourceConfig
from dflash_mp.data.chat_template import chat_template_fingerprint
from dflash_mp.data.documents import Document, to_document
from dflash_mp.data.encoding import DocumentEncoder, EncodedDocument, tokenizer_fingerprint
from dflash_mp.data.manifest import FILE, FORMAT, Manifest, SourceCounts
from dflash_mp.data.origin import check_origin
from dflash_mp.data.packing import RowPacker
from dflash_mp.data.row import SPLITS, Split
from dflash_mp.data.sources import HUB_PREFIX, describe_file, read_source, source_files
from dflash_mp.data.store import PreparedDataset, Prompt
from dflash_mp.data.writer import PromptWriter, SplitWriter, replacing
from dflash_mp.errors import ConfigError, DataError

_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024
_PROMPT_CHARACTERS = 2000
_REFUSED = "answer refused when generated"
_INSIDE_THOUGHT = "answer cut inside its thought when generated"
_UNFINISHED = "answer cut when generated"


def prepare(
    data: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    force: bool = False,
    say: Callable[[str], None] = lambda message: None,
    advance: Callable[[int, int], None] = lambda documents, tokens: None,
) -> Manifest:
    """Write the prepared dataset `data.path` from `data.sources` and return its manifest.

    `tokenizer`: the target's (transformers, fast). `say` gets notices, `advance` the documents and tokens of each batch. If the same
    dataset is there already it is left as it is. Raises `DataError` for bad data, and when another dataset is there, unless `force`.
    """
    if not data.sources:
        raise ConfigError(
            "data.sources is empty: there is nothing to prepare",
            "list files there, for example data.sources: [{path: chats.jsonl}]",
        )
    settings = _settings(data, tokenizer, seed)
    for source in data.sources:
        for file in source_files(source):
            check_origin(file, settings)
    if (data.path / FILE).exists() and not force:
        existing = PreparedDataset.open(data.path).manifest
        _check_same(data.path, existing.settings, settings)
        say(
            f"{data.path} is already there, made from the same sources and settings ({existing.fingerprint}); nothing to do"
        )
        return existing
    with replacing(data.path) as directory:
        job = _Preparation(data, tokenizer, seed, directory)
        for source in data.sources:
            job.take(source, advance)
        manifest = job.finish(settings)
    if data.held_out and not manifest.held_out.rows:
        say(f"no document fell into the held-out share of {data.held_out:g}: raise data.held_out, or add documents")
    return manifest


class _Preparation:
    """One pass over the sources, into `directory`."""

    def __init__(self, data: DataConfig, tokenizer: Any, seed: int, directory: Path) -> None:
        self._data = data
        self._seed = seed
        self._directory = directory
        self._longest = data.max_document_tokens or data.row_tokens
        self._shard_rows = max(1, data.shard_tokens // data.row_tokens)
        self._encoder = DocumentEncoder(tokenizer, data.thinking)
        self._opens_thought = self._encoder.opens_thought()
        self._packers = {split: RowPacker(data.row_tokens, data.min_supervised_tokens) for split in SPLITS}
        self._writers = {split: SplitWriter(directory, split, data.row_tokens, self._shard_rows) for split in SPLITS}
        self._prompts = PromptWriter(directory)
        self._sources: list[SourceCounts] = []
        self._directory_of_source = ""

    def take(self, source: SourceConfig, advance: Callable[[int, int], None]) -> None:
        """Place every document of `source`."""
        self._directory_of_source = "" if source.path.startswith(HUB_PREFIX) else f"{Path(source.path).parent}/"
        counts = SourceCounts(str(Path(source.path)).removeprefix(self._directory_of_source))
        self._sources.append(counts)
        documents = self._usable((to_document(record, source.format) for record in read_source(source)), counts)
        for batch, encoded in self._encoder.encode_batches(_batches(documents)):
            for document, tokens in zip(batch, encoded, strict=True):
                self._place(document, tokens, counts)
            advance(len(batch), sum(len(tokens.input_ids) for tokens in encoded))

    def _usable(self, documents: Iterator[Document], counts: SourceCounts) -> Iterator[Document]:
        """Those that are worth encoding; the others are counted."""
        for document in documents:
            if document.refused:
                reason = _REFUSED
            elif document.cut_inside_thought(self._opens_thought):
                reason = _INSIDE_THOUGHT
            elif document.unfinished and self._data.unfinished == "drop":
                reason = _UNFINISHED
            else:
                yield document
                continue
            counts.documents += 1
            counts.dropped[reason] = counts.dropped.get(reason, 0) + 1

    def finish(self, settings: dict[str, Any]) -> Manifest:
        """Write what is still open, and the manifest. Raises `DataError` when nothing is left to train on."""
        files = self._prompts.finish()
        for split, writer in self._writers.items():
            for row in self._packers[split].finish():
                writer.add(row)
            writer.finish()
            files.update(writer.files)
        manifest = Manifest(
            row_tokens=self._data.row_tokens,
            seed=self._seed,
            thinking=self._data.thinking,
            tokenizer=settings["tokenizer"],
            chat_template=settings["chat_template"],
            shard_rows=self._shard_rows,
            settings=settings,
            train=self._writers["train"].counts,
            held_out=self._writers["held_out"].counts,
            sources=self._sources,
            files=dict(sorted(files.items())),
        )
        if not manifest.train.rows:
            reasons = ", ".join(f"{count} with {reason}" for reason, count in manifest.dropped().items())
            raise DataError(
                f"no document is left to train on (dropped: {reasons or 'none'}; held out: {manifest.held_out.documents})",
                "check data.sources, and lower data.min_supervised_tokens or data.held_out",
            )
        manifest.write(self._directory)
        return manifest

    def _place(self, document: Document, tokens: EncodedDocument, counts: SourceCounts) -> None:
        counts.documents += 1
        if document.unfinished:
            tokens = _without_last_end(tokens)
        kept = _cut(tokens, self._longest)
        supervised = int(kept.loss_mask.sum())
        if supervised < self._data.min_supervised_tokens:
            reason = self._reason(document, tokens)
            counts.dropped[reason] = counts.dropped.get(reason, 0) + 1
            return
        counts.kept += 1
        counts.cut += kept is not tokens
        counts.tokens += len(kept.input_ids)
        counts.supervised_tokens += supervised
        split: Split = "held_out" if self._is_held_out(document) else "train"
        for row in self._packers[split].add(kept):
            self._writers[split].add(row)
        prompt = _prompt(document, kept) if split == "held_out" else None
        if prompt is not None:
            self._prompts.add(replace(prompt, source=prompt.source.removeprefix(self._directory_of_source)))

    def _reason(self, document: Document, tokens: EncodedDocument) -> str:
        if document.messages is not None and not any(m["role"] == "assistant" for m in document.messages):
            return "no assistant turn"
        few = f"fewer than {self._data.min_supervised_tokens} supervised tokens"
        if int(tokens.loss_mask.sum()) >= self._data.min_supervised_tokens:
            return f"{few} in the first {self._longest}"
        return few

    def _is_held_out(self, document: Document) -> bool:
        return xxhash.xxh3_64_intdigest(document.identity(), seed=self._seed) < self._data.held_out * 2.0**64


def _cut(tokens: EncodedDocument, longest: int) -> EncodedDocument:
    if len(tokens.input_ids) <= longest:
        return tokens
    turns = tuple(turn for turn in tokens.turns if turn < longest)
    return EncodedDocument(tokens.input_ids[:longest], tokens.loss_mask[:longest], turns)


def _without_last_end(tokens: EncodedDocument) -> EncodedDocument:
    """The end of the last turn is not supervised: the template put it there, where the target would have gone on."""
    loss_mask = tokens.loss_mask.copy()
    loss_mask[np.flatnonzero(loss_mask)[-1:]] = 0
    return replace(tokens, loss_mask=loss_mask)


def _prompt(document: Document, kept: EncodedDocument) -> Prompt | None:
    """What to ask for a held-out document: it ends where its last assistant turn (of those not cut off) begins."""
    if document.messages is None:
        text = document.text or ""
        first_part = text[: min(len(text) // 2, _PROMPT_CHARACTERS)]
        whole_words = first_part[: max(first_part.rfind(" "), first_part.rfind("\n")) + 1].rstrip()
        return Prompt(None, whole_words or first_part, document.place)
    answers = [number for number, message in enumerate(document.messages) if message["role"] == "assistant"]
    last = answers[min(len(kept.turns), len(answers)) - 1]
    return Prompt(document.messages[:last], None, document.place, document.tools) if last else None


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += document.characters()
        if characters >= _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _settings(data: DataConfig, tokenizer: Any, seed: int) -> dict[str, Any]:
    """All that the rows depend on, in JSON's types; files by content, not by name."""
    settings: dict[str, Any] = {
        "format": FORMAT,
        "seed": seed,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": chat_template_fingerprint(tokenizer),
        "thinking": data.thinking,
        "row_tokens": data.row_tokens,
        "max_document_tokens": data.max_document_tokens or data.row_tokens,
        "min_supervised_tokens": data.min_supervised_tokens,
        "held_out": data.held_out,
        "shard_tokens": data.shard_tokens,
        "sources": [_describe_source(source) for source in data.sources],
    }
    return settings if data.unfinished == "keep" else {**settings, "unfinished": data.unfinished}


def _describe_source(source: SourceConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {"format": source.format, "limit": source.limit}
    if source.path.startswith(HUB_PREFIX):
        return {**facts, "name": source.path, "subset": source.subset, "split": source.split}
    return {**facts, "files": [describe_file(path)[1] for path in source_files(source)]}


def _check_same(path: Path, existing: dict[str, Any], wanted: dict[str, Any]) -> None:
    different = [key for key in {**wanted, **existing} if existing.get(key) != wanted.get(key)]
    if different:
        raise DataError(
            f"{path} is a prepared dataset made with other {', '.join(different)}",
            "choose another data.path, or replace it with dflash-mp prepare --force",
        )
