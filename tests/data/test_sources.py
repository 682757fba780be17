"""Records of every kind of file arrive in order, and bad files are errors that name the place."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from dflash_mp.config import SourceConfig
from dflash_mp.data.documents import to_document
from dflash_mp.data.sources import read_source
from dflash_mp.errors import DataError

RECORDS = [{"text": f"text {n}"} for n in range(5)]


def _lines(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _read(path: Any, **options: Any) -> list[dict[str, Any]]:
    return [record.fields for record in read_source(SourceConfig(path=str(path), **options))]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(_lines(RECORDS))
    return path


def test_json_lines_plain_and_compressed(jsonl: Path, tmp_path: Path) -> None:
    compressed = tmp_path / "texts.jsonl.gz"
    compressed.write_bytes(gzip.compress(jsonl.read_bytes()))
    assert _read(jsonl) == _read(compressed) == RECORDS


def test_parquet_of_several_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "texts.parquet"
    table = pyarrow.Table.from_pylist([{**record, "unused": n} for n, record in enumerate(RECORDS)])
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    assert _read(path) == RECORDS
    assert [r.place for r in read_source(SourceConfig(path=str(path)))][3] == f"{path}, row 4"


def test_questions_in_parquet_are_read(tmp_path: Path) -> None:
    path = tmp_path / "questions.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"turns": ["a", "b"], "id": 1}]), path)
    assert _read(path) == [{"turns": ["a", "b"]}]


def test_a_directory_is_read_by_name_at_all_levels(tmp_path: Path) -> None:
    names = ["a/y.jsonl", "a/z.jsonl", "a0.jsonl", "b.jsonl", "c/a/a.jsonl", "d.jsonl"]
    for name in (*names[3:], names[1], names[0], names[2], ".hidden/x.jsonl", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(_lines([{"text": name}]))
    assert _read(tmp_path) == [{"text": name} for name in names]


def test_a_limit_takes_the_first_records(jsonl: Path) -> None:
    assert _read(jsonl, limit=2) == RECORDS[:2]


def test_blank_lines_a_byte_order_mark_and_a_missing_last_line_end_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + _lines(RECORDS[:1]) + b"\n \n" + _lines(RECORDS[1:])[:-1])
    assert _read(path) == RECORDS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"texts\.jsonl:4: not valid JSON: .* at column 13"),
        (b'{"text": "\xff"}', r"texts\.jsonl:4: not UTF-8 \(byte 11 of the line\)"),
        (b'["a"]', r"texts\.jsonl:4: a record must be a JSON object, not list"),
        (b"[" * 100_000, r"texts\.jsonl:4: (JSON is nested too deeply|not valid JSON)"),
        (b'{"text": "a", "n": ' + b"9" * 6000 + b"}", r"texts\.jsonl:4: not valid JSON: Exceeds the limit"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(_lines(RECORDS[:3]) + line + b"\n" + _lines(RECORDS[3:]))
    with pytest.raises(DataError, match=message):
        _read(path)


class TestUnusableFiles:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"absent\.jsonl does not exist"):
            _read(tmp_path / "absent.jsonl")

    def test_empty(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.jsonl"
        path.write_bytes(b"\n")
        with pytest.raises(DataError, match=r"empty\.jsonl has no records"):
            _read(path)

    def test_an_empty_file_among_others(self, jsonl: Path) -> None:
        (jsonl.parent / "zero.jsonl").touch()
        with pytest.raises(DataError, match=r"zero\.jsonl has no records"):
            _read(jsonl.parent)

    def test_a_directory_without_data(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").touch()
        with pytest.raises(DataError, match=r"holds no \.jsonl, \.jsonl\.gz, \.parquet file"):
            _read(tmp_path)

    def test_another_kind(self, tmp_path: Path) -> None:
        path = tmp_path / "texts.json"
        path.write_text("[]")
        with pytest.raises(DataError, match=r"is none of .*\n.*jq -c"):
            _read(path)

    def test_a_directory_in_place_of_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "x.jsonl").mkdir()
        with pytest.raises(DataError, match=r"cannot read the data file .*x\.jsonl: Is a directory"):
            _read(tmp_path)

    @pytest.mark.parametrize("damage", ["truncated", "flipped", "not gzip"])
    def test_damaged_compression(self, tmp_path: Path, damage: str) -> None:
        path = tmp_path / "texts.jsonl.gz"
        whole = gzip.compress(_lines([{"text": str(n) * 9} for n in range(2000)]))
        path.write_bytes(
            {"truncated": whole[:-20], "flipped": whole[:-8] + b"\0" * 8, "not gzip": _lines(RECORDS)}[damage]
        )
        with pytest.raises(DataError, match=r"texts\.jsonl\.gz is damaged after line \d+"):
            _read(path)

    def test_damaged_parquet(self, tmp_path: Path) -> None:
        path = tmp_path / "texts.parquet"
        path.write_bytes(b"PAR1" + b"\0" * 50 + b"PAR1")
        with pytest.raises(DataError, match=r"texts\.parquet cannot be read as Parquet"):
            _read(path)

    def test_parquet_without_a_known_column(self, tmp_path: Path) -> None:
        path = tmp_path / "texts.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), path)
        with pytest.raises(DataError, match=r"has only the columns body\n.*messages"):
            _read(path)


class TestHub:
    def test_without_the_library_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(DataError, match=r"hf:someone/chats needs .*\n.*dflash-mp\[datasets\]"):
            _read("hf:someone/chats")

    def test_a_data_set_is_streamed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []
        self._install(monkeypatch, lambda *names, **options: asked.append((names, options)) or iter(RECORDS))
        assert _read("hf:someone/chats", subset="en", split="test", limit=3) == RECORDS[:3]
        assert asked == [(("someone/chats", "en"), {"split": "test", "streaming": True})]

    def test_its_failure_names_the_data_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*names: Any, **options: Any) -> Any:
            yield RECORDS[0]
            raise ConnectionError("no route")

        self._install(monkeypatch, fail)
        with pytest.raises(
            DataError, match=r"hf:chats \(subset default, split train\) fails after record 1: .*no route"
        ):
            _read("hf:chats")

    @staticmethod
    def _install(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
        module = ModuleType("datasets")
        module.load_dataset = load  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", module)


def test_conversations_in_parquet_become_documents(tmp_path: Path) -> None:
    path = tmp_path / "chats.parquet"
    messages = [{"role": "user", "content": "q", "name": None}, {"role": "assistant", "content": "a", "name": "x"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}]), path)
    (record,) = read_source(SourceConfig(path=str(path)))
    assert to_document(record).messages == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "name": "x"},
    ]
