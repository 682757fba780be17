"""Copies a chunk and takes its checksum on the way: piece by piece, so that the checksum reads what a core's own cache still has.

A checksum of memory that has left the cache costs as much as a copy. Other threads may run while a piece is copied, not while its checksum is taken.
"""

from __future__ import annotations

import numpy
import xxhash

PIECE_BYTES = 512 << 10  # two of them fit the second-level cache of a server's core


def copy_summed(source: memoryview, to: memoryview, digest: xxhash.xxh3_64 | None) -> None:
    """Copy `source` to `to`, both of as many bytes; a `digest` takes in what is in `to` then."""
    of, into = numpy.frombuffer(source, numpy.uint8), numpy.frombuffer(to, numpy.uint8)
    for start in range(0, len(into), PIECE_BYTES):
        piece = into[start : start + PIECE_BYTES]
        numpy.copyto(piece, of[start : start + PIECE_BYTES])
        if digest is not None:
            digest.update(piece.data)
