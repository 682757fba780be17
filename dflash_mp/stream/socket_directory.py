"""The directory that a run's ipc sockets lie in by default: gone when the last of them is.

A directory that the user named in `feed.endpoints` is never removed, nor is one that still holds a socket.
"""

from __future__ import annotations

import contextlib

from dflash_mp.config import RunConfig
from dflash_mp.stream.endpoints import ipc_path


def remove_if_empty(config: RunConfig) -> None:
    """Remove the run's own socket directory, unless some feeder still uses it."""
    if config.feed.endpoints:
        return
    for path in map(ipc_path, config.feeder_endpoints()):
        if path is not None:
            with contextlib.suppress(OSError):  # not empty, or gone already: both are fine
                path.parent.rmdir()
