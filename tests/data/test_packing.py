"""Every document is in exactly one row, whole and in order; rows are full length and waste little."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mp.data.encoding import EncodedDocument
from dflash_mp.data.packing import PackedRow, RowPacker


def _documents(sizes: list[int]) -> list[EncodedDocument]:
    """Documents whose tokens are all different over the whole list."""
    starts = np.cumsum([1, *sizes])
    ids = [np.arange(start, start + size, dtype=np.int32) for start, size in zip(starts, sizes, strict=False)]
    return [EncodedDocument(tokens, (tokens % 3 == 0).astype(np.uint8)) for tokens in ids]


def _pack(sizes: list[int], row_tokens: int, smallest: int = 1, open_rows: int = 4) -> list[PackedRow]:
    packer = RowPacker(row_tokens, smallest, open_rows)
    rows = [row for document in _documents(sizes) for row in packer.add(document)]
    return [*rows, *packer.finish()]


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), max_size=60),
    smallest=st.integers(1, 12),
    open_rows=st.integers(1, 5),
)
def test_rows_hold_every_document_once_and_whole(sizes: list[int], smallest: int, open_rows: int) -> None:
    rows = _pack(sizes, 40, smallest, open_rows)
    found = []
    for row in rows:
        assert row.input_ids.shape == row.loss_mask.shape == (40,)
        used = int(row.lengths.sum())
        assert not row.input_ids[used:].any()
        assert not row.loss_mask[used:].any()
        found += [part.tolist() for part in np.split(row.input_ids[:used], np.cumsum(row.lengths)[:-1])]
        assert np.array_equal(row.loss_mask[:used], row.input_ids[:used] % 3 == 0)
    assert sorted(found) == [document.input_ids.tolist() for document in _documents(sizes)]


def test_a_document_goes_into_the_first_row_with_room() -> None:
    rows = _pack([6, 7, 3, 4], 10)
    assert [row.lengths.tolist() for row in rows] == [[6, 3], [7], [4]]


def test_a_document_may_fill_a_row_to_the_last_token() -> None:
    assert [row.lengths.tolist() for row in _pack([6, 4], 10)] == [[6, 4]]


def test_when_no_row_may_be_opened_the_fullest_is_finished() -> None:
    packer = RowPacker(10, open_rows=2)
    four, seven, nine = _documents([4, 7, 9])
    assert not [*packer.add(four), *packer.add(seven)]
    assert [row.lengths.tolist() for row in packer.add(nine)] == [[7]]
    assert [row.lengths.tolist() for row in packer.finish()] == [[4], [9]]


def test_a_row_with_less_room_than_any_document_is_finished_at_once() -> None:
    packer = RowPacker(10, smallest=3)
    (eight,) = _documents([8])
    assert [row.lengths.tolist() for row in packer.add(eight)] == [[8]]


def test_short_documents_leave_little_padding() -> None:
    sizes = np.random.default_rng(0).integers(8, 256, 4000).tolist()
    rows = _pack(sizes, 1024, 8, open_rows=64)
    assert 1 - sum(sizes) / (len(rows) * 1024) < 0.02


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="11 tokens does not fit a row of 10"):
        list(RowPacker(10).add(_documents([11])[0]))
