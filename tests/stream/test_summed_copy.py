"""Copying a chunk and its checksum."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from dflash_mp.stream.summed_copy import PIECE_BYTES, copy_summed


@pytest.mark.parametrize("nbytes", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 7])
def test_all_bytes_are_copied_and_summed(nbytes: int) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).tobytes()
    to, digest = bytearray(nbytes), xxhash.xxh3_64(b"before")
    copy_summed(memoryview(source), memoryview(to), digest)
    assert to == source
    assert digest.intdigest() == xxhash.xxh3_64_intdigest(b"before" + source)
    to = bytearray(nbytes)
    copy_summed(memoryview(source), memoryview(to), None)
    assert to == source
