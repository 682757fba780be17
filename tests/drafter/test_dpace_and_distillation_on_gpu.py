"""D-PACE and distillation, compiled and with static shapes, against the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.loss import BlockLoss, block_loss, dpace_loss, slot_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZE, HIDDEN, VOCABULARY = 6, 64, 500


@dataclass
class Material:
    hidden: torch.Tensor
    head: torch.Tensor
    labels: torch.Tensor
    scored: torch.Tensor
    teacher: torch.Tensor

    @staticmethod
    def of(seed: int, device: str) -> Material:
        draw = torch.Generator().manual_seed(seed)
        scored = torch.rand(2, 30, SIZE, generator=draw) < 0.6
        scored[:, :, 0] = False
        return Material(
            torch.randn(2, 30 * SIZE, HIDDEN, generator=draw).to(device).requires_grad_(),
            (0.2 * torch.randn(VOCABULARY, HIDDEN, generator=draw)).to(device),
            torch.randint(0, VOCABULARY, (2, 30, SIZE), generator=draw).to(device),
            scored.to(device),
            torch.randn(2, 30, SIZE - 1, HIDDEN, generator=draw).to(device),
        )

    def losses(self, compiled: bool, softcap: float | None) -> list[BlockLoss]:
        head = FrozenHead(self.head, 0.7, softcap, compiled, chunk=64)
        weights = self.scored * slot_weights(SIZE, device=self.labels.device)
        return [
            dpace_loss(self.hidden, head, self.labels, self.scored, 0.5),
            block_loss(self.hidden, head, self.labels, weights, self.teacher),
        ]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gpu_gives_the_cpu_numbers(compiled: bool, softcap: float | None) -> None:
    for seed in range(3):
        near, far = Material.of(seed, "cuda"), Material.of(seed, "cpu")
        for mine, other in zip(near.losses(compiled, softcap), far.losses(False, softcap), strict=True):
            torch.testing.assert_close(mine.total.cpu(), other.total, atol=1e-3, rtol=1e-4)
            assert torch.equal(mine.correct.cpu(), other.correct)
            (gradient,) = torch.autograd.grad(mine.total, near.hidden)
            (expected,) = torch.autograd.grad(other.total, far.hidden)
            torch.testing.assert_close(gradient.cpu(), expected, atol=2e-4, rtol=2e-3)
