"""Tapped features are the model's own hidden states, document by document, and nothing behind the last tap runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from target_rows import features, hidden_states, packed_row
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from dflash_mp.bench.tiny import Family, tiny_tokenizer, write_tiny_target
from dflash_mp.config import TargetConfig
from dflash_mp.data.row import TokenRow
from dflash_mp.errors import TargetError
from dflash_mp.target.capture import Capture, documents
from dflash_mp.target.load import Target, load_target
from dflash_mp.target.trunk import Trunk

FAMILIES: list[Family] = ["qwen3", "llama", "gemma2", "mistral"]
TAPS = [0, 1, 3]
HIDDEN = 96


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("targets")
    for family in FAMILIES:
        write_tiny_target(directory / family, family=family, layers=5)
    return directory


def load(directory: Path, family: str = "qwen3", **options: Any) -> Target:
    options = {"layer_ids": TAPS, "device": "cpu", **options}
    return load_target(TargetConfig(path=str(directory / family), **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_features_of_a_lone_document_are_the_models_hidden_states_bit_for_bit(directory: Path, family: str) -> None:
    target = load(directory, family)
    row = packed_row([50])
    states = hidden_states(target, row, 0, 50)
    for layer, got in zip(TAPS, features(target, row).split(HIDDEN, dim=1), strict=True):
        assert torch.equal(got, states[layer + 1]), f"layer {layer}"


@pytest.mark.parametrize("attention", ["auto", "eager", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_have_the_features_of_each_alone(directory: Path, family: str, attention: str) -> None:
    # 60 tokens exceed the sliding window of 24 that gemma2 and mistral have.
    target = load(directory, family, attention=attention)
    row = packed_row([60, 1, 7, 40], padding=9)
    capture = Capture(target, keep_target=True)
    assert capture.forward.one_pass
    got = features(target, row, capture)
    for _, start, stop in documents(row.document_ids):
        states = hidden_states(target, row, start, stop)
        want = torch.cat([states[layer + 1] for layer in TAPS], dim=1)
        torch.testing.assert_close(got[start:stop], want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_does_not_see_what_is_packed_before_it(directory: Path, family: str) -> None:
    target = load(directory, family)
    row = packed_row([30, 30], padding=4)
    other = TokenRow(row.input_ids.copy(), row.position_ids, row.document_ids, row.loss_mask)
    other.input_ids[:30] = other.input_ids[:30][::-1]
    before, after = features(target, row), features(target, other)
    assert not torch.allclose(before[:30], after[:30])
    assert torch.equal(before[30:], after[30:])


def test_positions_that_go_on_would_let_documents_see_each_other(directory: Path) -> None:
    """What the tests above would miss if packing were never detected: one document is seen by the other when positions go on."""
    target = load(directory)
    row = packed_row([30, 30])
    joined = TokenRow(row.input_ids, np.arange(60, dtype=np.int32), row.document_ids, row.loss_mask)
    assert not torch.allclose(features(target, row)[30:], features(target, joined)[30:])


def test_neither_later_layers_nor_the_head_run(directory: Path) -> None:
    target = load(directory, layer_ids=[0, 2])
    calls: list[str] = []
    for number, layer in enumerate(target.model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, number=number: calls.append(f"layer {number}"))
    target.model.lm_head.register_forward_hook(lambda *_: calls.append("head"))
    features(target, packed_row([20]), Capture(target, keep_target=True))
    assert set(calls) == {"layer 0", "layer 1", "layer 2"}


def test_the_cut_part_is_freed_after_the_self_check_and_features_stay_the_same(directory: Path) -> None:
    target = load(directory, layer_ids=[0, 1])
    row = packed_row([20, 12], padding=3)
    capture = Capture(target)
    before = features(target, row, capture)
    capture.self_check(row)
    assert target.model is None
    held = sum(p.numel() for p in capture.forward.trunk.module.parameters())
    assert held < sum(p.numel() for p in load(directory).model.parameters()) * 0.6
    assert torch.equal(features(target, row, capture), before)
    with pytest.raises(RuntimeError, match="keep_target"):
        Capture(target)


def test_a_kept_target_is_untouched_by_its_capture(directory: Path) -> None:
    target, row = load(directory), packed_row([25])
    before = hidden_states(target, row, 0, 25)
    Capture(target, keep_target=True).self_check(row)
    after = hidden_states(target, row, 0, 25)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_last_hidden_state_can_be_had_too(directory: Path) -> None:
    target, row = load(directory, layer_ids=[1]), packed_row([25])
    capture = Capture(target, last_hidden=True, keep_target=True)
    out, last = torch.empty(25, HIDDEN), torch.empty(25, HIDDEN)
    capture.capture(row, out, last)
    states = hidden_states(target, row, 0, 25)
    assert torch.equal(last, states[-1])
    assert torch.equal(out, states[2])
    capture.self_check(row)


def test_features_go_into_the_callers_buffer_and_must_fit_it(directory: Path) -> None:
    target, row = load(directory), packed_row([10])
    wide = torch.zeros(12, 3 * HIDDEN)
    Capture(target, keep_target=True).capture(row, wide[1:11])
    assert torch.equal(wide[1:11], features(target, row))
    assert not wide[0].any()
    assert not wide[11].any()
    for wrong in (torch.empty(10, 2 * HIDDEN), torch.empty(10, 3 * HIDDEN, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="must be"):
            Capture(target, keep_target=True).capture(row, wrong)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_self_check_passes_on_a_sound_target(directory: Path, family: str, dtype: str) -> None:
    target = load(directory, family, dtype=dtype)
    Capture(target).self_check(packed_row([40, 1, 17], padding=6))


def shift_taps(capture: Capture) -> None:
    """The off-by-one of hidden_states[id] for hidden_states[id + 1]."""
    target = capture.target
    wrong = replace(target.info, layer_ids=tuple(layer + 1 for layer in target.info.layer_ids))
    capture.forward.trunk = Trunk(wrong, target.anatomy)  # type: ignore[arg-type]


def forget_isolation(capture: Capture) -> None:
    trunk = capture.forward.trunk

    def joined(inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return trunk(torch.stack((inputs[0], torch.arange(inputs.shape[1]), inputs[2])), out)

    capture.forward.trunk = joined  # type: ignore[assignment]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("plant", "found"), [(shift_taps, "layer 0 of document 1"), (forget_isolation, "document 2")])
def test_the_self_check_refuses_a_planted_fault_naming_layer_and_document(
    directory: Path, plant: Any, found: str, dtype: str
) -> None:
    target = load(directory, dtype=dtype)
    capture = Capture(target)
    plant(capture)
    with pytest.raises(TargetError, match=f"{found} differs") as caught:
        capture.self_check(packed_row([40, 20]))
    assert "largest difference" in str(caught.value)
    assert target.model is not None  # nothing was freed


@pytest.mark.parametrize(
    ("fact", "value", "what"),
    [("embedding_scale", 1.0, "the embedding"), ("logit_softcap", None, "logits"), ("logit_scale", 0.5, "logits")],
)
def test_the_self_check_refuses_wrong_scales(directory: Path, fact: str, value: Any, what: str) -> None:
    target = load(directory, "gemma2")
    object.__setattr__(target.info, fact, value)
    with pytest.raises(TargetError, match=what):
        Capture(target).self_check(packed_row([40]))


def test_a_target_with_linear_attention_gets_its_documents_one_by_one(tmp_path: Path) -> None:
    config = Qwen3_5TextConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        eos_token_id=258,
        pad_token_id=256,
    )
    Qwen3_5ForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load_target(TargetConfig(path=str(tmp_path), layer_ids=[0, 2], device="cpu"))
    row = packed_row([33, 20], padding=5)
    capture = Capture(target, keep_target=True)
    assert not capture.forward.one_pass
    capture.self_check(row)
    capture.forward.one_pass = True  # as one forward pass, state leaks from document 1 into document 2
    with pytest.raises(TargetError, match="document 2"):
        capture.self_check(row)


def test_a_model_whose_masks_ignore_packing_is_found_out(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3 import modeling_qwen3

    original = modeling_qwen3.create_causal_mask
    monkeypatch.setattr(
        modeling_qwen3, "create_causal_mask", lambda **given: original(**{**given, "position_ids": None})
    )
    target = load(directory)
    capture = Capture(target)
    assert not capture.forward.one_pass
    capture.self_check(packed_row([33, 20], padding=5))


def test_token_ids_outside_the_vocabulary_are_refused_before_the_model_sees_them(directory: Path) -> None:
    target, row = load(directory), packed_row([10])
    row.input_ids[3] = 288
    with pytest.raises(TargetError, match="token id 288"):
        features(target, row)


def test_documents_are_the_runs_of_equal_ids() -> None:
    assert [tuple(d) for d in documents(np.array([1, 1, 2, 3, 3, 0], np.int32))] == [
        (1, 0, 2),
        (2, 2, 3),
        (3, 3, 5),
        (0, 5, 6),
    ]
