"""An export is z-lab's directory, equal to what was trained, or nothing at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_tiny_checkpoint
from tiny_run import make_tiny_run
from transformers import Qwen3Config

from dflash_mp import export
from dflash_mp.cli import main
from dflash_mp.config_file import load_config
from dflash_mp.drafter import checkpoint
from dflash_mp.drafter.model import DraftModel
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.drafter.zlab import Origin, load_export, origin_of, read_config
from dflash_mp.errors import CheckpointError
from dflash_mp.export import export_checkpoint, write_export

ORIGIN = Origin("some/target", "w", "t", "c", "off", "d", step=12)


def a_shape(**changes: Any) -> DrafterShape:
    values: dict[str, Any] = {
        "layers": 2,
        "hidden_size": 48,
        "intermediate_size": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "block_size": 8,
        "layer_ids": (1, 3),
        "mask_token_id": 99,
        "vocab_size": 100,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_positions": 2048,
        "num_target_layers": 6,
        "eos_token_ids": (2,),
    }
    return DrafterShape(**{**values, **changes})


def weights_of(shape: DrafterShape, seed: int = 0) -> dict[str, torch.Tensor]:
    model = DraftModel(shape)
    model.init_weights(seed)
    return model.state_dict()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layers=st.integers(1, 3),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([8, 16, 34]),
    block_size=st.integers(2, 16),
    layer_ids=st.sampled_from([(0,), (1, 4), (0, 2, 3)]),
    theta=st.sampled_from([1e4, 5e5, 1e7]),
    more=st.sampled_from(
        [{}, {"embedding_scale": 48**0.5, "logit_softcap": 30.0, "logit_scale": 0.25}, {"eos_token_ids": (2, 5)}]
    ),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_an_export_reads_back_as_the_shape_and_the_weights_that_were_trained(
    tmp_path: Path,
    layers: int,
    groups: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    layer_ids: tuple[int, ...],
    theta: float,
    more: dict[str, Any],
    dtype: str,
) -> None:
    shape = a_shape(
        layers=layers,
        heads=groups * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        layer_ids=layer_ids,
        rope_theta=theta,
        bos_token_id=1,
        pad_token_id=0,
        **more,
    )
    weights, out = weights_of(shape), tmp_path / "drafter"
    write_export(weights, shape, ORIGIN, out, dtype=dtype)
    read_shape, read = load_export(out)
    assert read_shape == shape
    assert len(read) == 11 * layers + 3
    assert all(torch.equal(read[name], value.to(getattr(torch, dtype))) for name, value in weights.items())
    config = Qwen3Config.from_pretrained(out)
    assert config.rope_parameters["rope_theta"] == theta
    assert (config.block_size, config.dflash_config["block_size"]) == (block_size, block_size)
    assert (config.head_dim, config.num_key_value_heads) == (head_dim, kv_heads)


def test_the_config_says_what_each_loader_looks_for(tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    write_export(weights_of(a_shape()), a_shape(), ORIGIN, out, tied=True)
    config = read_config(out)
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"target_layer_ids": [1, 3], "mask_token_id": 99, "block_size": 8}
    assert config["block_size"] == 8
    assert config["num_target_layers"] == 6
    assert config["layer_types"] == ["full_attention", "full_attention"]
    assert (config["rope_theta"], config["rope_parameters"]["rope_theta"]) == (1e6, 1e6)
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert "auto_map" not in config
    assert not {"input_embedding_scale", "output_multiplier", "final_logit_softcapping"} & set(config)
    assert origin_of(config, out) == ORIGIN
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("fc.weight").dtype == torch.bfloat16


def test_whoever_may_read_the_config_may_read_the_weights(tmp_path: Path) -> None:
    write_export(weights_of(a_shape()), a_shape(), ORIGIN, tmp_path / "drafter")
    assert len({path.stat().st_mode for path in (tmp_path / "drafter").iterdir()}) == 1


def test_names_and_shapes_are_those_of_published_drafters(tmp_path: Path) -> None:
    shape = a_shape(layers=5)
    write_export(weights_of(shape), shape, ORIGIN, tmp_path / "drafter")
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    h, q, kv, i = 48, 64, 32, 64
    layer = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "mlp.gate_proj.weight": (i, h),
        "mlp.up_proj.weight": (i, h),
        "mlp.down_proj.weight": (h, i),
    }
    expected = {"fc.weight": (h, 2 * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    expected |= {f"layers.{n}.{name}": size for n in range(5) for name, size in layer.items()}
    assert len(expected) == 58
    assert {name: tuple(value.shape) for name, value in tensors.items()} == expected


def test_a_run_is_exported_at_its_newest_checkpoint_and_the_card_says_how_to_serve_it(tmp_path: Path) -> None:
    file = make_tiny_run(tmp_path)
    config = load_config(file).config
    for step in (2, 4):
        directory = write_tiny_checkpoint(config, step=step, seed=step)
    out = tmp_path / "drafter"
    result = CliRunner().invoke(main, ["export", str(config.run_dir), str(out), "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    _, exported = load_export(out)
    trained, state = checkpoint.load_weights(directory)
    assert all(torch.equal(exported[name], value) for name, value in trained.items())
    origin = origin_of(read_config(out), out)
    assert origin is not None
    assert (origin.step, origin.target) == (4, "target")
    assert origin.chat_template == state["plan"]["data"]["chat_template"]
    card = (out / "README.md").read_text()
    assert '"method": "dflash"' in card
    assert '"num_speculative_tokens": 3' in card
    assert "--speculative-num-draft-tokens 4" in card


def test_an_earlier_export_is_replaced_and_nothing_else_without_force(tmp_path: Path) -> None:
    shape, out = a_shape(), tmp_path / "drafter"
    write_export(weights_of(shape), shape, ORIGIN, out)
    write_export(weights_of(shape, 1), shape, ORIGIN, out, dtype="float32")
    assert torch.equal(load_export(out)[1]["fc.weight"], weights_of(shape, 1)["fc.weight"])
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("three years of work")
    with pytest.raises(CheckpointError, match="not an earlier export"):
        write_export(weights_of(shape), shape, ORIGIN, other)
    assert (other / "chapter.txt").exists()
    write_export(weights_of(shape), shape, ORIGIN, other, force=True)
    assert load_export(other)[0] == shape
    with pytest.raises(CheckpointError, match="is a file"):
        write_export(weights_of(shape), shape, ORIGIN, other / "README.md", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "thesis"]


def test_a_checkpoint_is_never_exported_over_itself(tmp_path: Path) -> None:
    config = load_config(make_tiny_run(tmp_path)).config
    directory = write_tiny_checkpoint(config)
    with pytest.raises(CheckpointError, match="holds the checkpoint itself"):
        export_checkpoint(config.run_dir, config.run_dir, force=True)
    assert checkpoint.load_weights(directory)


def test_without_a_checkpoint_there_is_no_export(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["export", str(tmp_path), str(tmp_path / "out")])
    assert result.exit_code == CheckpointError.exit_code
    assert "no checkpoint" in result.output
    assert not (tmp_path / "out").exists()


def test_a_truncated_checkpoint_is_not_exported(tmp_path: Path) -> None:
    config = load_config(make_tiny_run(tmp_path)).config
    weights = write_tiny_checkpoint(config) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut short"):
        export_checkpoint(config.run_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failed_export_leaves_the_earlier_one_and_no_debris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, out = a_shape(), tmp_path / "drafter"
    write_export(weights_of(shape), shape, ORIGIN, out, dtype="float32")

    def full_disk(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", full_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        write_export(weights_of(shape, 1), shape, ORIGIN, out)
    assert torch.equal(load_export(out)[1]["fc.weight"], weights_of(shape)["fc.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


@pytest.mark.parametrize("free_kib", [64, 8])  # too little for the weights; for the weights' first page
def test_a_full_disk_is_one_clear_error_and_no_debris(small_disk: Path, free_kib: int) -> None:
    (small_disk / "filler").write_bytes(bytes((64 - free_kib) << 10))
    with pytest.raises(CheckpointError, match=r"cannot write the export .*No space left"):
        write_export(weights_of(a_shape()), a_shape(), ORIGIN, small_disk / "drafter")
    assert [path.name for path in small_disk.iterdir() if path.name != "filler"] == []


def test_weights_changed_on_their_way_to_the_disk_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        changed = {name: value.clone() for name, value in tensors.items()}
        changed["layers.1.mlp.up_proj.weight"][3, 4] += 0.5
        save_file(changed, path, metadata=metadata)

    monkeypatch.setattr(export, "save_file", faulty)
    with pytest.raises(CheckpointError, match="drafts otherwise"):
        write_export(weights_of(a_shape()), a_shape(), ORIGIN, tmp_path / "drafter")
    assert not list(tmp_path.iterdir())


def test_weights_that_overflow_the_dtype_are_refused(tmp_path: Path) -> None:
    weights = weights_of(a_shape())
    weights["norm.weight"][0] = 1e6
    with pytest.raises(CheckpointError, match=r"norm\.weight is not finite in torch\.float16"):
        write_export(weights, a_shape(), ORIGIN, tmp_path / "drafter", dtype="float16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scales RoPE"),
        ({"is_causal": True}, "causal attention"),
        ({"attention_bias": True}, "biases"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"block_size": 16}, "block_size 16 at the top and 8"),
        ({"rope_theta": 1e4}, "two values of rope_theta"),
        ({"dflash_config": {"mask_token_id": 99, "block_size": 8}}, "lacks target_layer_ids"),
        (
            {"dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 100, "block_size": 8}},
            "outside the target's",
        ),
        ({"num_hidden_layers": 3}, "11 tensors missing"),
        ({"num_hidden_layers": 1}, "11 unknown"),
        ({"intermediate_size": 65}, r"but the config says \[48, 65\]"),
        ({"hidden_size": "wide"}, "wrong type"),
    ],
)
def test_a_drafter_that_would_be_run_wrongly_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    out = tmp_path / "drafter"
    write_export(weights_of(a_shape()), a_shape(), ORIGIN, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=message):
        load_export(out)


def test_a_published_config_without_our_own_block_is_read(tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    write_export(weights_of(a_shape()), a_shape(), ORIGIN, out)
    config = json.loads((out / "config.json").read_text())
    for key in ("dflash_mp", "rope_parameters", "is_causal"):
        del config[key]
    del config["dflash_config"]["block_size"]
    (out / "config.json").write_text(json.dumps(config))
    assert load_export(out)[0] == a_shape()
    assert origin_of(config, out) is None
