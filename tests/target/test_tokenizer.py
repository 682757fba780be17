"""Where a target's tokenizer comes from, and what is said when it isn't there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.config import TargetConfig
from dflash_mp.errors import TargetError
from dflash_mp.target.tokenizer import load_tokenizer


def refusal(path: str | Path) -> TargetError:
    with pytest.raises(TargetError) as caught:
        load_tokenizer(TargetConfig(path=str(path)))
    assert caught.value.remedy
    return caught.value


def test_a_directorys_tokenizer_is_loaded_as_it_is(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TargetConfig(path=str(write_tiny_target(tmp_path))))
    text = "A 12\n é"
    assert len(tokenizer) == 260
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_home_directory_may_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_tiny_target(tmp_path / "models" / "tiny")
    assert len(load_tokenizer(TargetConfig(path="~/models/tiny"))) == 260


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "absent") in refusal(tmp_path / "absent").what
    assert "absent.gguf" in refusal(tmp_path / "absent.gguf").what


def test_a_hub_id_that_cannot_be_reached_is_named_as_path_and_as_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refusal("nobody/no-such-model")
    assert "no directory nobody/no-such-model here" in error.what
    assert "hub" in error.what


def test_a_directory_without_a_checkpoint_is_refused_and_its_gguf_file_pointed_out(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path).what
    (tmp_path / "model-q4.gguf").touch()
    assert "model-q4.gguf" in refusal(tmp_path).remedy


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    write_tiny_target(tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "whole" / name, tmp_path / "bare" / name)
    assert "tokenizer" in refusal(tmp_path / "bare").what


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    file = tmp_path / "tokenizer.json"
    whole = json.loads(file.read_text())
    file.write_text("{")
    assert "cannot load the tokenizer" in refusal(tmp_path).what
    file.write_text(json.dumps({**whole, "model": {**whole["model"], "merges": [["no", "such"]]}}))
    assert "cannot load the tokenizer" in refusal(tmp_path).what
