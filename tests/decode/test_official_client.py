"""z-lab's own client, dflash 0.1.0 as published, loads our exports and decodes as we do: same tokens, same acceptance lengths."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_drafters import EOS, briefly_trained, drafter_shape, greedy, learn, model_drafter, tiny_model, verifier_for

from dflash_mp.config import DrafterConfig, TargetConfig
from dflash_mp.decode.drafters import fit, read_drafter
from dflash_mp.decode.prompts import PromptEncoder, read_prompts
from dflash_mp.decode.speculative import Drafter, ModelDrafter, decode
from dflash_mp.decode.verifier import Verifier
from dflash_mp.drafter.model import DraftCache, DraftModel
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.drafter.zlab import Origin
from dflash_mp.export import write_export
from dflash_mp.target.load import Target, load_target

DEMO = os.environ.get("DFLASH_MP_DEMO")
if DEMO or os.environ.get("CI"):
    import dflash.model as official  # launchers/test.sh installs it: without it this must fail, not be skipped
else:
    official = pytest.importorskip("dflash.model")

ORIGIN = Origin("target", "w", "t", "c", "default", "d", step=0)
PROMPTS = 10


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "_cuda_time", time.perf_counter)  # the client's own insists on CUDA


def exported(model: DraftModel, out: Path) -> Any:
    """`model`, exported and loaded by the official package."""
    write_export(model.state_dict(), model.shape, ORIGIN, out, dtype="float32")
    return official.DFlashDraftModel.from_pretrained(out).eval()


def assert_same_decoding(
    theirs: Any,
    model: Any,
    verifier: Verifier,
    ours: Drafter,
    prompts: Sequence[torch.Tensor],
    stop: Sequence[int],
    count: int,
) -> list[int]:
    """Both clients agree on every prompt; returns all acceptance lengths."""
    lengths = []
    for prompt in prompts:
        blocks = list(decode(verifier, prompt, ours, max_new_tokens=count, stop_tokens=set(stop)))
        answer = official.dflash_generate(theirs, model, prompt[None], count, list(stop), return_stats=True)
        assert [token for block in blocks for token in block.tokens] == answer.output_ids[0, len(prompt) :].tolist()
        assert [len(block.tokens) for block in blocks[1:]] == answer.acceptance_lengths
        lengths += answer.acceptance_lengths
    return lengths


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layers=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    head_dim=st.sampled_from([8, 24]),
    block_size=st.integers(2, 10),
    layer_ids=st.sampled_from([(0,), (1, 3)]),
    context=st.integers(1, 20),
    theta=st.sampled_from([1e4, 1e6]),
    seed=st.integers(0, 99),
)
def test_an_export_of_any_shape_gives_the_same_hidden_states_in_the_official_model(
    tmp_path: Path,
    layers: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    layer_ids: tuple[int, ...],
    context: int,
    theta: float,
    seed: int,
) -> None:
    shape = DrafterShape(
        layers=layers,
        hidden_size=32,
        intermediate_size=40,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        layer_ids=layer_ids,
        mask_token_id=50,
        vocab_size=60,
        rms_norm_eps=1e-6,
        rope_theta=theta,
        max_positions=512,
        num_target_layers=5,
    )
    ours = DraftModel(shape)
    ours.init_weights(seed)
    theirs = exported(ours, tmp_path / "drafter")
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, context, shape.feature_width, generator=generator)
    noise = torch.randn(1, block_size, 32, generator=generator)
    positions = torch.arange(context + block_size)[None]
    with torch.no_grad():
        expected = theirs(position_ids=positions, noise_embedding=noise, target_hidden=features)
        got = ours.draft_block(features, noise, positions, DraftCache(layers))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("trained", [False, True])
def test_both_clients_decode_a_tiny_target_alike(family: str, trained: bool, tmp_path: Path) -> None:
    model = tiny_model(family, predictable=True)
    if trained:
        draft_model = briefly_trained(family)
    else:
        draft_model = DraftModel(drafter_shape(model))
        draft_model.init_weights(3)
    theirs = exported(draft_model, tmp_path / "drafter")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 32, (1 + 4 * n,), generator=generator) for n in range(PROMPTS)]
    lengths = assert_same_decoding(
        theirs, model, verifier_for(model, (0, 2)), model_drafter(draft_model, model), prompts, [EOS, 31], 24
    )
    assert (max(lengths) >= 4) == trained


@pytest.fixture(scope="module")
def embedded() -> Target:
    if not DEMO:
        pytest.skip("DFLASH_MP_DEMO names no demo target")
    return load_target(TargetConfig(path=f"{DEMO}/SmolLM2-135M-Instruct", dtype="float32", device="cpu"))


def human_eval(target: Target) -> list[torch.Tensor]:
    """Prompts that no drafter is trained on, as the chat template puts them."""
    encoder = PromptEncoder(target.tokenizer, "default")
    prompts = read_prompts(f"{DEMO}/humaneval-prompts.jsonl", PROMPTS).prompts
    return [encoder.encode(prompt, target.device) for prompt in prompts]


@pytest.mark.embedded
def test_both_clients_decode_the_embedded_target_alike(embedded: Target, tmp_path: Path) -> None:
    prompts = torch.stack([prompt[-24:] for prompt in human_eval(embedded)[:6]])
    draft_model = DraftModel(DrafterShape.from_config(DrafterConfig(layers=1, block_size=4), embedded.info))
    draft_model.init_weights(0)
    # By heart: what is compared is the clients, not the drafter.
    learn(draft_model, embedded.model, greedy(embedded.model, prompts, 5), first=24, steps=70, rate=1e-3)
    theirs = exported(draft_model, tmp_path / "drafter")
    ours = ModelDrafter(draft_model, embedded.embedding, embedded.head)
    verifier = Verifier.of(embedded, draft_model.shape.layer_ids)
    lengths = assert_same_decoding(
        theirs, embedded.model, verifier, ours, list(prompts), embedded.info.eos_token_ids, 5
    )
    assert 1.2 < sum(lengths) / len(lengths) < 4


@pytest.mark.embedded
def test_both_clients_decode_alike_with_the_drafter_given(embedded: Target) -> None:
    path = os.environ.get("DFLASH_MP_TRAINED")
    if not path:
        pytest.skip("DFLASH_MP_TRAINED names no exported drafter of the embedded target")
    drafter = read_drafter(Path(path))
    theirs = official.DFlashDraftModel.from_pretrained(path, dtype=torch.float32).eval()
    verifier = Verifier.of(embedded, drafter.shape.layer_ids)
    lengths = assert_same_decoding(
        theirs,
        embedded.model,
        verifier,
        fit(drafter, embedded),
        human_eval(embedded),
        embedded.info.eos_token_ids,
        int(os.environ.get("DFLASH_MP_TRAINED_TOKENS", "32")),
    )
    assert max(lengths) > 1
