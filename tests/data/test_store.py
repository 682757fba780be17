"""A prepared dataset gives its rows as packed, finds every row once an epoch, and notices damage."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_families import CHATML, QWEN3, byte_tokenizer
from prepared_data import prepare_pairs

from dflash_mp.data.chat_template import chat_template_fingerprint
from dflash_mp.data.encoding import tokenizer_fingerprint
from dflash_mp.data.order import dataset_row
from dflash_mp.data.row import RowKey, TokenRow
from dflash_mp.data.store import PreparedDataset
from dflash_mp.errors import DataError


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return prepare_pairs(tmp_path_factory.mktemp("store"))


def _same(one: TokenRow, other: TokenRow) -> bool:
    names = ("input_ids", "position_ids", "document_ids", "loss_mask")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def test_rows_keep_their_definition(dataset: PreparedDataset) -> None:
    assert dataset.rows("train") > dataset.manifest.shard_rows > 1  # more than one shard
    padded = 0
    for index in range(dataset.rows("train")):
        row = dataset.row("train", index)
        assert [a.dtype for a in (row.input_ids, row.position_ids, row.document_ids)] == [np.int32] * 3
        assert row.loss_mask.dtype == np.uint8
        assert {a.shape for a in vars(row).values()} == {(256,)}
        real = int((row.document_ids > 0).sum())
        padded += real < 256
        assert not row.document_ids[real:].any()
        assert not row.loss_mask[real:].any()
        assert set(np.diff(row.document_ids[:real])) <= {0, 1}
        assert row.document_ids[0] == 1
        starts = np.flatnonzero(np.diff(row.document_ids, prepend=-1))
        for start, end in zip(starts, [*starts[1:], 256], strict=True):
            assert row.position_ids[start:end].tolist() == list(range(end - start))
            assert not row.loss_mask[start]
    assert padded


def test_a_row_is_the_callers_own(dataset: PreparedDataset) -> None:
    row = dataset.row("train", 0)
    kept = dataset.row("train", 0)
    for array in vars(row).values():
        array[:] = 9
    assert _same(dataset.row("train", 0), kept)


def test_a_run_sees_every_row_once_an_epoch_in_an_order_of_its_seed(dataset: PreparedDataset) -> None:
    rows = dataset.rows("train")
    for seed in (0, 1):
        for epoch in (0, 3):
            ordinals = range(epoch * rows, (epoch + 1) * rows)
            assert sorted(dataset_row(n, rows, seed) for n in ordinals) == list(range(rows))
        for ordinal in (0, rows, 5 * rows + 1):
            row = dataset.run_row(RowKey("train", ordinal), seed)
            assert _same(row, dataset.row("train", dataset_row(ordinal, rows, seed)))
    orders = [[dataset_row(n, rows, seed) for n in range(rows)] for seed in (0, 1)]
    assert orders[0] != orders[1]


def test_held_out_rows_are_named_by_their_place(dataset: PreparedDataset) -> None:
    assert _same(dataset.run_row(RowKey("held_out", 1), 5), dataset.row("held_out", 1))


@pytest.mark.parametrize("index", [-1, 10_000])
def test_a_row_that_is_not_there(dataset: PreparedDataset, index: int) -> None:
    with pytest.raises(DataError, match=rf"no held_out row {index}, only \d+"):
        dataset.run_row(RowKey("held_out", index), 0)


def test_prompts_can_be_read_again(dataset: PreparedDataset) -> None:
    assert list(islice(dataset.held_out_prompts(), 3)) == list(islice(dataset.held_out_prompts(), 3))


class TestDamage:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return prepare_pairs(tmp_path, 60).path

    def test_no_dataset(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"absent does not exist\n.*dflash-mp prepare"):
            PreparedDataset.open(tmp_path / "absent")
        with pytest.raises(DataError, match=r"holds no manifest\.json"):
            PreparedDataset.open(tmp_path)

    def test_a_truncated_file_is_named(self, path: Path) -> None:
        file = path / "train-00000.input_ids.npy"
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(DataError, match=r"train-00000\.input_ids\.npy has \d+ bytes instead of \d+"):
            PreparedDataset.open(path)

    @pytest.mark.parametrize("name", ["held_out_prompts.jsonl", "held_out-00000.bounds.npy"])
    def test_a_missing_file_is_named(self, path: Path, name: str) -> None:
        (path / name).unlink()
        with pytest.raises(DataError, match=rf"{name} of the prepared dataset: No such file"):
            PreparedDataset.open(path)

    def test_verify_finds_a_changed_byte(self, path: Path) -> None:
        PreparedDataset.open(path).verify()
        file = path / "train-00000.loss_mask.npy"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"train-00000\.loss_mask\.npy is damaged"):
            PreparedDataset.open(path).verify()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"format": 99}, r"has format 99; this version reads 1"),
            ({"seed": 77, "settings": {"seed": 77}}, "was changed: its fingerprint"),
            ({"rows": 1}, "is damaged"),
            ({"train": None}, "is damaged"),
        ],
    )
    def test_a_changed_manifest(self, path: Path, change: dict[str, Any], message: str) -> None:
        file = path / "manifest.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        with pytest.raises(DataError, match=message):
            PreparedDataset.open(path)

    @pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "{}"])
    def test_a_manifest_that_is_none(self, path: Path, text: str) -> None:
        (path / "manifest.json").write_text(text)
        with pytest.raises(DataError, match=r"manifest\.json is damaged"):
            PreparedDataset.open(path)


class TestFingerprints:
    def test_equal_tokenizers_have_one_and_others_another(self) -> None:
        first = tokenizer_fingerprint(byte_tokenizer(CHATML))
        assert tokenizer_fingerprint(byte_tokenizer(QWEN3)) == first
        more, other_end, other_split = (byte_tokenizer(CHATML) for _ in range(3))
        more.add_tokens(["<new>"])
        other_end.eos_token = "<|im_end|>"
        other_split.backend_tokenizer.pre_tokenizer = _split_digits()
        found = {tokenizer_fingerprint(tokenizer) for tokenizer in (more, other_end, other_split)}
        assert len(found | {first}) == 4

    def test_a_tokenizer_saved_and_loaded_keeps_its_own(self, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = byte_tokenizer(CHATML)
        tokenizer.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(tokenizer)
        assert chat_template_fingerprint(loaded) == chat_template_fingerprint(tokenizer)

    def test_a_chat_template_is_named_by_its_text(self) -> None:
        found = {chat_template_fingerprint(byte_tokenizer(template)) for template in (CHATML, QWEN3, None)}
        assert len(found) == 3
        assert "none" in found


def _split_digits() -> Any:
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
