"""A GGUF file is a target like any other: its weights, its tokens, its special tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from target_rows import packed_row
from tiny_gguf import write_tiny_gguf
from transformers import AutoModelForCausalLM

from dflash_mp.config import TargetConfig
from dflash_mp.errors import TargetError
from dflash_mp.target.capture import Capture
from dflash_mp.target.load import load_target
from dflash_mp.target.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf"))


def test_a_gguf_file_gives_the_model_it_was_written_from(files: tuple[Path, Path]) -> None:
    path, source = files
    target = load_target(TargetConfig(path=str(path), layer_ids=[0, 1], device="cpu"))
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        want = AutoModelForCausalLM.from_pretrained(source)(ids).logits
        torch.testing.assert_close(target.model(ids).logits, want, atol=1e-5, rtol=1e-5)
    info = target.info
    assert (info.name, info.tied_head, info.rms_norm_eps, info.rope_theta) == ("tiny", False, 1e-6, 10_000.0)
    assert (info.eos_token_ids, info.pad_token_id, info.mask_token_id) == ((258,), 256, 259)
    Capture(target).self_check(packed_row([20, 9], padding=3))


def test_digits_are_split_off_as_the_files_pre_tokenizer_says(files: tuple[Path, Path]) -> None:
    tokenizer = load_tokenizer(TargetConfig(path=str(files[0])))
    words = [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("ab   123 x1")]
    assert words == ["ab", "ĠĠĠ", "1", "2", "3", "Ġx", "1"]
    text = "def f(x):\n    return 12 + x1  # é\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template_and_end_of_text_come_from_the_file(files: tuple[Path, Path]) -> None:
    tokenizer = load_tokenizer(TargetConfig(path=str(files[0])))
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_a_pre_tokenizer_that_cannot_be_rebuilt_is_refused(tmp_path: Path) -> None:
    path, _ = write_tiny_gguf(tmp_path, pre_tokenizer="some-new-model")
    with pytest.raises(TargetError, match="'some-new-model'") as caught:
        load_tokenizer(TargetConfig(path=str(path)))
    assert "hub id" in caught.value.remedy


def test_a_missing_extra_is_named(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without_gguf(name: str, *rest: Any) -> Any:
        return None if name == "gguf" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_gguf)
    with pytest.raises(TargetError, match=r"dflash-mp\[gguf\]"):
        load_tokenizer(TargetConfig(path=str(files[0])))


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"not a model" * 100)
    with pytest.raises(TargetError, match="fake"):
        load_target(TargetConfig(path=str(path), device="cpu"))
