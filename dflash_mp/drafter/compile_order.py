"""The ranks of a machine don't compile the same thing at the same time: one goes first, the others find its code in the cache.

Which one goes first changes no result. In a world of one there is nothing to wait for.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable

import torch

from dflash_mp.drafter.world import World

log = logging.getLogger(__name__)

_WAIT_SECONDS = 600.0
_LOOK_SECONDS = 0.05


def one_first(world: World, compile_here: Callable[[], object], wait_seconds: float = _WAIT_SECONDS) -> None:
    """Call `compile_here` on one rank of this machine, and return on all of them when it has; after `wait_seconds`, with a warning, also
    before. `compile_here` must need no other rank.
    """
    if world.store is None or world.local_size == 1:
        return
    if world.device.type == "cuda" and torch.cuda.device_count() > 1:
        return  # code is kept by the device's number: another rank's is of no use unless each sees its own as number 0
    here = f"dflash-mp/compiled/{os.environ.get('GROUP_RANK', '0')}/{socket.gethostname()}"
    if world.store.add(f"{here}/ranks", 1) == 1:
        compile_here()
        world.store.set(here, "")
        return
    deadline = time.monotonic() + wait_seconds
    while not world.store.check([here]):
        if time.monotonic() > deadline:
            log.warning("another rank of this machine compiles for more than %g s: this one begins, too", wait_seconds)
            return
        time.sleep(_LOOK_SECONDS)
