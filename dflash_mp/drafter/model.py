"""The DFlash drafter: names, shapes and numbers of z-lab's `DFlashDraftModel`, as a plain module.

A small non-causal transformer that predicts a block at once. What it knows of the text so far are the target's tapped hidden states:
`hidden_norm(fc(features))` is fused once and enters every layer as extra keys and values, through that layer's own projections. It has no
embedding and no head; those are the target's. The state dict has 11 tensors per layer and 3 more, and no buffers.

Two ways in: `forward` trains many blocks of a row at once under a mask; `draft_block` drafts one block while decoding and keeps the
context's keys and values (never a block's) in a `DraftCache`. Both give the same hidden states for the same block.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dflash_mp.drafter import fp8_products
from dflash_mp.drafter.attention import AttentionMask, attend
from dflash_mp.drafter.shape import DrafterShape

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin [b, 1, length, head_dim]
KeyValue = tuple[torch.Tensor, torch.Tensor]  # [b, kv_heads, length, head_dim] each

_INIT_STD, _INIT_CHUNK = 0.02, 1 << 21


class DraftModel(nn.Module):
    """The drafter of `shape`. Weights are as `torch.nn` makes them until `init_weights` or `load_state_dict`.

    `fp8`: the layers' products run in fp8 (`fp8_products`), for training; names and shapes of the weights stay the same. `fc` is not among them:
    it multiplies context tokens only, 1.5% of the work at 512 blocks in a row of 2,048 tokens.
    """

    def __init__(self, shape: DrafterShape, *, gradient_checkpointing: bool = False, fp8: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.gradient_checkpointing = gradient_checkpointing
        self.compiled = False  # by `compile_layers`
        self.fc = nn.Linear(shape.feature_width, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(shape, fp8) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        features: torch.Tensor,
        noise_embedding: torch.Tensor,
        context_positions: torch.Tensor,
        draft_positions: torch.Tensor,
        mask: AttentionMask,
    ) -> torch.Tensor:
        """Hidden states [b, Q, H], after the final norm, of all blocks of `b` rows.

        `features` [b, T, K·H] and `noise_embedding` [b, Q, H] are cast to the module's dtype; positions [b, T] and [b, Q] are integers
        that count from the start of a document; `mask` comes from `dflash_mp.drafter.attention`.
        """
        dtype = self.fc.weight.dtype
        x = noise_embedding.to(dtype)
        if self.compiled and torch.is_grad_enabled():
            # Else the first layer would be compiled apart from the others, whose input has a gradient.
            x = x.detach().requires_grad_()
        context = self._fuse(features)
        on_context, on_draft = self._rotation(context_positions, dtype), self._rotation(draft_positions, dtype)
        for layer in self.layers:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(
                    layer, x, context, on_draft, on_context, mask, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = layer(x, context, on_draft, on_context, mask)
        hidden: torch.Tensor = self.norm(x)
        return hidden

    @torch.no_grad()
    def draft_block(
        self, new_features: torch.Tensor, noise_embedding: torch.Tensor, positions: torch.Tensor, cache: DraftCache
    ) -> torch.Tensor:
        """Hidden states [1, B, H] of one block, after adding the context that `cache` doesn't hold yet.

        `new_features` [1, n, K·H]: the target's features of the n tokens since the last call, up to the one before the anchor (n may be
        0). `noise_embedding` [1, B, H]: the anchor's embedding and B−1 times the mask token's; B may be smaller than the
        shape's. `positions` [1, n+B]: those of the new context, then of the block. `cache` grows by n.
        """
        dtype = self.fc.weight.dtype
        x, new = noise_embedding.to(dtype), new_features.shape[1]
        context = self._fuse(new_features)
        cos, sin = self._rotation(positions, dtype)
        on_context, on_draft = (cos[:, :, :new], sin[:, :, :new]), (cos[:, :, new:], sin[:, :, new:])
        for number, layer in enumerate(cast(Iterable[DraftLayer], self.layers)):
            held = cache.append(number, layer.self_attn.keys_and_values(context, on_context))
            x = layer.advance(x, held, on_draft, None)
        hidden: torch.Tensor = self.norm(x)
        return hidden

    def compute_logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of `hidden` [..., H] under the target's `head` [V, H], in the head's dtype, scaled and soft-capped."""
        logits = F.linear(hidden.to(head.dtype), head) * self.shape.logit_scale
        cap = self.shape.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def compile_layers(self, **options: Any) -> None:
        """Compile the layers' forward. They share one compilation, because they differ only in their weights.

        `options` go to `torch.compile`. A part that can't be compiled raises instead of running uncompiled.
        """
        self.compiled = True
        for layer in self.layers:
            layer.compile(**{"dynamic": False, "fullgraph": True, **options})

    def init_weights(self, seed: int) -> None:
        """Fill every parameter: matrices normal with deviation 0.02, norms 1.

        A function of `seed` and the parameters' names alone: the same on every rank and device, and rounded in another dtype. Half as many threads
        as PyTorch uses make one matrix each, the largest first, 8 MiB of float32 at a time; a billion values take one of them a quarter of a minute.
        The other half is for what a rank does meanwhile: importing PyTorch's compiler takes several times as long when each core has a thread.
        """
        parameters = sorted(self.named_parameters(), key=lambda named: named[1].numel(), reverse=True)
        with ThreadPoolExecutor(min(len(parameters), max(1, torch.get_num_threads() // 2))) as threads:
            for filled in [threads.submit(_fill, parameter, seed, name) for name, parameter in parameters]:
                filled.result()

    def _fuse(self, features: torch.Tensor) -> torch.Tensor:
        fused: torch.Tensor = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        return fused

    def _rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        return rotation(positions, self.shape.head_dim, self.shape.rope_theta, dtype)


class DraftCache:
    """Keys and values of the context, per layer, for `draft_block`. Holds `length` tokens; room doubles as needed."""

    def __init__(self, layers: int, capacity: int = 256) -> None:
        self._held: list[KeyValue | None] = [None] * layers
        self._lengths = [0] * layers
        self._capacity = max(1, capacity)

    @property
    def length(self) -> int:
        """Context tokens held."""
        return self._lengths[-1]

    def append(self, layer: int, new: KeyValue) -> KeyValue:
        """Add `new` [b, kv_heads, n, head_dim] to `layer` and return all it holds, as views."""
        start = self._lengths[layer]
        end = start + new[0].shape[2]
        held = self._with_room(self._held[layer], new, start, end)
        for whole, part in zip(held, new, strict=True):
            whole[:, :, start:end] = part
        self._held[layer] = held
        self._lengths[layer] = end
        return held[0][:, :, :end], held[1][:, :, :end]

    def _with_room(self, held: KeyValue | None, new: KeyValue, start: int, end: int) -> KeyValue:
        if held is not None and held[0].shape[2] >= end:
            return held
        room = max(self._capacity, end if held is None else 2 * end)
        key, value = (part.new_empty(*part.shape[:2], room, part.shape[3]) for part in new)
        if held is not None:
            key[:, :, :start] = held[0][:, :, :start]
            value[:, :, :start] = held[1][:, :, :start]
        return key, value


class DraftLayer(nn.Module):
    """One decoder layer. Its only state are its weights, so that all layers share one compilation."""

    def __init__(self, shape: DrafterShape, fp8: bool = False) -> None:
        super().__init__()
        self.self_attn = DraftAttention(shape, fp8)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size, fp8)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        on_draft: Rotation,
        on_context: Rotation,
        mask: AttentionMask,
    ) -> torch.Tensor:
        """`x` [b, Q, H] after this layer; `context` [b, T, H] is the fused context, which no layer changes."""
        return self.advance(x, self.self_attn.keys_and_values(context, on_context), on_draft, mask)

    def advance(
        self, x: torch.Tensor, context: KeyValue, on_draft: Rotation, mask: AttentionMask | None
    ) -> torch.Tensor:
        """As `forward`, given the context's keys and values."""
        x = x + self.self_attn(self.input_layernorm(x), context, on_draft, mask)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DraftAttention(nn.Module):
    """Attention of draft tokens to the context and to each other. One set of projections serves both."""

    def __init__(self, shape: DrafterShape, fp8: bool = False) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = fp8_products.linear(shape.hidden_size, queries, fp8, normed=True)
        self.k_proj = fp8_products.linear(shape.hidden_size, keys, fp8, normed=True)
        self.v_proj = fp8_products.linear(shape.hidden_size, keys, fp8)
        self.o_proj = fp8_products.linear(queries, shape.hidden_size, fp8)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def keys_and_values(self, y: torch.Tensor, at: Rotation) -> KeyValue:
        """Keys, normed and rotated, and values of `y` [b, length, H]."""
        key = self.k_norm(self._heads(self.k_proj(y))).transpose(1, 2)
        return _rotate(key, at), self._heads(self.v_proj(y)).transpose(1, 2)

    def forward(
        self, y: torch.Tensor, context: KeyValue, on_draft: Rotation, mask: AttentionMask | None
    ) -> torch.Tensor:
        query = _rotate(self.q_norm(self._heads(self.q_proj(y))).transpose(1, 2), on_draft)
        out = attend(query, context, self.keys_and_values(y, on_draft), mask)
        projected: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, y: torch.Tensor) -> torch.Tensor:
        return y.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int, fp8: bool = False) -> None:
        super().__init__()
        self.gate_proj = fp8_products.linear(hidden_size, intermediate_size, fp8)
        self.up_proj = fp8_products.linear(hidden_size, intermediate_size, fp8)
        self.down_proj = fp8_products.linear(intermediate_size, hidden_size, fp8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class RMSNorm(nn.Module):
    """Root mean square norm: statistics in float32, rounded to the input's dtype before the weight, as Qwen3 does it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and not torch.compiler.is_compiling():  # the two norms outside the layers
            return self.weight * F.rms_norm(x, self.weight.shape, eps=self.eps)  # one kernel each way
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@torch.no_grad()
def _fill(parameter: nn.Parameter, seed: int, name: str) -> None:
    """With its initial values."""
    if parameter.dim() < 2:
        parameter.fill_(1.0)
        return
    key = np.array([seed, zlib.crc32(name.encode())], dtype=np.uint64)
    random = np.random.Generator(np.random.Philox(key=key))
    room = np.empty(min(_INIT_CHUNK, parameter.numel()), dtype=np.float32)
    for part in parameter.detach().view(-1).split(_INIT_CHUNK):
        values = room[: len(part)]
        random.standard_normal(dtype=np.float32, out=values)
        part.copy_(torch.from_numpy(np.multiply(values, np.float32(_INIT_STD), out=values)))


def embed(ids: torch.Tensor, embedding: torch.Tensor, scale: float) -> torch.Tensor:
    """Rows of the target's `embedding` [V, H] times `scale` (the shape's `embedding_scale`): [..., H] in its dtype."""
    rows = F.embedding(ids, embedding)
    return rows if scale == 1.0 else rows * scale


def rotation(positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """RoPE tables [b, 1, length, head_dim] of integer `positions` [b, length]: computed in float32, rounded to `dtype` last."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[:, None, :, None].float() * (1.0 / theta**steps)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: torch.Tensor, at: Rotation) -> torch.Tensor:
    cos, sin = at
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
