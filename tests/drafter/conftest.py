"""A fixture for fp8: on a CPU its products take operands that a GPU refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch


@pytest.fixture
def as_on_cuda() -> Iterator[list[tuple[int, int, int]]]:
    """The sizes m, n, k of each product, which must be laid out and aligned as a GPU's tensor cores want it."""
    product, seen = torch._scaled_mm, []

    def checked(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        (m, k), n = left.shape, right.shape[1]
        seen.append((m, n, k))
        assert left.is_contiguous(), (left.shape, left.stride())
        assert right.t().is_contiguous(), (right.shape, right.stride())
        assert k % 16 == n % 16 == 0, (m, n, k)
        assert all(
            options[name].numel() == 1 and options[name].dtype == torch.float32 for name in ("scale_a", "scale_b")
        )
        return product(left, right, **options)

    with mock.patch("torch._scaled_mm", checked):
        yield seen
    assert seen, "nothing was multiplied in fp8"
