"""The drafter's shape and its weights: names, sizes, counts, seeds, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import small_shape

from dflash_mp.config import DrafterConfig
from dflash_mp.drafter.model import DraftModel
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.errors import ConfigError
from dflash_mp.stream.plan import TargetInfo

QWEN3_8B = TargetInfo(
    name="Qwen3-8B",
    weights="0",
    num_layers=36,
    hidden_size=4096,
    vocab_size=151936,
    layer_ids=(1, 9, 17, 25, 33),
    dtype="bfloat16",
    mask_token_id=151669,
    bos_token_id=151643,
    eos_token_ids=(151645,),
    pad_token_id=151643,
    tied_head=False,
    intermediate_size=12288,
    heads=32,
    kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=40960,
)


def names_and_shapes(s: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Section 1.3 of the method."""
    h, q, kv, d, mlp = s.hidden_size, s.heads * s.head_dim, s.kv_heads * s.head_dim, s.head_dim, s.intermediate_size
    found = {"fc.weight": (h, len(s.layer_ids) * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    for i in range(s.layers):
        found |= {
            f"layers.{i}.input_layernorm.weight": (h,),
            f"layers.{i}.post_attention_layernorm.weight": (h,),
            f"layers.{i}.self_attn.q_proj.weight": (q, h),
            f"layers.{i}.self_attn.k_proj.weight": (kv, h),
            f"layers.{i}.self_attn.v_proj.weight": (kv, h),
            f"layers.{i}.self_attn.o_proj.weight": (h, q),
            f"layers.{i}.self_attn.q_norm.weight": (d,),
            f"layers.{i}.self_attn.k_norm.weight": (d,),
            f"layers.{i}.mlp.gate_proj.weight": (mlp, h),
            f"layers.{i}.mlp.up_proj.weight": (mlp, h),
            f"layers.{i}.mlp.down_proj.weight": (h, mlp),
        }
    return found


@given(
    layers=st.integers(1, 6),
    kv=st.integers(1, 4),
    group=st.integers(1, 4),
    half=st.integers(1, 9),
    hidden=st.integers(1, 30),
    mlp=st.integers(1, 30),
    taps=st.integers(1, 5),
)
@settings(max_examples=20, deadline=None)
def test_state_dict_has_the_published_names_and_shapes(layers, kv, group, half, hidden, mlp, taps) -> None:
    shape = small_shape(
        layers=layers,
        heads=kv * group,
        kv_heads=kv,
        head_dim=2 * half,
        hidden_size=hidden,
        intermediate_size=mlp,
        layer_ids=tuple(range(taps)),
    )
    model = DraftModel(shape)
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert state == names_and_shapes(shape)
    assert len(state) == 11 * layers + 3
    assert not list(model.buffers())
    assert shape.parameter_count() == sum(p.numel() for p in model.parameters())
    assert DrafterShape.from_json(shape.to_json()) == shape


def test_a_shape_takes_from_the_target_what_is_left_out() -> None:
    shape = DrafterShape.from_config(DrafterConfig(), QWEN3_8B)
    assert round(shape.parameter_count() / 1e6, 1) == 1048.6
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate_size) == (32, 8, 128, 12288)
    chosen = DrafterShape.from_config(DrafterConfig(heads=12, kv_heads=4, head_dim=64, intermediate_size=100), QWEN3_8B)
    assert (chosen.heads, chosen.kv_heads, chosen.head_dim, chosen.intermediate_size) == (12, 4, 64, 100)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"heads": 3}, "3 attention heads"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"block_size": 1}, "block_size 1"),
        ({"mask_token_id": 61}, "mask token 61"),
        ({"mask_token_id": -1}, "mask token -1"),
        ({"eos_token_ids": (3,)}, "mask token 3"),
        ({"pad_token_id": 3}, "mask token 3"),
        ({"layer_ids": (1, 5)}, "(1, 5)"),
        ({"layer_ids": (3, 1)}, "(3, 1)"),
        ({"layer_ids": ()}, "()"),
        ({"rope_theta": 0.0}, "rope_theta"),
    ],
)
def test_numbers_that_cannot_go_together_are_refused(changes, named) -> None:
    with pytest.raises(ConfigError) as caught:
        small_shape(**changes)
    assert named in caught.value.what
    assert caught.value.remedy


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"layers": 1}'])
def test_damaged_json_is_refused(text) -> None:
    with pytest.raises(ConfigError):
        DrafterShape.from_json(text)


def test_weights_depend_on_the_seed_and_the_name_alone() -> None:
    first, again, other = (DraftModel(small_shape()) for _ in range(3))
    torch.manual_seed(1)
    first.init_weights(7)
    torch.manual_seed(2)
    again.to(torch.bfloat16).init_weights(7)
    other.init_weights(8)
    state = first.state_dict()
    assert all(torch.equal(tensor.bfloat16(), again.state_dict()[name]) for name, tensor in state.items())
    matrices = [name for name, tensor in state.items() if tensor.dim() == 2]
    assert not any(torch.equal(state[name], other.state_dict()[name]) for name in matrices)
    assert not torch.equal(state["layers.0.mlp.up_proj.weight"], state["layers.1.mlp.up_proj.weight"])
    assert state["fc.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert state["norm.weight"].eq(1).all()


def test_initial_weights_are_pinned() -> None:
    model = DraftModel(small_shape())
    model.init_weights(0)
    assert model.fc.weight[0, :3].tolist() == pytest.approx([-0.0324337073, -0.000379783247, 0.0250589084], rel=1e-6)


def test_initial_weights_do_not_depend_on_how_they_are_cut_up(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, in_parts = DraftModel(small_shape()), DraftModel(small_shape())
    whole.init_weights(0)
    monkeypatch.setattr("dflash_mp.drafter.model._INIT_CHUNK", 77)
    in_parts.init_weights(0)
    assert all(torch.equal(tensor, in_parts.state_dict()[name]) for name, tensor in whole.state_dict().items())
