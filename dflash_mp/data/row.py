"""A row of tokens: the unit of storage, of the target's forward pass, and of training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TokenRow:
    """`T` tokens of one or more packed documents, padded at the end.

    All arrays are of length `T`. Documents are numbered 1, 2, … in order of appearance; padding is document 0. Positions restart
    at 0 in each document (and in the padding). `loss_mask` is 1 on supervised (assistant) tokens.
    """

    input_ids: npt.NDArray[np.int32]
    position_ids: npt.NDArray[np.int32]
    document_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
