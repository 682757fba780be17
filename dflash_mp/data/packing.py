"""Pack documents into rows of a fixed number of tokens, in one pass and with bounded memory.

A document goes into the first of at most `open_rows` unfinished rows that has room for it, and is never split over rows. When none has
room and no further row may be opened, the fullest is finished. The same documents in the same order give the same rows. Costs
`open_rows` rows of memory; with 64 of them padding is a few per cent where documents are much shorter than a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dflash_mp.data.encoding import EncodedDocument

OPEN_ROWS = 64


@dataclass(frozen=True)
class PackedRow:
    """`input_ids` int32 [T] and `loss_mask` uint8 [T], zero in the padding; `lengths` int32 [n]: tokens of each document."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int32]


@dataclass
class _OpenRow:
    room: int
    documents: list[EncodedDocument] = field(default_factory=list)


class RowPacker:
    """Packs documents of one split into rows of `row_tokens`. `smallest`: rows with less room than this are finished at once."""

    def __init__(self, row_tokens: int, smallest: int = 1, open_rows: int = OPEN_ROWS) -> None:
        self._row_tokens = row_tokens
        self._smallest = smallest
        self._limit = open_rows
        self._open: list[_OpenRow] = []

    def add(self, document: EncodedDocument) -> Iterator[PackedRow]:
        """Place a document of at most `row_tokens` tokens; yield the rows that this finishes. Consume the iterator."""
        size = len(document.input_ids)
        if size > self._row_tokens:
            raise ValueError(f"a document of {size} tokens does not fit a row of {self._row_tokens}")
        row = next((row for row in self._open if row.room >= size), None)
        if row is None:
            if len(self._open) == self._limit:
                fullest = min(self._open, key=lambda row: row.room)
                self._open.remove(fullest)
                yield self._finish(fullest)
            row = _OpenRow(self._row_tokens)
            self._open.append(row)
        row.documents.append(document)
        row.room -= size
        if row.room < self._smallest:
            self._open.remove(row)
            yield self._finish(row)

    def finish(self) -> Iterator[PackedRow]:
        """The rows still open, in the order they were opened."""
        while self._open:
            yield self._finish(self._open.pop(0))

    def _finish(self, row: _OpenRow) -> PackedRow:
        ids = np.zeros(self._row_tokens, np.int32)
        mask = np.zeros(self._row_tokens, np.uint8)
        used = self._row_tokens - row.room
        np.concatenate([document.input_ids for document in row.documents], out=ids[:used])
        np.concatenate([document.loss_mask for document in row.documents], out=mask[:used])
        return PackedRow(ids, mask, np.array([len(document.input_ids) for document in row.documents], np.int32))
