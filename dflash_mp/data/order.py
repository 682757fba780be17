"""The order of rows: a stateless, seeded permutation.

Row `n` of a run is dataset row `dataset_row(n)`: epoch `n // rows` visits every row once, in an order keyed by (seed, epoch). The
permutation is a four-round Feistel network with cycle walking, so any ordinal is found in O(1) without storing the order, and it
is the same on every machine and library version.
"""

from __future__ import annotations

import struct

import xxhash


def dataset_row(ordinal: int, rows: int, seed: int) -> int:
    """Index in `range(rows)` of the dataset's row that is number `ordinal` (≥ 0) of the run with this `seed`."""
    epoch, place = divmod(ordinal, rows)
    half = max(1, ((rows - 1).bit_length() + 1) // 2)
    while True:
        place = _feistel(place, half, seed, epoch)
        if place < rows:
            return place


def _feistel(value: int, half_bits: int, seed: int, epoch: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_number in range(4):
        digest = xxhash.xxh3_64_intdigest(struct.pack("<QQQB", seed, epoch, right, round_number))
        left, right = right, left ^ (digest & mask)
    return left << half_bits | right
