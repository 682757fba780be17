"""The embedded target, as `dflash-mp demo` converted it. Skipped unless DFLASH_MP_DEMO names its directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from target_rows import features, hidden_states

from dflash_mp.config import TargetConfig
from dflash_mp.data.row import TokenRow
from dflash_mp.stream.fp8_rows import dequantise, quantise
from dflash_mp.target.capture import Capture, documents
from dflash_mp.target.load import Target, load_target

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def demo() -> Path:
    directory = Path(os.environ.get("DFLASH_MP_DEMO", "no-demo"))
    if not (directory / "SmolLM2-135M-Instruct").is_dir():
        pytest.skip("DFLASH_MP_DEMO names no directory made by `dflash-mp demo`")
    return directory


@pytest.fixture(scope="module")
def target(demo: Path) -> Target:
    return load_target(TargetConfig(path=str(demo / "SmolLM2-135M-Instruct"), device="cpu"))


def real_row(target: Target, demo: Path, tokens: int = 160) -> TokenRow:
    records = [json.loads(line) for line in (demo / "codeio.jsonl").read_text("utf-8").splitlines()[:3]]
    texts = [target.tokenizer(record["response"]).input_ids[:70] for record in records]
    spans = [*map(len, texts), tokens - sum(map(len, texts))]
    ids = [token for text in texts for token in text] + [2] * spans[-1]
    return TokenRow(
        input_ids=np.array(ids[:tokens], np.int32),
        position_ids=np.concatenate([np.arange(max(n, 0)) for n in spans])[:tokens].astype(np.int32),
        document_ids=np.repeat([1, 2, 3, 0], [max(n, 0) for n in spans])[:tokens].astype(np.int32),
        loss_mask=np.ones(tokens, np.uint8),
    )


def test_its_facts_are_those_of_smollm2(target: Target) -> None:
    info = target.info
    assert (info.num_layers, info.hidden_size, info.vocab_size, info.tied_head) == (30, 576, 49_152, True)
    assert (info.heads, info.kv_heads, info.head_dim, info.rope_theta) == (9, 3, 64, 1e5)
    assert info.layer_ids == (1, 8, 14, 20, 27)
    assert (info.mask_token_id, info.eos_token_ids, info.pad_token_id) == (16, (2,), 2)
    assert target.tokenizer.convert_ids_to_tokens(16) == "<empty_output>"
    assert getattr(target.model.config, "quantization_config", None) is None


def test_digits_after_spaces_are_split_as_in_smollm2s_own_tokenizer(target: Target) -> None:
    tokens = target.tokenizer.convert_ids_to_tokens(target.tokenizer("x =      1234\n").input_ids)
    assert tokens == ["x", "Ġ=", "ĠĠĠĠĠĠ", "1", "2", "3", "4", "Ċ"]


def test_packed_features_of_real_text_pass_the_self_check(target: Target, demo: Path) -> None:
    row = real_row(target, demo)
    capture = Capture(target, keep_target=True)
    capture.self_check(row)
    got = features(target, row, capture)
    start, stop = next((d.start, d.stop) for d in documents(row.document_ids) if d.number == 2)
    states = hidden_states(target, row, start, stop)
    want = torch.cat([states[layer + 1] for layer in target.info.layer_ids], dim=1)
    torch.testing.assert_close(got[start:stop], want, atol=5e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_hidden_states_lose_two_percent_in_fp8_and_a_scale_for_each_tap_is_worth_it(
    target: Target, demo: Path, dtype: torch.dtype
) -> None:
    row = real_row(target, demo)
    states = features(target, row).to(dtype)
    errors = {}
    for scales_per_token in (5, 1):
        values, scales = torch.empty_like(states, dtype=torch.float8_e4m3fn), torch.empty(len(states), scales_per_token)
        quantise(states, values, scales)
        got = dequantise([(values, scales)], dtype)[0]
        exact, away = (part.float().view(len(states), 5, -1) for part in (states, got - states))
        errors[scales_per_token] = away.norm(dim=2) / exact.norm(dim=2)
        print(
            f"{scales_per_token} scales per token, {dtype}: error of a tap's vector "
            f"{', '.join(f'{error:.4f}' for error in errors[scales_per_token].mean(0))}, worst {errors[scales_per_token].max():.4f}"
        )
    assert float(exact.abs().max()) > 1000 * float(exact.abs().median()), "a few values are far larger than the others"
    assert float(errors[5].mean()) < 0.025
    assert float(errors[5].max()) < 0.04
    assert float(errors[1].mean()) > 1.1 * float(errors[5].mean())
