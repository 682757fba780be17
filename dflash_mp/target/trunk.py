"""The decoder up to the last tapped layer: one row in, the tapped layers' outputs into the caller's buffer.

It shares its parameters with the model and nothing else: modules, hooks and config are its own, so it can attend in another way
(`packed`: `dflash_mp.target.packed_attention`) and have its layers compiled while the model stays as it is. Compiled layers of a kind
share one compilation; a layer that can't be compiled whole raises.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from dflash_mp.errors import TargetError
from dflash_mp.stream.plan import TargetInfo
from dflash_mp.target.families import Anatomy
from dflash_mp.target.packed_attention import PACKED, UnsupportedAttention, documents_of_row


class Trunk:
    """See the module's docstring. `last_hidden`: with all layers and the final norm. `packed` raises `UnsupportedAttention` where the
    model says that it can't; a pass of it does where that shows only then."""

    def __init__(self, info: TargetInfo, anatomy: Anatomy, *, last_hidden: bool = False, packed: bool = False) -> None:
        if packed and not getattr(anatomy.decoder, "_supports_flex_attn", False):
            raise UnsupportedAttention("its attention can't be exchanged")
        self.packed = packed
        self._info = info
        self._multi_axis = "mrope_section" in (getattr(anatomy.config, "rope_parameters", None) or {})
        self._destination: torch.Tensor | None = None
        taps = {layer: index for index, layer in enumerate(info.layer_ids)}
        count = len(anatomy.layers) if last_hidden else max(taps) + 1
        configs: dict[int, Any] = {}
        layers = [_twin(layer, configs, packed) for layer in list(anatomy.layers)[:count]]
        for layer, index in taps.items():
            layers[layer].register_forward_hook(self._tap(index))
        rest = {name: child for name, child in anatomy.decoder._modules.items() if name != anatomy.layers_name}
        self.module = _twin(anatomy.decoder, configs, packed, rest)
        setattr(self.module, anatomy.layers_name, nn.ModuleList(layers))
        self._layers = layers

    def __call__(self, inputs: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
        """Fill `destination` [S, K·H] and return the decoder's output [S, H]. `inputs`: int64 [3, S]: ids, positions, documents.

        A packed trunk keeps the documents apart; another one sequences that restart at position 0, as far as the model does.
        """
        ids, positions, documents = inputs
        place = positions.expand(4, 1, -1) if self._multi_axis else positions[None]
        self._destination = destination
        try:
            with documents_of_row(documents) if self.packed else nullcontext(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
                output = self.module(input_ids=ids[None], position_ids=place, use_cache=False)
        finally:
            self._destination = None
        final: torch.Tensor = output[0][0]
        return final

    def compile_layers(self) -> None:
        """Compile the forward of each layer, hooks left out, at its first pass. Static shapes: rows of another length compile again."""
        for layer in self._layers:
            layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True)

    def _tap(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        hidden = self._info.hidden_size

        def write(module: nn.Module, arguments: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            destination = self._destination
            if destination is None:
                raise RuntimeError("a tapped layer ran outside its trunk")
            if states.shape != (1, destination.shape[0], hidden):
                raise TargetError(
                    f"{self._info.name}: a decoder layer gave {tuple(states.shape)}, not {(1, destination.shape[0], hidden)}",
                    "this family of models can't be tapped; use another target",
                )
            destination[:, index * hidden : (index + 1) * hidden].copy_(states[0])

        return write


def _twin(
    module: Any, configs: dict[int, Any], packed: bool, children: dict[str, nn.Module | None] | None = None
) -> Any:
    """A copy of the tree of `module`, or of it with these `children`, that shares the parameters. `configs`: the copied ones, by id."""
    twin = copy.copy(module)
    inner = module._modules if children is None else children
    twin._modules = {name: child if child is None else _twin(child, configs, packed) for name, child in inner.items()}
    twin._buffers = dict(module._buffers)  # a rotary embedding that grows with the text replaces its own
    for hooks in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        setattr(twin, hooks, OrderedDict(getattr(module, hooks)))
    config = module.__dict__.get("config")
    if packed and hasattr(config, "_attn_implementation"):
        if id(config) not in configs:
            configs[id(config)] = copy.deepcopy(config)
            configs[id(config)]._attn_implementation = PACKED
        twin.config = configs[id(config)]
    return twin
