"""The target as a verifier: it reads tokens into a KV cache, says what it would have written after each, and can take tokens back.

`read` returns logits and the tapped features of the tokens read, the same values as `hidden_states[id + 1]`, by forward hooks, so that no other
layer's output is kept. `keep` drops what was read in vain. Targets whose memory of the text isn't a list of tokens (linear
attention, state-space layers) can't take anything back: they are refused before any text is read.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from dflash_mp.errors import TargetError
from dflash_mp.target.load import Target


class Verifier:
    """One text at a time: `start` forgets the last one. `model` is a transformers causal LM, `layers` its decoder layers."""

    def __init__(self, model: Any, layers: Sequence[nn.Module], layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        self.length = 0  # tokens held
        self._model = model
        self._tapped = [layers[i] for i in layer_ids]
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        if self._cache_argument not in parameters:
            raise TargetError(
                f"{type(model).__name__} doesn't take a KV cache, which decoding needs",
                "use a transformer as the target",
            )
        self.start()

    @staticmethod
    def of(target: Target, layer_ids: Sequence[int]) -> Verifier:
        """The verifier of a loaded target, tapped at `layer_ids` (those of the drafter; none for plain decoding)."""
        if target.anatomy is None:
            raise ValueError("the target's model was freed")
        return Verifier(target.model, list(target.anatomy.layers), layer_ids)

    def start(self) -> None:
        """Forget all text. Raises `TargetError` if the target could not take tokens back."""
        cache = DynamicCache(config=self._model.config)
        if any(hasattr(layer, "recurrent_states") or not hasattr(layer, "crop") for layer in cache.layers):
            raise TargetError(
                f"{type(self._model).__name__} has layers with a recurrent state, which can't take rejected tokens back",
                "training and export work; measure its drafter with a server that restores such states (vLLM, SGLang)",
            )
        cache.activate_past_recording()  # else a sliding window forgets what a rejected block pushed out
        self._cache, self.length = cache, 0

    @torch.no_grad()
    def read(
        self, tokens: torch.Tensor, *, last_only: bool = False, taps: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read `tokens` [n] after what is held: logits [n, V] (or of the last token, [1, V]) and features [1, n, K·H].

        Without `taps` the features are [1, n, 0].
        """
        count = tokens.shape[0]
        positions = torch.arange(self.length, self.length + count, device=tokens.device)
        with self._taps(taps) as taken:
            output = self._model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
                **{self._cache_argument: self._cache},
            )
        self.length += count
        features = torch.cat(taken, -1) if taken else output.logits.new_empty(1, count, 0)
        return output.logits[0], features

    def keep(self, length: int) -> None:
        """Hold the first `length` tokens only; must follow each `read`."""
        self._cache.crop(length - self.length)
        self.length = length

    @contextlib.contextmanager
    def _taps(self, wanted: bool) -> Iterator[list[torch.Tensor]]:
        taken: list[torch.Tensor] = []

        def take(layer: nn.Module, inputs: Any, output: Any) -> None:
            taken.append(output if isinstance(output, torch.Tensor) else output[0])

        handles = [layer.register_forward_hook(take) for layer in self._tapped] if wanted else []
        try:
            yield taken
        finally:
            for handle in handles:
                handle.remove()
