"""What `load_target` states about a target, and what it refuses."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from target_rows import packed_row
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from dflash_mp.bench.tiny import Family, tiny_tokenizer, write_tiny_target
from dflash_mp.config import TargetConfig
from dflash_mp.errors import TargetError
from dflash_mp.target.capture import Capture
from dflash_mp.target.families import rope_theta
from dflash_mp.target.load import Target, load_target
from dflash_mp.target.source import locate, unloadable


def load(directory: Path, **options: Any) -> Target:
    return load_target(TargetConfig(path=str(directory), **{"layer_ids": [0, 2], "device": "cpu", **options}))


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_embedding_and_head_are_the_models_own_tied_or_not(tmp_path: Path, family: Family, tied: bool) -> None:
    target = load(write_tiny_target(tmp_path, family=family, tied=tied))
    assert target.info.tied_head is tied
    assert torch.equal(target.embedding, target.model.get_input_embeddings().weight)
    assert torch.equal(target.head, target.model.get_output_embeddings().weight)
    assert torch.equal(target.head, target.embedding) is tied


def test_the_facts_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    info = load(write_tiny_target(tmp_path / "Tiny-3B", layers=5)).info
    assert dataclasses.asdict(info) | {"weights": ""} == {
        "name": "Tiny-3B",
        "weights": "",
        "num_layers": 5,
        "hidden_size": 96,
        "vocab_size": 288,
        "layer_ids": (0, 2),
        "dtype": "float32",
        "mask_token_id": 259,
        "bos_token_id": None,
        "eos_token_ids": (258,),
        "pad_token_id": 256,
        "tied_head": False,
        "intermediate_size": 256,
        "heads": 3,
        "kv_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_positions": 4096,
        "embedding_scale": 1.0,
        "logit_softcap": None,
        "logit_scale": 1.0,
        "last_hidden": False,
        "wire_dtype": "auto",
    }


def test_gemmas_scale_and_cap_are_carried_as_the_model_applies_them(tmp_path: Path) -> None:
    write_tiny_target(tmp_path, family="gemma2")
    info = load(tmp_path).info
    assert info.embedding_scale == pytest.approx(96**0.5)
    assert info.logit_softcap == 30.0
    assert load(tmp_path, dtype="bfloat16").info.embedding_scale == 9.8125  # √96 in bfloat16


def test_loading_is_reproducible_and_the_checksum_tells_weights_and_dtypes_apart(tmp_path: Path) -> None:
    one, other = write_tiny_target(tmp_path / "one"), write_tiny_target(tmp_path / "other", seed=1)
    assert load(one).info == load(one).info
    checksums = {load(one).info.weights, load(other).info.weights, load(one, dtype="bfloat16").info.weights}
    assert len(checksums) == 3


def test_the_model_is_frozen_and_in_eval_mode(tmp_path: Path) -> None:
    target = load(write_tiny_target(tmp_path))
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())


def test_rope_theta_is_read_in_every_spelling(tmp_path: Path) -> None:
    new = AutoConfig.for_model("qwen3", rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert rope_theta(new) == 5e5
    write_tiny_target(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    del text["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**text, "rope_theta": 1e6}))  # as transformers 4 writes it
    assert load(tmp_path).info.rope_theta == 1e6
    gemma3 = AutoConfig.for_model("gemma3_text")
    assert rope_theta(gemma3) == 1e6  # of full attention; sliding layers have 10,000


def test_every_end_of_text_of_generation_config_counts(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [258, 256]}))
    assert load(tmp_path).info.eos_token_ids == (258, 256)


def test_the_text_part_of_a_multimodal_checkpoint_is_tapped(tmp_path: Path) -> None:
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 288,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 32},
        image_token_id=280,
        video_token_id=281,
        vision_start_token_id=282,
        vision_end_token_id=283,
    )
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load(tmp_path)
    assert (target.info.num_layers, target.info.hidden_size, target.info.rope_theta) == (4, 64, 1e6)
    capture = Capture(target)
    assert capture.forward.one_pass
    capture.self_check(packed_row([30, 12], padding=3))


def test_attention_that_would_leave_out_a_cap_is_not_used(tmp_path: Path) -> None:
    write_tiny_target(tmp_path, family="gemma2")
    assert load(tmp_path).model.config._attn_implementation == "eager"
    with pytest.raises(TargetError, match="attention: eager"):
        load(tmp_path, attention="sdpa")


def test_attention_that_needs_a_package_says_which(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    config = TargetConfig(path=str(tmp_path), attention="flash_attention_2")
    error = ImportError("the package flash_attn seems to be not installed.")  # whether or not it is, here
    refused = unloadable("model", locate(config), config, error)
    assert "flash_attn" in refused.what
    assert refused.remedy.startswith("install flash-attn, ")
    unset = config.model_copy(update={"attention": "auto"})
    assert unloadable("model", locate(unset), unset, error).remedy == "check the files in it"
    assert unloadable("model", locate(config), config, OSError("half a file")).remedy == "check the files in it"


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_transformers_names_the_package_that_attention_needs(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    with pytest.raises(TargetError, match=r"install flash-attn, .* set target.attention to something else"):
        load(tmp_path, attention="flash_attention_2")


def test_a_quantised_head_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_target(tmp_path)
    original = AutoModelForCausalLM.from_pretrained

    def quantised(*arguments: Any, **options: Any) -> Any:
        model, report = original(*arguments, **options)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)
        return model, report

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", quantised)
    with pytest.raises(TargetError, match="head is quantised"):
        load(tmp_path)


def test_a_head_with_a_bias_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "phi", vocab_size=288, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="bias"):
        load(tmp_path)


def test_a_damaged_or_foreign_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TargetError, match="cannot load the model"):
        load(tmp_path)
    weights.write_bytes(whole)
    edit_config(tmp_path, intermediate_size=128)
    with pytest.raises(TargetError, match="cannot load the model"):
        load(tmp_path)
    weights.unlink()
    with pytest.raises(TargetError, match="cannot load the model"):
        load(tmp_path)
    edit_config(tmp_path, model_type="bert", architectures=["BertModel"])
    with pytest.raises(TargetError, match=r"not a causal language model|cannot load the model"):
        load(tmp_path)
    edit_config(tmp_path, model_type="no-such-model")
    with pytest.raises(TargetError, match="cannot load the"):
        load(tmp_path)


def test_weights_missing_from_the_checkpoint_are_an_error_not_random_numbers(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_tiny_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_code_of_a_repository_is_not_run_unasked(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('code of the repository ran')\n")
    edit_config(
        tmp_path,
        model_type="own",
        auto_map={"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "configuration_own.OwnModel"},
    )
    with pytest.raises(TargetError, match="trust_remote_code: true"):
        load(tmp_path)


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_tiny_target(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="pickled weights are not loaded") as caught:
        load(tmp_path)
    assert "save_pretrained" in caught.value.remedy


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    with pytest.raises(TargetError, match="cuda:99"):
        load(tmp_path, device="cuda:99")
    with pytest.raises(TargetError, match="not a device"):
        load(tmp_path, device="gpu")
