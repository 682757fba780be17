"""Which decoder layers are tapped.

Layer `i` (0-based) is tapped at its output, `hidden_states[i + 1]` in transformers' numbering: the residual stream after the layer
and before the next one's norm. The last layer is never tapped, because transformers' entry for it comes after the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_mp.errors import TargetError


def default_layer_ids(num_layers: int, taps: int) -> tuple[int, ...]:
    """The `taps` layers that z-lab's formula picks in a target of `num_layers`.

    One tap: the middle. More: evenly from layer 1 to layer `num_layers - 3`, rounded half to even. In a target too shallow for that
    (two taps would coincide or cross) they are spread evenly from layer 0 to the last but one. Raises `TargetError` if even so they don't fit.
    """
    if not 1 <= taps < num_layers:
        raise TargetError(
            f"{taps} taps don't fit a target of {num_layers} layers, whose last layer can't be tapped",
            f"set target.taps to at most {max(1, num_layers - 1)}",
        )
    if taps == 1:
        return (min(num_layers // 2, num_layers - 2),)
    ids = _spread(1, num_layers - 3, taps)
    return ids if list(ids) == sorted(set(ids)) else _spread(0, num_layers - 2, taps)


def choose_layer_ids(num_layers: int, taps: int, configured: Sequence[int] | None) -> tuple[int, ...]:
    """`configured` if given and valid, else the default. Raises `TargetError` for ids out of range or not ascending."""
    if configured is None:
        return default_layer_ids(num_layers, taps)
    ids = tuple(configured)
    if not ids or list(ids) != sorted(set(ids)):
        raise TargetError(f"target.layer_ids {list(ids)} is not strictly ascending", "list each layer once, in order")
    if ids[0] < 0 or ids[-1] >= num_layers - 1:
        raise TargetError(
            f"target.layer_ids {list(ids)} has a layer outside 0…{num_layers - 2} "
            f"(the target has {num_layers} layers; its last one, {num_layers - 1}, can't be tapped)",
            "ids are 0-based decoder layers; leave target.layer_ids out for the default",
        )
    return ids


def _spread(first: int, last: int, count: int) -> tuple[int, ...]:
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))
