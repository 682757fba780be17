"""The KV cache of many texts side by side: one slot for each, every slot at a place of its own.

Keys and values lie in one tensor per layer, [slots, KV heads, capacity, size of a head]. A prompt is written from place 0 on, padded at its end: what
lies behind a slot's own place is never seen, because the masks made here say so, and is written over as the text grows. So no text
depends on its neighbours' lengths, and every forward pass has one of a few shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from dflash_mp.errors import TargetError
from dflash_mp.regenerate.slot_attention import WayName
from dflash_mp.target.families import keeps_state

_FULL, _SLIDING = "full_attention", "sliding_attention"


class SlotCache(Cache):
    """`slots` texts of at most `capacity` tokens. Set `rows` before a forward pass of prompts, `positions` before one of single tokens."""

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.rows: torch.Tensor | None = None  # int64 [n]: the slots that a forward pass of prompts fills
        self.positions = torch.empty(0)  # int64 [slots]: where a forward pass of one token per slot writes
        self.width = capacity  # places that such a pass looks at
        self._slots = slots
        self._every = torch.empty(0)
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store what transformers hands over, [n, KV heads, tokens, size], and return what attention should see."""
        keys = self._stored(self._keys, layer_idx, key_states)
        values = self._stored(self._values, layer_idx, value_states)
        if self.rows is not None:
            length = key_states.shape[2]
            keys[self.rows, :, :length] = key_states
            values[self.rows, :, :length] = value_states
            return key_states, value_states
        keys[self._every, :, self.positions] = key_states[:, :, 0]
        values[self._every, :, self.positions] = value_states[:, :, 0]
        return keys[:, :, : self.width], values[:, :, : self.width]

    def grow(self, capacity: int) -> None:
        """Make room for texts of `capacity` tokens; what is stored stays."""
        for store in (self._keys, self._values):
            for layer, old in store.items():
                store[layer] = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
                store[layer][:, :, : self.capacity] = old
        self.capacity = capacity

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not a number here: every slot has its own. Callers give positions and masks."""
        return 0

    def _stored(self, store: dict[int, torch.Tensor], layer: int, like: torch.Tensor) -> torch.Tensor:
        if layer not in store:
            store[layer] = like.new_zeros(self._slots, like.shape[1], self.capacity, like.shape[3])
            self._every = torch.arange(self._slots, device=like.device)
        return store[layer]


class SlotMasks:
    """The attention masks of a transformers text model with this `config`, in the form that its forward takes.

    With a `way` of `slot_attention` they are what that takes: none for prompts where all before is seen, and for the kernel a slot's first and
    last visible place. Raises `TargetError` for a model whose layers see or remember in another way than full or sliding attention.
    """

    def __init__(self, config: Any, name: str, dtype: torch.dtype, way: WayName | None = None) -> None:
        kinds = set(getattr(config, "layer_types", None) or ())
        if (
            keeps_state(config)
            or not kinds <= {_FULL, _SLIDING}
            or config._attn_implementation not in ("sdpa", "eager")
        ):
            raise TargetError(
                f"{name} can't be run with many texts side by side: its attention is {config._attn_implementation}, its layers are "
                + (", ".join(sorted(kinds)) or "recurrent"),
                "set --attention sdpa if that is the reason; else serve the target with vLLM or SGLang and give --server",
            )
        self._kinds = kinds if _SLIDING in kinds else set()
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        self._window = int(window) if window and (self._kinds or not kinds) else None
        self._additive = dtype if config._attn_implementation == "eager" else None
        self._way = way

    def of_prompts(self, length: int, device: torch.device) -> Any:
        """For prompts padded at their ends to `length` tokens."""
        all_before = self._window is None or length <= self._window
        if self._way and all_before:
            return self._of_layers(None, None)
        places = torch.arange(length, device=device)
        full, near = self._visible(places[None, :, None], places[None, None, :])
        return self._of_layers(None if self._way else self._form(full), self._form(near))

    def of_tokens(self, positions: torch.Tensor, width: int) -> Any:
        """For one token per slot at `positions` [slots], looking at the first `width` places."""
        if self._way == "dflash_kernel":
            last = positions[:, None, None]
            first = last - last if self._window is None else (last - (self._window - 1)).clamp_min(0)
            return self._of_layers(torch.stack((last - last, last), -1), torch.stack((first, last), -1))
        full, near = self._visible(
            positions[:, None, None], torch.arange(width, device=positions.device)[None, None, :]
        )
        return self._of_layers(self._form(full), self._form(near))

    def _visible(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        full = key <= query
        return full, full if self._window is None else full & (key > query - self._window)

    def _of_layers(self, full: Any, near: Any) -> Any:
        return {kind: near if kind == _SLIDING else full for kind in self._kinds} if self._kinds else near

    def _form(self, visible: torch.Tensor) -> torch.Tensor:
        mask = visible[:, None]
        if self._additive is None:
            return mask
        zeros = torch.zeros(mask.shape, dtype=self._additive, device=mask.device)
        return zeros.masked_fill(~mask, torch.finfo(self._additive).min)
