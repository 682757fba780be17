"""What a drafter is trained for: draft all blocks of some rows at once, and score them with the target's frozen head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from dflash_mp.config import TrainConfig
from dflash_mp.drafter import attention, fp8_products
from dflash_mp.drafter.batch import MicroBatch
from dflash_mp.drafter.fp8_head import ScaledHead
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.loss import BlockLoss, block_loss, dpace_loss, slot_weights, teacher_states
from dflash_mp.drafter.model import embed
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.errors import ConfigError

MaskBuilder = Callable[[attention.BlockLayout], attention.AttentionMask]


@dataclass(frozen=True)
class Objective:
    """The frozen side of the loss, on the rank's device and in the dtype of the drafter's computation."""

    shape: DrafterShape
    embedding: torch.Tensor  # the target's, [V, H]
    head: torch.Tensor  # the target's, [V, H]; the same tensor when they are tied
    build_mask: MaskBuilder
    slot_weights: torch.Tensor  # float32 [B]
    compiled: bool  # fuse what lies between the head's two products
    kind: Literal["decay", "dpace", "distill"]
    dpace_alpha: float
    scaled_head: ScaledHead | None  # the head in fp8

    @staticmethod
    def of(
        shape: DrafterShape,
        embedding: torch.Tensor,
        head: torch.Tensor,
        options: TrainConfig,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Objective:
        """Move the target's `embedding` and `head` to `device` and `dtype`, and choose the mask. Raises `ConfigError`.

        With `train.precision: fp8` the head is rounded, too, if its hidden size allows it.
        """
        embedding, head = on_device(embedding, head, device, dtype)
        in_fp8 = options.precision == "fp8" and shape.hidden_size % fp8_products.MULTIPLE == 0
        return Objective(
            shape,
            embedding,
            head,
            mask_builder(options, device),
            slot_weights(shape.block_size, options.loss_gamma, device),
            compiles(options, device),
            options.objective,
            options.dpace_alpha,
            ScaledHead.of(head) if in_fp8 else None,
        )

    def loss(self, model: nn.Module, batch: MicroBatch) -> BlockLoss:
        """The loss sums of a micro-batch under `model` (the drafter, plain or wrapped).

        `weight` is what the gradients are divided by: Σ slot weights, or for D-PACE, whose weights move, the number of blocks. Without gradients nothing
        is multiplied in fp8: what is measured then is the drafter that is exported, under the target's own head.
        """
        blocks = batch.blocks
        noise = embed(blocks.input_ids.flatten(1), self.embedding, self.shape.embedding_scale)
        mask = self.build_mask(blocks.layout(batch.documents))
        hidden = model(batch.features, noise, batch.positions, blocks.positions.flatten(1), mask)
        head = FrozenHead(
            self.head,
            self.shape.logit_scale,
            self.shape.logit_softcap,
            self.compiled,
            scaled=self.scaled_head if torch.is_grad_enabled() else None,
        )
        if self.kind == "dpace":
            return dpace_loss(hidden, head, blocks.labels, blocks.scored, self.dpace_alpha)
        teacher = self._teacher(batch) if self.kind == "distill" else None
        return block_loss(hidden, head, blocks.labels, blocks.scored * self.slot_weights, teacher)

    def _teacher(self, batch: MicroBatch) -> torch.Tensor:
        if batch.last_hidden is None:
            raise ConfigError(
                "train.objective distill needs the target's last hidden state, which the feeders don't send",
                "start the feeders with the same train.objective",
            )
        return teacher_states(batch.last_hidden, batch.blocks.anchors, self.shape.block_size)


def on_device(
    embedding: torch.Tensor, head: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's `embedding` and `head` moved and cast; one tensor stays one. Nothing is done to what is there already."""
    tied = embedding is head
    embedding = embedding.to(device, dtype)
    return embedding, embedding if tied else head.to(device, dtype)


def compiles(options: TrainConfig, device: torch.device) -> bool:
    """Whether the drafter's layers and loss are compiled: as configured, else on CUDA only."""
    return device.type == "cuda" if options.compile is None else options.compile


def mask_builder(options: TrainConfig, device: torch.device) -> MaskBuilder:
    """The mask that `train.attention` means on this device. Raises `ConfigError` for flex attention on a CPU."""
    on_cuda = device.type == "cuda"
    if options.attention == "flex" and not on_cuda:
        raise ConfigError("train.attention flex needs CUDA: it has no backward pass on a CPU", "set it to auto or sdpa")
    if not on_cuda:
        return attention.blockwise_mask
    return attention.dense_mask if options.attention == "sdpa" else attention.flex_mask
