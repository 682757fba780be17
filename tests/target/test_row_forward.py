"""Which way rows are computed, that each way gives the same, and that the next best one is taken with a warning."""

from __future__ import annotations

import functools
import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from target_rows import features, packed_row
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from transformers import GptOssConfig, GptOssForCausalLM

from dflash_mp.bench.tiny import Family, tiny_tokenizer, write_tiny_target
from dflash_mp.config import TargetConfig
from dflash_mp.data.row import TokenRow
from dflash_mp.errors import TargetError
from dflash_mp.target import forward as forward_module
from dflash_mp.target import packed_attention
from dflash_mp.target.capture import Capture
from dflash_mp.target.load import Target, load_target
from dflash_mp.target.trunk import Trunk

TOKENS = 150


def rows() -> list[TokenRow]:
    """Of `TOKENS` tokens each: as many documents as fit, one, and documents of one token; with and without padding."""
    return [
        packed_row([60, 1, 7, 40], padding=TOKENS - 108, seed=1),
        packed_row([TOKENS], seed=2),
        packed_row([1] * 9 + [TOKENS - 9], seed=3),
        packed_row([50, 30], padding=TOKENS - 80, seed=4),
    ]


def tiny(directory: Path, family: Family = "qwen3", **options: Any) -> Target:
    write_tiny_target(directory, family=family, layers=5)
    return load_target(TargetConfig(path=str(directory), **{"layer_ids": [0, 1, 3], "device": "cpu", **options}))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are traced as for compiling, and then run as they were traced: no C++ compiler is needed, and a tenth of the time."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide as on a CUDA device."""
    monkeypatch.setattr(forward_module, "_pays", lambda device: True)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_compiled_rows_are_the_models_own_whatever_came_before_and_compile_once_for_all_layers_of_a_kind(
    tmp_path: Path, family: Family, traced: None
) -> None:
    target = tiny(tmp_path, family, attention="packed")
    capture = Capture(target, keep_target=True, row_tokens=TOKENS, compiled=True)
    capture.self_check(rows()[0])
    assert "layers compiled in" in capture.forward.describe()
    kinds = 2 if family == "gemma2" else 1
    plain, alone = Capture(target, keep_target=True), features(target, rows()[0], capture)
    for row in rows():
        torch.testing.assert_close(features(target, row, capture), features(target, row, plain), atol=5e-5, rtol=5e-5)
        assert torch.equal(features(target, rows()[0], capture), alone)
    # Where layers aren't compiled attention is traced by itself: once for the probe's length, once for the rows of `plain`.
    assert counters["stats"]["unique_graphs"] == (1 + 2) * kinds


def test_rows_of_another_length_are_not_compiled_for(tmp_path: Path, traced: None) -> None:
    target, row = tiny(tmp_path, attention="packed"), packed_row([30, 11])
    capture = Capture(target, keep_target=True, row_tokens=TOKENS, compiled=True)
    torch.testing.assert_close(
        features(target, row, capture), features(target, row, Capture(target, keep_target=True)), atol=5e-5, rtol=5e-5
    )
    assert "layers not compiled" in capture.forward.describe()


def test_the_last_hidden_state_comes_from_compiled_layers_too(tmp_path: Path, traced: None) -> None:
    target = tiny(tmp_path, attention="packed")
    Capture(target, last_hidden=True, row_tokens=TOKENS, compiled=True).self_check(rows()[0])


def test_on_cuda_attention_is_packed_and_layers_are_compiled_without_being_asked(
    tmp_path: Path, traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cuda(monkeypatch)
    capture = Capture(tiny(tmp_path), row_tokens=TOKENS)
    capture.self_check(rows()[0])
    assert capture.forward.describe().startswith("flex attention without a dense mask, layers compiled in")
    uncompiled = Capture(tiny(tmp_path), row_tokens=TOKENS, compiled=False)
    uncompiled.self_check(rows()[0])
    assert uncompiled.forward.describe() == "flex attention without a dense mask, layers not compiled"
    assert Capture(tiny(tmp_path, attention="sdpa")).forward.describe().startswith("sdpa attention under a dense mask")


def test_on_a_cpu_attention_is_the_models_own(tmp_path: Path) -> None:
    capture = Capture(tiny(tmp_path), row_tokens=TOKENS)
    assert capture.forward.describe() == "sdpa attention under a dense mask, layers not compiled"


def test_layers_that_cannot_be_compiled_are_run_as_they_are_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny(tmp_path, attention="packed")

    def break_graph(*arguments: Any, **named: Any) -> None:
        torch._dynamo.graph_break()

    target.anatomy.layers[0].mlp.register_forward_pre_hook(break_graph)  # type: ignore[union-attr]
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    capture = Capture(target, row_tokens=TOKENS, compiled=True)
    with caplog.at_level(logging.WARNING):
        capture.self_check(rows()[0])
    (record,) = [record for record in caplog.records if record.name == "dflash_mp.feed"]
    assert "the layers of" in record.getMessage()
    assert "can't be compiled" in record.getMessage()
    assert "layers not compiled" in capture.forward.describe()


def test_a_trunk_that_replaces_its_buffers_leaves_the_models_alone(tmp_path: Path) -> None:
    target, row = tiny(tmp_path, attention="packed"), rows()[0]
    capture, other = Capture(target, keep_target=True), Capture(target, keep_target=True)
    before = features(target, row, other)
    rotary = capture.forward.trunk.module.rotary_emb
    rotary.inv_freq = rotary.inv_freq * 2
    assert not torch.equal(features(target, row, capture), before)
    assert torch.equal(features(target, row, other), before)
    other.self_check(row)


def test_attention_that_cannot_be_compiled_either_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny(tmp_path, attention="packed")
    capture = Capture(target)

    def fail(*arguments: Any, **named: Any) -> None:
        raise TorchDynamoException("no compiler")

    monkeypatch.setattr(packed_attention, "_kernel", lambda query: fail)
    with pytest.raises(TargetError, match=r"flex attention can't be compiled for .*: no compiler") as caught:
        features(target, rows()[0], capture)
    assert "target.attention" in caught.value.remedy


def test_attention_that_was_left_to_us_and_cannot_be_compiled_is_the_models_own_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The probe's short rows are not compiled; those of the self-check are."""
    on_cuda(monkeypatch)

    def compiler(query: torch.Tensor) -> Any:
        if query.shape[2] < packed_attention._TILE:
            return packed_attention.flex_attention
        raise subprocess.CalledProcessError(1, "cc")  # as Triton does where Python.h is missing

    monkeypatch.setattr(packed_attention, "_kernel", compiler)
    target = tiny(tmp_path)
    capture, row = Capture(target, keep_target=True, row_tokens=TOKENS), rows()[0]
    with caplog.at_level(logging.WARNING):
        capture.self_check(row)
    layers, attention = [record.getMessage() for record in caplog.records if record.name == "dflash_mp.feed"]
    assert "the layers of" in layers
    assert "flex attention can't be compiled" in attention
    assert "CalledProcessError" in attention
    assert "a dense mask" in attention
    assert capture.forward.describe() == "sdpa attention under a dense mask, layers not compiled"
    plain = Capture(load_target(TargetConfig(path=str(tmp_path), layer_ids=[0, 1, 3], device="cpu", attention="sdpa")))
    torch.testing.assert_close(features(target, row, capture), features(target, row, plain), atol=5e-5, rtol=5e-5)
    assert features(target, row, capture).isfinite().all()


def test_the_row_that_shows_it_is_computed_by_documents_where_the_models_own_attention_mixes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, row = tiny(tmp_path, attention="packed"), rows()[0]
    capture, plain = Capture(target, keep_target=True), Capture(target, keep_target=True)
    want = features(target, row, plain)
    target.attention = "auto"
    monkeypatch.setattr(forward_module.RowForward, "_isolates", lambda self, trunk: False)

    def fail(query: Any) -> None:
        raise TorchDynamoException("no compiler")

    monkeypatch.setattr(packed_attention, "_kernel", fail)
    for _ in range(2):
        torch.testing.assert_close(features(target, row, capture), want, atol=5e-5, rtol=5e-5)
    assert capture.forward.describe().startswith("documents one by one, sdpa attention")


def test_what_fails_later_is_not_laid_to_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny(tmp_path, attention="packed")
    capture = Capture(target, keep_target=True)
    capture.self_check(rows()[0])

    def fail(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(packed_attention, "_kernel", lambda query: fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        features(target, rows()[0], capture)


@pytest.mark.parametrize("error", [AssertionError("a stride"), FailOnRecompileLimitHit("8 times")])
def test_whatever_a_compiled_layer_raises_is_a_warning_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise error

    def break_layers(trunk: Trunk) -> None:
        trunk._layers[0].forward = fail

    target = tiny(tmp_path, attention="packed")
    monkeypatch.setattr(Trunk, "compile_layers", break_layers)
    capture = Capture(target, row_tokens=TOKENS, compiled=True)
    with caplog.at_level(logging.WARNING):
        capture.self_check(rows()[0])
    assert f"{type(error).__name__}: {error}" in caplog.text
    assert "layers not compiled" in capture.forward.describe()


def test_layers_that_another_process_of_the_group_cannot_compile_are_not_compiled_here_either(
    tmp_path: Path, traced: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[bool] = []

    def answer(what: str, success: bool, device: torch.device) -> bool:
        told.append(success)
        return False

    monkeypatch.setattr(forward_module, "all_succeeded", answer)
    target = tiny(tmp_path, attention="packed")
    target.ways = 2
    capture = Capture(target, row_tokens=TOKENS, compiled=True)
    with caplog.at_level(logging.WARNING):
        capture.self_check(rows()[0])
    assert told == [True]
    assert "they can't in another process that shares the target" in caplog.text
    assert capture.forward.describe().endswith("layers not compiled, split over 2 processes")


@pytest.fixture
def with_sinks(tmp_path: Path) -> Path:
    config = GptOssConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=16,
        eos_token_id=258,
        pad_token_id=256,
    )
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_model_with_sinks_keeps_its_own_attention_with_a_warning(
    with_sinks: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_cuda(monkeypatch)
    target = load_target(TargetConfig(path=str(with_sinks), layer_ids=[0, 2], device="cpu"))
    with caplog.at_level(logging.WARNING):
        capture = Capture(target, row_tokens=TOKENS)
    assert "can't have flex attention (its attention has s_aux)" in caplog.text
    assert "layers not compiled" in capture.forward.describe()
    capture.self_check(rows()[0])


def test_a_model_that_fails_in_packed_attention_keeps_its_own_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_cuda(monkeypatch)

    def refuse(query: Any) -> None:
        raise ValueError("heads of 3")

    monkeypatch.setattr(packed_attention, "_kernel", refuse)
    with caplog.at_level(logging.WARNING):
        capture = Capture(tiny(tmp_path), row_tokens=TOKENS)
    assert "can't have flex attention (ValueError: heads of 3)" in caplog.text
    capture.self_check(rows()[0])


def test_packed_attention_that_was_asked_for_is_not_replaced(with_sinks: Path) -> None:
    target = load_target(TargetConfig(path=str(with_sinks), layer_ids=[0, 2], device="cpu", attention="packed"))
    with pytest.raises(TargetError, match="can't have packed attention: its attention has s_aux"):
        Capture(target)
