"""Speculative decoding returns the target's own tokens, in the blocks that z-lab's client would count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_drafters import Oracle, briefly_trained, drafter_shape, greedy, model_drafter, tiny_model, verifier_for

from dflash_mp.decode.sampling import Sampling
from dflash_mp.decode.speculative import Block, decode
from dflash_mp.decode.verifier import Verifier
from dflash_mp.drafter.model import DraftModel
from dflash_mp.errors import TargetError

FAMILIES = ["qwen3", "llama", "gemma2", "mistral"]  # gemma2: windows and soft-caps; mistral: windows in all layers


def prompt_of(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


def tokens_of(blocks: list[Block]) -> list[int]:
    return [token for block in blocks for token in block.tokens]


@settings(max_examples=24, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    length=st.integers(1, 60),
    block_size=st.integers(2, 17),
    count=st.integers(1, 40),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    taps=st.sampled_from([(1,), (0, 2), (0, 1, 2)]),
    seed=st.integers(0, 5),
)
def test_greedy_output_is_the_targets_own_whatever_the_drafter_proposes(
    family: str, length: int, block_size: int, count: int, share: float, taps: tuple[int, ...], seed: int
) -> None:
    model, prompt = tiny_model(family), prompt_of(length, seed)
    text = greedy(model, prompt[None], count)[0].tolist()
    oracle = Oracle.erring(text, block_size, share, seed)
    blocks = list(decode(verifier_for(model, taps), prompt, oracle, max_new_tokens=count))
    assert tokens_of(blocks) == text[length:]
    assert [len(block.tokens) for block in blocks[1:]] == expected_lengths(oracle, length, count)


def expected_lengths(oracle: Oracle, length: int, count: int) -> list[int]:
    """Committed tokens of each block, worked out from the places where the oracle errs."""
    start, end, lengths = length, length + count, []
    while start + 1 < end:
        size = min(oracle.block_size, end - start)
        accepted = 0
        while accepted < size - 1 and start + 1 + accepted not in oracle.wrong:
            accepted += 1
        lengths.append(min(accepted + 1, end - start - 1))
        start += lengths[-1]
    return lengths


@settings(max_examples=6, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    block_size=st.integers(2, 12),
    layers=st.integers(1, 3),
    length=st.integers(1, 40),
    seed=st.integers(0, 3),
)
def test_greedy_output_is_the_targets_own_with_a_random_draft_model(
    family: str, block_size: int, layers: int, length: int, seed: int
) -> None:
    model, prompt = tiny_model(family), prompt_of(length, seed)
    shape = drafter_shape(model, block_size=block_size, layers=layers)
    draft_model = DraftModel(shape)
    draft_model.init_weights(seed)
    blocks = list(
        decode(verifier_for(model, shape.layer_ids), prompt, model_drafter(draft_model, model), max_new_tokens=24)
    )
    assert tokens_of(blocks) == greedy(model, prompt[None], 24)[0, length:].tolist()


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_trained_draft_model_has_blocks_accepted_and_changes_no_token(family: str) -> None:
    model = tiny_model(family, predictable=True)
    drafter, verifier = model_drafter(briefly_trained(family), model), verifier_for(model, (0, 2))
    lengths = []
    for seed in range(4):
        prompt = prompt_of(5 + 9 * seed, seed) % 32
        blocks = list(decode(verifier, prompt, drafter, max_new_tokens=40))
        assert tokens_of(blocks) == greedy(model, prompt[None], 40)[0, prompt.shape[0] :].tolist()
        lengths += [len(block.tokens) for block in blocks[1:]]
    assert min(lengths) == 1
    assert max(lengths) >= 4


def test_without_a_drafter_each_block_is_one_token_of_the_target() -> None:
    model, prompt = tiny_model("qwen3"), prompt_of(9, 0)
    blocks = list(decode(verifier_for(model, ()), prompt, None, max_new_tokens=20))
    assert tokens_of(blocks) == greedy(model, prompt[None], 20)[0, 9:].tolist()
    assert {(len(b.tokens), b.accepted, b.drafted) for b in blocks} == {(1, 0, 0)}


@pytest.mark.parametrize("at", range(12))
def test_a_stop_token_ends_the_text_wherever_in_a_block_it_falls(at: int) -> None:
    model, prompt = tiny_model("qwen3"), prompt_of(7, 1)
    text = greedy(model, prompt[None], 30)[0].tolist()
    stop = text[7 + at]
    first = text.index(stop, 7)
    oracle = Oracle.erring(text, 6, 0.2, seed=at)
    blocks = list(decode(verifier_for(model, (1,)), prompt, oracle, max_new_tokens=30, stop_tokens={stop}))
    assert tokens_of(blocks) == text[7 : first + 1]
    for block in blocks:
        assert block.accepted <= block.drafted
        assert block.accepted <= len(block.tokens) <= block.accepted + 1
    assert blocks[-1].drafted <= len(blocks[-1].tokens)  # slots after the end are not held against the drafter


@pytest.mark.parametrize("count", range(1, 16))
def test_max_new_tokens_is_reached_exactly_and_never_passed(count: int) -> None:
    model, prompt = tiny_model("llama"), prompt_of(4, 2)
    text = greedy(model, prompt[None], 15)[0].tolist()
    blocks = list(decode(verifier_for(model, (1,)), prompt, Oracle(text, 6), max_new_tokens=count))
    assert tokens_of(blocks) == text[4 : 4 + count]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_drafter_gets_the_targets_hidden_states_of_every_token_before_the_anchor_once(family: str) -> None:
    model, prompt = tiny_model(family), prompt_of(11, 3)
    text = greedy(model, prompt[None], 30)
    oracle = Oracle.erring(text[0].tolist(), 5, 0.3, seed=0)
    taps = (0, 2)
    list(decode(verifier_for(model, taps), prompt, oracle, max_new_tokens=30))
    given_to_drafter = torch.cat(oracle.features, 1)
    states = model(input_ids=text, output_hidden_states=True, use_cache=False).hidden_states
    expected = torch.cat([states[i + 1] for i in taps], -1)[:, : given_to_drafter.shape[1]]
    assert given_to_drafter.shape[1] > 30
    torch.testing.assert_close(given_to_drafter, expected, rtol=1e-4, atol=1e-4)


def test_no_hook_stays_on_the_target() -> None:
    model, prompt = tiny_model("qwen3"), prompt_of(5, 0)
    before = [list(layer._forward_hooks) for layer in model.model.layers]
    list(decode(verifier_for(model, (0, 2)), prompt, Oracle([0] * 40, 4), max_new_tokens=10))
    assert [list(layer._forward_hooks) for layer in model.model.layers] == before


def test_sampling_is_repeated_by_its_seed_and_leaves_the_global_random_state_alone() -> None:
    model, prompt = tiny_model("qwen3", predictable=True), prompt_of(5, 0) % 32
    drafter, verifier = model_drafter(briefly_trained("qwen3"), model), verifier_for(model, (0, 2))
    before = torch.get_rng_state()

    def sampled(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        sampling = Sampling(temperature=3.0, top_p=0.95, top_k=40)
        return tokens_of(
            list(decode(verifier, prompt, drafter, max_new_tokens=30, sampling=sampling, generator=generator))
        )

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
    assert torch.equal(before, torch.get_rng_state())


def test_sampling_that_leaves_one_choice_is_greedy() -> None:
    model, prompt = tiny_model("llama"), prompt_of(5, 0)
    text = greedy(model, prompt[None], 25)[0].tolist()
    for drafter in (None, Oracle.erring(text, 6, 0.2, seed=1)):
        blocks = decode(
            verifier_for(model, (1,)),
            prompt,
            drafter,
            max_new_tokens=25,
            sampling=Sampling(temperature=1.0, top_k=1),
            generator=torch.Generator().manual_seed(0),
        )
        assert tokens_of(list(blocks)) == text[5:]


def test_a_target_with_recurrent_layers_is_refused_before_any_text_is_read() -> None:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        layer_types=["linear_attention", "full_attention"],
    )
    model = Qwen3NextForCausalLM(config)
    with pytest.raises(TargetError, match="can't take rejected tokens back"):
        Verifier(model, list(model.model.layers), (0,))
