"""Copies a chunk and takes its checksum on the way: piece by piece, so that the checksum reads what a core's own cache still has.

A checksum of memory that has left the cache costs as much as a copy. Neither step lets another thread of this process run, so a chunk
doesn't wait for its turn between its pieces (several milliseconds each, beside a thread that computes in Python); its callers wait
for messages between chunks, which does.
"""

from __future__ import annotations

import xxhash

PIECE_BYTES = 64 << 10


def copy_summed(source: memoryview, to: memoryview, digest: xxhash.xxh3_64 | None) -> None:
    """Copy `source` to `to`, both of as many bytes (format B); a `digest` takes in what is in `to` then."""
    for start in range(0, len(to), PIECE_BYTES):
        piece = to[start : start + PIECE_BYTES]
        piece[:] = source[start : start + PIECE_BYTES]
        if digest is not None:
            digest.update(piece)
