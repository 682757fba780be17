"""The blocks that a row trains: which tokens are anchors, and each block's inputs, labels and positions.

The anchors of a row are a function of its tokens, the run's seed and the row's ordinal, and of nothing else: not of the rank, the step, the
device or a library's version (Philox bits and a stable sort). A row always gives `N` blocks, so that shapes never change; those for which it has
no anchor are unused: `keep` is false and no slot is scored. Cost: O(T log T) on the CPU per row, and one copy to the device per micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from dflash_mp.drafter.attention import NO_DOCUMENT, BlockLayout
from dflash_mp.stream.layout import RowTensors

_HEAD = 2  # columns of `Blocks.packed` before the slots: anchor, document


@dataclass(frozen=True)
class Blocks:
    """`N` blocks of `B` slots for each of `b` rows, in one int32 tensor, so that one copy moves them to a device.

    Properties are views. An unused block has anchor 0, document `NO_DOCUMENT`, mask tokens as inputs and no scored slot.
    """

    packed: torch.Tensor  # int32 [b, N, 2 + 4·B]: anchor, document, then B each of inputs, labels, positions, scored
    supervised: int  # supervised tokens of the rows
    covered: int  # of those, tokens that are a scored label of some block

    @property
    def block_size(self) -> int:
        return (self.packed.shape[2] - _HEAD) // 4

    @property
    def anchors(self) -> torch.Tensor:
        """[b, N] row index of the anchor, ascending over a row's used blocks, which come first."""
        return self.packed[:, :, 0]

    @property
    def documents(self) -> torch.Tensor:
        """[b, N] document of the anchor."""
        return self.packed[:, :, 1]

    @property
    def keep(self) -> torch.Tensor:
        """Bool [b, N]: the block is used."""
        return self.documents != NO_DOCUMENT

    @property
    def input_ids(self) -> torch.Tensor:
        """[b, N, B]: the anchor's token, then mask tokens."""
        return self._slots(0)

    @property
    def labels(self) -> torch.Tensor:
        """[b, N, B]: the token at anchor + slot; 0 where there is none."""
        return self._slots(1)

    @property
    def positions(self) -> torch.Tensor:
        """[b, N, B] position in the document: the anchor's plus the slot."""
        return self._slots(2)

    @property
    def scored(self) -> torch.Tensor:
        """Bool [b, N, B]: the slot is predicted and its label is supervised, in the row and in the anchor's document."""
        return self._slots(3) != 0

    def to(self, device: torch.device | str) -> Blocks:
        """The same blocks on `device`."""
        return replace(self, packed=self.packed.to(device, non_blocking=True))

    def layout(self, documents: torch.Tensor) -> BlockLayout:
        """What the mask builders need; `documents` [b, T] are the rows' document ids, on the blocks' device."""
        return BlockLayout(documents, self.anchors, self.documents, self.block_size)

    def _slots(self, part: int) -> torch.Tensor:
        size = self.block_size
        return self.packed[:, :, _HEAD + part * size : _HEAD + (part + 1) * size]


def make_blocks(
    rows: Sequence[RowTensors],
    ordinals: Sequence[int],
    *,
    seed: int,
    anchors_per_row: int,
    block_size: int,
    mask_token_id: int,
    pin: bool = False,
) -> Blocks:
    """The blocks of a micro-batch of rows (CPU tensors) with these `ordinals`. `pin`: in page-locked memory, for CUDA."""
    shape = (len(rows), anchors_per_row, _HEAD + 4 * block_size)
    packed = torch.empty(shape, dtype=torch.int32, pin_memory=pin)
    supervised = covered = 0
    for out, row, ordinal in zip(packed.numpy(), rows, ordinals, strict=True):
        ids, positions = row.input_ids.numpy(), row.position_ids.numpy()
        documents, loss_mask = row.document_ids.numpy(), row.loss_mask.numpy() != 0
        anchors = draw_anchors(loss_mask, documents, anchors_per_row, seed=seed, ordinal=ordinal)
        labelled = _fill(out, anchors, ids, positions, documents, loss_mask, mask_token_id)
        supervised += int(loss_mask.sum())
        covered += len(np.unique(labelled))
    return Blocks(packed, supervised, covered)


def draw_anchors(
    loss_mask: npt.NDArray[np.bool_],
    documents: npt.NDArray[np.int32],
    count: int,
    *,
    seed: int,
    ordinal: int,
) -> npt.NDArray[np.int64]:
    """At most `count` anchors of a row, ascending, uniformly without replacement from `anchor_candidates`.

    Every token has a random key, a function of (`seed`, `ordinal`, its index); the candidates with the smallest keys are taken. So fewer
    anchors are a subset of more.
    """
    candidates = anchor_candidates(loss_mask, documents)
    keys = np.random.Philox(key=np.array([seed, ordinal], dtype=np.uint64)).random_raw(len(documents))
    order = np.argsort(keys[candidates], kind="stable")
    return np.sort(candidates[order[:count]])


def anchor_candidates(loss_mask: npt.NDArray[np.bool_], documents: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Row indices that may be anchors: supervised, followed by a supervised token of the same document."""
    here, following = slice(None, -1), slice(1, None)
    same = (documents[here] == documents[following]) & (documents[here] > 0)
    return np.flatnonzero(loss_mask[here] & loss_mask[following] & same)


def _fill(
    out: npt.NDArray[np.int32],
    anchors: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    documents: npt.NDArray[np.int32],
    loss_mask: npt.NDArray[np.bool_],
    mask_token_id: int,
) -> npt.NDArray[np.int64]:
    """Write the blocks of one row into `out` [N, 2 + 4·B]; returns the row indices of all scored labels."""
    used = len(anchors)
    slots = np.arange((out.shape[1] - _HEAD) // 4)
    inputs, labels, places, scored = np.split(out[:, _HEAD:], 4, axis=1)
    out[:, 0], out[:, 1] = 0, NO_DOCUMENT
    inputs[:], labels[:], places[:], scored[:] = mask_token_id, 0, slots, 0

    at = anchors[:, None] + slots
    inside = at < len(ids)
    at = np.minimum(at, len(ids) - 1)
    in_document = inside & (documents[at] == documents[anchors, None])
    out[:used, 0], out[:used, 1] = anchors, documents[anchors]
    inputs[:used, 0] = ids[anchors]
    labels[:used] = np.where(in_document, ids[at], 0)
    places[:used] = positions[anchors, None] + slots
    scored[:used] = in_document & loss_mask[at] & (slots > 0)
    return at[scored[:used] != 0]
