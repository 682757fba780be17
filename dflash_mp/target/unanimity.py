"""Whether all processes that share a target got as far as each other: asked through their store, since a sum would hang if they did not.

Each says once, for each `what`, whether it succeeded. One that hears nothing from another for `ANSWER_SECONDS` raises `TargetError`: that one
waits in a sum which this one will not take part in. Costs a few messages within the machine.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from dflash_mp.errors import TargetError

ANSWER_SECONDS = 240.0  # all start to compile at about the same time; below the ten minutes that a sum may hang


def all_succeeded(what: str, success: bool, device: torch.device) -> bool:
    """Whether every process of the group succeeded in `what`. All call it, at the same point between their passes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a sum that was queued and will never come: no answer
    return ask_all(_get_default_store(), dist.get_rank(), dist.get_world_size(), what, success)


def ask_all(store: dist.Store, rank: int, ways: int, what: str, success: bool, seconds: float = ANSWER_SECONDS) -> bool:
    """As `all_succeeded`, for process `rank` of `ways`, which share `store`."""
    keys = [f"dflash_mp/{what}/{each}" for each in range(ways)]
    store.set(keys[rank], "yes" if success else "no")
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:
        raise TargetError(
            f"of the {ways} processes that share the target, {what} {'succeeded' if success else 'failed'} in process {rank}, "
            f"but some other said nothing about it for {seconds:g} s",
            "set feed.compile: false; what failed is in the lines above, by one of them",
        ) from error
    return all(store.get(key) == b"yes" for key in keys)
