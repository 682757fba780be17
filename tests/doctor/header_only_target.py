"""A checkpoint as large as Qwen3-8B in all that can be read without loading it: its config.json, and weight files cut off after their headers."""

from __future__ import annotations

import json
from pathlib import Path

HIDDEN, LAYERS, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 36, 12288, 32, 8, 128, 151_936
PARAMETERS = 8_190_735_360  # as published
DRAFTER_PARAMETERS = 1_048_626_432


def write_qwen3_8b(directory: Path) -> Path:
    """Write it below `directory`, in two files with an index, and return `directory`."""
    directory.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    first = {
        "model.embed_tokens.weight": [VOCAB, HIDDEN],
        "model.norm.weight": [HIDDEN],
        "lm_head.weight": [VOCAB, HIDDEN],
    }
    second = {}
    for number in range(LAYERS):
        shapes = {
            "self_attn.q_proj": [q, HIDDEN],
            "self_attn.k_proj": [kv, HIDDEN],
            "self_attn.v_proj": [kv, HIDDEN],
            "self_attn.o_proj": [HIDDEN, q],
            "self_attn.q_norm": [HEAD_DIM],
            "self_attn.k_norm": [HEAD_DIM],
            "mlp.gate_proj": [INTERMEDIATE, HIDDEN],
            "mlp.up_proj": [INTERMEDIATE, HIDDEN],
            "mlp.down_proj": [HIDDEN, INTERMEDIATE],
            "input_layernorm": [HIDDEN],
            "post_attention_layernorm": [HIDDEN],
        }
        second.update({f"model.layers.{number}.{name}.weight": shape for name, shape in shapes.items()})
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    for name, tensors in files.items():
        header = {key: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for key, shape in tensors.items()}
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        (directory / name).write_bytes(len(text).to_bytes(8, "little") + text)
    weight_map = {key: name for name, tensors in files.items() for key in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return directory
