"""A row of tokens: the unit of storage, of the target's forward pass, and of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


class RowKey(NamedTuple):
    """Names a row of a run: ordinals of `train` go on through the epochs, those of `held_out` are stored rows."""

    split: Split
    ordinal: int

    def __str__(self) -> str:
        return f"{self.split} row {self.ordinal}"


@dataclass(frozen=True)
class TokenRow:
    """`T` tokens of one or more packed documents, padded at the end.

    All arrays are of length `T`. Documents are numbered 1, 2, … in order of appearance; padding is document 0.
    Positions restart at 0 in each document (and in the padding). `loss_mask` is 1 on supervised (assistant) tokens.
    """

    input_ids: npt.NDArray[np.int32]
    position_ids: npt.NDArray[np.int32]
    document_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
