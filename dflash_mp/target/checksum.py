"""A checksum of a model's weights: two feeders with equal checksums compute with equal numbers.

XXH3-128 over name, dtype, shape and bytes of every parameter, in the order of names: 16 GB/s in main memory; from a GPU the bytes come
over in pinned chunks of 64 MiB. It finds a different model, revision or dtype and damaged files; it is no protection against forgery.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from xxhash import xxh3_128

_CHUNK = 1 << 26  # bytes copied from a device at a time


def weights_checksum(parts: dict[str, nn.Module]) -> str:
    """Hex digest over the parameters of `parts` (name → module). Shared parameters count once, under their first name."""
    digest, seen = xxh3_128(), set()
    staging: torch.Tensor | None = None
    for part, name, parameter in _parameters(parts):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        digest.update(f"{part}.{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        flat = parameter.detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.device.type == "cpu":
            digest.update(flat.numpy().data)
            continue
        if staging is None:
            staging = torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=flat.device.type == "cuda")
        for chunk in flat.split(_CHUNK):
            digest.update(staging[: len(chunk)].copy_(chunk).numpy().data)
    return digest.hexdigest()


def _parameters(parts: dict[str, nn.Module]) -> Iterator[tuple[str, str, nn.Parameter]]:
    for part in sorted(parts):
        for name, parameter in sorted(parts[part].named_parameters(), key=lambda item: item[0]):
            yield part, name, parameter
