"""Keeps the memory of received messages from going back to the kernel after each: mapping it anew costs more than filling it.

libzmq allocates every message. glibc returns large blocks, and free memory above a limit that adapts, to the kernel; a stream of 4 MiB chunks
makes it do so over and over. This sets the two limits to the largest values that glibc would adapt them to: at most 64 MiB stay
with the process. It's a setting of the whole process, and does nothing with another allocator.
"""

from __future__ import annotations

import ctypes
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)


@cache
def keep_message_memory() -> bool:
    """Whether the limits could be set. Calls after the first do nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return mallopt(_MMAP_THRESHOLD, 32 << 20) == 1 and mallopt(_TRIM_THRESHOLD, 64 << 20) == 1
