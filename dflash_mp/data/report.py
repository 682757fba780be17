"""What `dflash-mp prepare` prints: a table of what became of the documents, and documents with their supervised part marked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dflash_mp.config import DataConfig
from dflash_mp.data.manifest import Manifest, SplitCounts
from dflash_mp.data.prepare import prepare
from dflash_mp.data.row import SPLITS, TokenRow
from dflash_mp.data.store import PreparedDataset

log = logging.getLogger(__name__)

_BEGIN, _END = "[[", "]]"


def prepare_and_report(data: DataConfig, tokenizer: Any, *, seed: int, show: int = 0, force: bool = False) -> None:
    """`prepare`, with progress, the tables and, with `show`, the first documents, on standard output."""
    console = Console()
    with progress(console) as advance:
        manifest = prepare(
            data,
            tokenizer,
            seed=seed,
            force=force,
            advance=advance,
            say=log.warning,
        )
    print_summary(manifest, data.path, console)
    if show:
        print_documents(PreparedDataset.open(data.path), tokenizer, show, console)


def print_summary(manifest: Manifest, path: Path, console: Console) -> None:
    """Documents, tokens, supervised share, rows and padding share of each split; then what was dropped and why, by source."""
    table = Table(title=f"{path}  ({manifest.fingerprint})", title_justify="left")
    table.add_column("")
    for heading in ("documents", "tokens", "supervised", "rows", "padding"):
        table.add_column(heading, justify="right")
    for name, counts in (("train", manifest.train), ("held out", manifest.held_out)):
        table.add_row(name, *_figures(counts, manifest.row_tokens))
    console.print(table)
    sources = Table("source", title="documents by source", title_justify="left")
    reasons = list(manifest.dropped())
    for heading in ("read", "kept", "of these cut", *(f"dropped: {reason}" for reason in reasons)):
        sources.add_column(heading, justify="right")
    for source in manifest.sources:
        numbers = [source.documents, source.kept, source.cut, *(source.dropped.get(reason, 0) for reason in reasons)]
        sources.add_row(source.path, *(f"{number:,}" for number in numbers))
    console.print(sources)


def print_documents(dataset: PreparedDataset, tokenizer: Any, count: int, console: Console) -> None:
    """The first `count` stored documents, decoded; what is supervised is green on a terminal, and in [[…]] elsewhere."""
    for number, (place, ids, mask) in enumerate(_documents(dataset)):
        if number == count:
            return
        console.rule(f"{place}: {len(ids)} tokens, {int(mask.sum())} supervised", align="left")
        console.print(_marked(ids, mask, tokenizer, console.is_terminal), soft_wrap=True)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A callback for `prepare` that shows documents, tokens and speed while the block runs; on a terminal only."""
    columns = (SpinnerColumn(), TextColumn("{task.fields[documents]:,} documents, {task.completed:,.0f} tokens"))
    speed = TextColumn("{task.speed:,.0f} tokens/s")
    with Progress(*columns, speed, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("prepare", total=None, documents=0)

        def advance(documents: int, tokens: int) -> None:
            bar.update(task, advance=tokens, documents=bar.tasks[0].fields["documents"] + documents)

        yield advance


def _figures(counts: SplitCounts, row_tokens: int) -> list[str]:
    return [
        f"{counts.documents:,}",
        f"{counts.tokens:,}",
        _share(counts.supervised_tokens, counts.tokens),
        f"{counts.rows:,} × {row_tokens:,}",
        _share(counts.padding_tokens, counts.rows * row_tokens),
    ]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "–"


def _documents(dataset: PreparedDataset) -> Iterator[tuple[str, Any, Any]]:
    for split in SPLITS:
        for index in range(dataset.rows(split)):
            row: TokenRow = dataset.row(split, index)
            for document in range(1, int(row.document_ids.max()) + 1):
                inside = row.document_ids == document
                yield f"{split} row {index}, document {document}", row.input_ids[inside], row.loss_mask[inside]


def _marked(ids: Any, mask: Any, tokenizer: Any, colour: bool) -> Text:
    text = Text()
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    for start, end in pairwise(edges):
        piece = tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if mask[start] and colour:
            text.append(piece, style="green")
        else:
            text.append(f"{_BEGIN}{piece}{_END}" if mask[start] else piece)
    return text
