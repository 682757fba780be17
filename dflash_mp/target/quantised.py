"""A target's rows in fp8: hidden states are quantised where they were computed, so that half as many bytes leave the device.

Costs memory for a row's hidden states on that device, kept, and a few passes over them. A row whose hidden states aren't all finite is a
`TargetError` that names row, token and layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_mp.data.row import RowKey, TokenRow
from dflash_mp.errors import TargetError
from dflash_mp.stream.arrival import Arrival
from dflash_mp.stream.fp8_rows import not_finite, quantise
from dflash_mp.stream.layout import RowTensors
from dflash_mp.target.capture import Capture


class QuantisedCapture:
    """Hidden states of rows of `row_tokens` tokens, as `capture` taps them. One instance serves one thread at a time."""

    def __init__(self, capture: Capture, row_tokens: int) -> None:
        target = capture.target
        self._capture = capture
        with capture.enough_memory(row_tokens):
            self._features, last = (
                torch.empty(row_tokens, width, dtype=target.embedding.dtype, device=target.device)
                for width in (target.info.feature_width, target.info.hidden_size if capture.last_hidden else 0)
            )
        self._last = last if capture.last_hidden else None

    def start(self, key: RowKey, row: TokenRow, views: RowTensors) -> Arrival:
        """Fill the hidden states and scales of `views`, which has a layout in fp8, as `Capture.start` does.

        The result raises `TargetError` where something isn't finite.
        """
        self._capture.start(row, self._features, self._last)
        with self._capture.enough_memory(len(row.input_ids)), torch.inference_mode():
            moves = self._quantised(self._features, views.features, views.feature_scales)
            if self._last is not None:
                moves += self._quantised(self._last, views.last_hidden, views.last_scales)
            return _Finite(self._capture.carry(moves), key, views, self._capture.target.info.layer_ids)

    def _quantised(
        self, states: torch.Tensor, values: torch.Tensor | None, scales: torch.Tensor | None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`states` as values and scales on the target's device, each with where it belongs."""
        if values is None or scales is None:
            raise ValueError("the row's layout is not the capture's: it is not in fp8, or lacks the last hidden state")
        near_values, near_scales = self._capture.near(values), self._capture.near(scales)
        quantise(states, near_values, near_scales)
        return [(near_values, values), (near_scales, scales)]


@dataclass(frozen=True)
class _Finite:
    """`arrival` of the row `key`, and the certainty that all of it is finite."""

    arrival: Arrival
    key: RowKey
    views: RowTensors
    layer_ids: tuple[int, ...]

    def query(self) -> bool:
        return self.arrival.query()

    def synchronize(self) -> None:
        self.arrival.synchronize()
        for scales, names in (
            (self.views.feature_scales, [f"the hidden state after layer {layer}" for layer in self.layer_ids]),
            (self.views.last_scales, ["the last hidden state"]),
        ):
            if scales is not None and (where := not_finite(scales)) is not None:
                token, tap = where
                raise TargetError(
                    f"{self.key}: {names[tap]} of its token {token} is not finite",
                    "set target.dtype to bfloat16 or float32 if it is float16; else the target's weights are damaged, or it can't take this text",
                )
