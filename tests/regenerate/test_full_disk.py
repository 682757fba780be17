"""`dflash-mp regenerate` on a full disk: one error that names the file, and an answer that is written is not asked for again."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.cli import main
from dflash_mp.errors import DataError
from dflash_mp.regenerate.output import AnswerFile

MORE_THAN_FITS = [{"index": n, "text": "x" * 1000, "finish_reason": "stop"} for n in range(80)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), max_positions=256)


def run(target: Path, prompts: Path, out: Path) -> tuple[int, str]:
    words = ["--target", target, "--prompts", prompts, "--out", out, "--device", "cpu", "--batch", 4]
    done = CliRunner().invoke(main, ["regenerate", *map(str, words), "--max-new-tokens", "12"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("free_kib", "named"),
    [(0, "answers.jsonl.settings.json"), (8, ".answers.jsonl.partial"), (24, "answers.jsonl")],
)
def test_a_full_disk_names_the_file_and_the_same_command_goes_on(
    target: Path, tmp_path: Path, small_disk: Path, free_kib: int, named: str
) -> None:
    prompts, undisturbed, out = tmp_path / "prompts.jsonl", tmp_path / "whole.jsonl", small_disk / "answers.jsonl"
    records: list[dict[str, Any]] = [{"prompt": f"question {n}" + "?" * 99} for n in range(50)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert run(target, prompts, undisturbed)[0] == 0
    assert 12 << 10 < undisturbed.stat().st_size < 20 << 10  # more than 8 KiB hold, and 24 hold once but not twice
    (small_disk / "filler").write_bytes(bytes((64 - free_kib) << 10))
    code, said = run(target, prompts, out)
    assert code == DataError.exit_code
    assert f"cannot write {small_disk / named}: No space left on device" in said
    assert "the same command goes on" in said
    assert not (small_disk / ".answers.jsonl.sorted").exists()
    (small_disk / "filler").unlink()
    code, said = run(target, prompts, out)
    assert code == 0, said
    assert ("going on after" in said) == (free_kib > 0)
    assert out.read_bytes() == undisturbed.read_bytes()


def test_the_first_error_is_the_one_told_and_the_file_is_closed(small_disk: Path) -> None:
    file = _file(small_disk)
    with pytest.raises(KeyError, match="first"):
        _end_with_lines_unwritten(file, KeyError("first"))
    assert file._file.closed


def test_what_cannot_be_written_at_the_end_is_one_clear_error(small_disk: Path) -> None:
    file = _file(small_disk)
    with pytest.raises(DataError, match=r"cannot write .*\.partial: No space left"):
        _end_with_lines_unwritten(file, None)
    assert file._file.closed


def _file(directory: Path) -> AnswerFile:
    return AnswerFile(directory / "answers.jsonl", {}, force=False, say=print)


def _end_with_lines_unwritten(file: AnswerFile, error: Exception | None) -> None:
    with file:
        with contextlib.suppress(DataError):
            file.add(MORE_THAN_FITS)
        if error:
            raise error
