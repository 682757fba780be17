"""Up to where rotary embeddings are the same whatever else is computed beside a text.

The frequencies of two kinds, `dynamic` and `longrope`, follow from the highest position of a whole forward pass: beyond a length one text
would change those of its neighbours, whose stored keys keep the old ones. Up to that length they are like all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def steady_positions(config: Any) -> int | None:
    """How long texts side by side may become, from a transformers text model's `config`; None: as long as it says, 0: not known."""
    return min((limit for each in _parameters(config) if (limit := _limit(config, each)) is not None), default=None)


def _parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """Of all layers, or of each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None) or {}
        yield found
        yield from (each for each in found.values() if isinstance(each, Mapping))


def _limit(config: Any, parameters: Mapping[str, Any]) -> int | None:
    kind = str(parameters.get("rope_type") or parameters.get("type") or "")
    if kind in ("longrope", "su"):
        name = "original_max_position_embeddings"
        return int(parameters.get(name) or getattr(config, name, None) or 0)
    return int(getattr(config, "max_position_embeddings", None) or 0) if "dynamic" in kind else None
