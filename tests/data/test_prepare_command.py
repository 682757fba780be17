"""`dflash-mp prepare` and `dflash-mp bench prepare`, as a user runs them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from chat_families import CHATML, byte_tokenizer
from click.testing import CliRunner, Result
from prepared_data import pairs, write_jsonl
from rich.console import Console

from dflash_mp.bench.prepare import bench_prepare
from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.cli import main
from dflash_mp.data.report import print_documents
from dflash_mp.data.store import PreparedDataset


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("command")
    write_tiny_target(directory / "target")
    write_jsonl(directory / "pairs.jsonl", [*pairs(60), {"prompt": "q", "response": "a"}])
    config = {
        "run_dir": str(directory / "run"),
        "target": {"path": str(directory / "target")},
        "data": {
            "path": str(directory / "prepared"),
            "sources": [{"path": str(directory / "pairs.jsonl")}],
            "row_tokens": 512,
            "held_out": 0.2,
            "min_supervised_tokens": 8,
        },
        "train": {"steps": 1},
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(config))
    return directory


def _run(directory: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["prepare", "-c", str(directory / "run.yaml"), *arguments])


def test_it_prints_what_became_of_the_documents(directory: Path) -> None:
    result = _run(directory, "--force", "--show", "2")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    manifest = PreparedDataset.open(directory / "prepared").manifest
    for text in ("documents", "tokens", "supervised", "rows", "padding", "fewer than", "pairs.jsonl"):
        assert text in words
    assert f"{manifest.train.tokens:,}" in words
    assert f"{manifest.train.rows:,} × 512" in words
    shown = result.output.partition("train row 0, document 1")[2]
    marked = re.findall(r"<\|im_start\|>assistant\n\[\[(.*)<\|im_end\|>\]\]\n", shown)
    assert len(marked) == 2
    assert set(marked) < {pair["response"] for pair in pairs(60)}
    assert "train row 0, document 2" in shown
    assert "document 3" not in shown
    assert "tokens/s" not in result.output  # no progress bar where there is no terminal


def test_the_same_again_says_so(directory: Path) -> None:
    _run(directory, "--force")
    result = _run(directory)
    assert result.exit_code == 0
    assert "already there" in result.output


@pytest.mark.parametrize(
    ("override", "message", "code"),
    [
        ("data.sources=[]", "data.sources is empty", 2),
        ("data.sources=[{path: nowhere.jsonl}]", "nowhere.jsonl does not exist", 3),
        ("data.row_tokens=1024", "made with other row_tokens", 3),
        ("data.row_tokens=7", "data.row_tokens", 2),
    ],
)
def test_what_is_wrong_is_one_message_and_a_code(directory: Path, override: str, message: str, code: int) -> None:
    _run(directory, "--force")
    result = _run(directory, "--set", override)
    assert result.exit_code == code
    assert message in " ".join(result.output.split())
    assert "→" in result.output
    assert "Traceback" not in result.output


def test_on_a_terminal_the_supervised_part_is_coloured(directory: Path) -> None:
    _run(directory, "--force")
    dataset = PreparedDataset.open(directory / "prepared")
    console = Console(force_terminal=True, width=200, color_system="standard")
    with console.capture() as capture:
        print_documents(dataset, byte_tokenizer(CHATML), 1, console)
    assert "\x1b[32m" in capture.get()
    assert "[[" not in capture.get()


@pytest.mark.parametrize("template", [CHATML, None])
def test_bench_prepare_compares_with_the_tokenizer(template: str | None) -> None:
    speed = bench_prepare(byte_tokenizer(template), rounds=2, megabytes=0.1)
    assert speed.documents > 10
    assert speed.tokens > 10_000
    assert 0 < speed.ratio < 5
    assert replace(speed, prepare=[10.0, 30.0, 8.0], tokenizer=[40.0, 10.0, 16.0]).ratio == 0.5
    assert "ratio" in speed.lines()[-1]
