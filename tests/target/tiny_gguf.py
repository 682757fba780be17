"""Writes a tiny Llama target as a GGUF file, laid out as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

from dflash_mp.bench.tiny import CHATML, SPECIAL_TOKENS, tiny_tokenizer, write_tiny_target

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
VOCABULARY = 262


def write_tiny_gguf(directory: Path, *, pre_tokenizer: str = "smollm") -> tuple[Path, Path]:
    """(GGUF file, Hugging Face directory with the same weights), a Llama of 3 layers with a head of its own."""
    source = write_tiny_target(directory / "source", family="llama", layers=3, vocab_size=VOCABULARY)
    path = directory / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(3)
    writer.add_context_length(4096)
    writer.add_embedding_length(96)
    writer.add_feed_forward_length(256)
    writer.add_head_count(3)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(VOCABULARY)
    _add_tokenizer(writer, pre_tokenizer)
    for name, tensor in load_file(source / "model.safetensors").items():
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(_permuted(name, tensor)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, source


def _add_tokenizer(writer: gguf.GGUFWriter, pre_tokenizer: str) -> None:
    tokenizer = tiny_tokenizer()
    tokens = [*tokenizer.convert_ids_to_tokens(range(260)), "ĠĠ", "ĠĠĠĠ"]
    special = {tokenizer.convert_tokens_to_ids(text) for text in SPECIAL_TOKENS}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(VOCABULARY)])
    writer.add_token_merges(["Ġ Ġ", "ĠĠ ĠĠ"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_unk_token_id(256)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


def _gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed or name == "lm_head.weight":
        return fixed.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _permuted(name: str, tensor: np.ndarray) -> np.ndarray:
    """llama.cpp rotates neighbouring values, transformers halves of a head: its converter reorders query and key rows."""
    for part, heads in (("q_proj", 3), ("k_proj", 1)):
        if part in name:
            rows, columns = tensor.shape
            return tensor.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return tensor
