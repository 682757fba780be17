"""Attention of one new token per slot, which reads what is stored once: each slot's own places, each KV head for all of its query heads together.

Two ways give the same to rounding, each known to transformers' `AttentionInterface` by its name: a Triton kernel on CUDA, and plain PyTorch, which
reads all places that it is given and serves as the kernel's twin. `way_of` chooses, and says why where it isn't the kernel. The kernel
reads a slot's span only, from the first visible place to the last, which the model hands on in the place of a mask. Attention over prompts
goes on to transformers' sdpa.

The floor of a step is its bytes: the weights once, and for each slot the keys and values of its places, 2 · layers · KV heads · size · bytes (23 kB
a place for 30 layers of 3 KV heads of 64 in bfloat16). Its operations, 2 · weights a token, count for more only where texts are many and
short. Attention that repeats the KV heads for the query heads moves 1 + 2 · heads / KV heads times these bytes, and reads as many places as the
longest text has for every slot.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_TILE = 64  # places that the kernel takes at a time; fewer where a key has more than 256 bytes
_LARGEST = 256  # a head's size that the kernel takes
_REFERENCE = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # not cuDNN's, which may come first on Hopper
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 4e-2}


WayName = Literal["dflash_kernel", "dflash_plain"]


class Way(NamedTuple):
    """How attention is computed; `name` is transformers' for it. `why_not`: the reason for which it isn't the kernel."""

    name: WayName
    why_not: str = ""


def head_sizes(config: Any, size: int) -> tuple[int, int]:
    """Values in a head's key and in its value; `size` where they are one (they differ in multi-head latent attention)."""
    found = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    if None in found:
        return size, size
    plain, rotated, value = map(int, found)  # type: ignore[arg-type]
    return plain + rotated, value


def way_of(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int, value_size: int) -> Way:
    """The kernel where it can run and its results on random numbers are its twin's; takes seconds, for compilation."""
    if device.type != "cuda":
        return Way("dflash_plain", f"the device is {device.type}")
    if importlib.util.find_spec("triton") is None:
        return Way("dflash_plain", "Triton is not installed")
    if max(size, value_size) > _LARGEST:
        return Way("dflash_plain", f"its heads have {max(size, value_size)} values, more than {_LARGEST}")
    draw = torch.Generator(device).manual_seed(0)
    query, keys, values = (
        torch.randn(shape, generator=draw, device=device, dtype=dtype)
        for shape in ((3, heads, 1, size), (3, kv_heads, 256, size), (3, kv_heads, 256, value_size))
    )
    spans = torch.tensor([[0, 0], [70, 255], [0, 130]], device=device)[:, None, None]
    try:
        with sdpa_kernel(_REFERENCE):
            expected = attend_plainly(query, keys, values, seen_in(spans, 256))
        error = float((attend(query, keys, values, spans) - expected).abs().max())
    except Exception as problem:  # a compiler's errors have no common class; it is said, and the twin takes over
        return Way("dflash_plain", f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}")
    if not error <= _TOLERANCE[dtype]:
        return Way("dflash_plain", f"its results were off by {error:.2g}")
    return Way("dflash_kernel")


def obstacle(model: Any, decoder: torch.nn.Module, config: Any) -> str:
    """Why the attention of this transformers model can't be replaced by one of these ways; empty if it can."""
    if config._attn_implementation != "sdpa":
        return f"its attention is {config._attn_implementation}"
    if not getattr(model, "_supports_attention_backend", False):
        return "its modules take no other attention"
    if any(getattr(module, "config", config) is not config for module in decoder.modules()):
        return "its modules have configurations of their own"
    return ""


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: torch.Tensor,
    scale: float | None = None,
    tile: int = _TILE,
) -> torch.Tensor:
    """[slots, 1, heads, size of a value], by the kernel.

    `query` [slots, heads, 1, size], `keys` [slots, KV heads, places, size] and `values` have one dtype, keys and values a dense last dimension;
    `spans` int64 [slots, 1, 1, 2], contiguous: none is empty, none ends behind the places. Raises `RuntimeError` for other strides.
    """
    from dflash_mp.regenerate.attention_kernel import attend_to_span

    slots, heads, _, size = query.shape
    kv_heads, value_size = keys.shape[1], values.shape[-1]
    if keys.stride(-1) != 1 or values.stride(-1) != 1 or not spans.is_contiguous():
        raise RuntimeError("the last dimension of keys and values must be dense, and spans contiguous")
    if query.stride(-1) != 1:
        query = query.contiguous()
    out = query.new_empty(slots, 1, heads, value_size)
    group, columns, value_columns = heads // kv_heads, _padded(size), _padded(value_size)
    factor = (size**-0.5 if scale is None else scale) * math.log2(math.e)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        attend_to_span[(kv_heads, slots)](
            query,
            keys,
            values,
            spans,
            out,
            *query.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            factor,
            group=group,
            rows=_padded(group),
            size=size,
            columns=columns,
            value_size=value_size,
            value_columns=value_columns,
            tile=max(16, tile * 256 // max(256, max(columns, value_columns) * keys.element_size())),
            precision="ieee",
            num_warps=4,
            num_stages=3,
        )
    return out


def attend_plainly(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """The same as `attend`, in plain PyTorch, for the places that are `seen` (bool [slots, 1, 1, places]).

    The query heads of one KV head are taken for tokens that see the same, so that nothing is repeated for them.
    """
    slots, heads, _, size = query.shape
    grouped = query.reshape(slots, keys.shape[1], -1, size)
    found = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen, scale=scale)
    return found.reshape(slots, 1, heads, values.shape[-1])


def seen_in(spans: torch.Tensor, places: int) -> torch.Tensor:
    """The mask that `spans` stand for: bool [slots, 1, 1, places]."""
    every = torch.arange(places, device=spans.device)
    return (every >= spans[..., :1]) & (every <= spans[..., 1:])


def _in_a_model(tokens: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, None]]:
    """What transformers' attention modules call, single tokens to be attended to by `tokens`."""

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **further: Any,
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is None and query.dtype == torch.float32:
            # On CUDA only half precision is attended to in groups without the whole matrix of scores.
            key, value = (of.repeat_interleave(query.shape[1] // of.shape[1], 1) for of in (key, value))
            found = functional.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True)
            return found.transpose(1, 2).contiguous(), None
        if attention_mask is None or query.shape[2] > 1:
            prompts: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **further
            )
            return prompts
        return tokens(query, key, value, attention_mask, scaling), None

    return attention


AttentionInterface.register("dflash_kernel", _in_a_model(attend))
AttentionInterface.register("dflash_plain", _in_a_model(attend_plainly))


def _padded(size: int) -> int:
    """Up to a power of two that a matrix product takes."""
    return max(16, 1 << (size - 1).bit_length())
