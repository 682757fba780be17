"""Tapping the target: a row of tokens in, the outputs of the tapped layers out.

`Capture` runs the decoder up to the last tapped layer and no further: neither later layers nor the head are computed or, after
`self_check`, kept in memory. Every row is computed alone, in one forward pass of one shape, so its features don't depend on which
rows came before. Documents packed in a row don't see each other (`dflash_mp.target.forward` says by which means); models where they would
(layers that carry state past the masks, such as linear attention, convolution and Mamba; gpt-oss) are found by a probe and get the
documents of a row one by one. Layer outputs are written straight into the caller's buffer, or copied there once from a CUDA graph's.

`self_check` compares all this with the model's own plain forward of each document alone and raises `TargetError` if they differ;
call it once before serving rows. One instance serves one thread at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dflash_mp.data.row import TokenRow
from dflash_mp.errors import TargetError
from dflash_mp.stream.arrival import ARRIVED, Arrival
from dflash_mp.target.agreement import TOLERANCE, vector_error
from dflash_mp.target.families import Anatomy
from dflash_mp.target.forward import RowForward
from dflash_mp.target.load import Target


class Document(NamedTuple):
    """Tokens `start … stop - 1` of a row belong to document `number` (0: padding)."""

    number: int
    start: int
    stop: int


class Capture:
    """Features of rows of `target`, K taps of H values. See the module's docstring.

    `last_hidden`: also run the remaining layers and the final norm, for callers that want the last hidden state.
    `keep_target`: leave the whole model in `target` after `self_check`, for callers that go on to use it.
    `row_tokens`, `compiled`: which rows are worth compiling for, and whether they are compiled: see `RowForward`.
    """

    def __init__(
        self,
        target: Target,
        *,
        last_hidden: bool = False,
        keep_target: bool = False,
        row_tokens: int | None = None,
        compiled: bool | None = None,
    ) -> None:
        anatomy = _whole(target)
        self.target = target
        #: Whether a row's last hidden state is asked for.
        self.last_hidden = last_hidden
        self._keep_target = keep_target
        self._copies = torch.cuda.Stream(target.device) if target.device.type == "cuda" else None
        self.forward = RowForward(target, anatomy, last_hidden=last_hidden, row_tokens=row_tokens, compiled=compiled)

    def capture(self, row: TokenRow, out: torch.Tensor, last: torch.Tensor | None = None) -> None:
        """Fill `out` [T, K·H] with the features of `row`, and `last` [T, H] with the last hidden state if built for it.

        Both must have the target's dtype. The call returns when they are filled; on a CUDA target with both on it, when the work is
        queued on the current stream. Raises `TargetError` for token ids outside the vocabulary and when memory runs out.
        """
        self.start(row, out, last).synchronize()

    def start(self, row: TokenRow, out: torch.Tensor, last: torch.Tensor | None = None) -> Arrival:
        """As `capture`, but `out` and `last` are filled when the result says so. What doesn't lie on the CUDA device of the target is
        gathered there and goes over in one transfer each, on a stream of its own, beside the forward pass of the next row. Where that
        memory is pinned nothing here waits for the device, unless the model's own forward does.
        """
        info = self.target.info
        self._check_buffer(out, (len(row.input_ids), info.feature_width), "out")
        if (last is not None) != self.last_hidden:
            raise ValueError("`last` must be given if, and only if, the capture was built with last_hidden")
        if last is not None:
            self._check_buffer(last, (len(row.input_ids), info.hidden_size), "last")
        inputs = self._inputs(row)
        whole = [Document(0, 0, len(row.input_ids))]
        with self.enough_memory(len(row.input_ids)):
            near, near_last = self.near(out), None if last is None else self.near(last)
            with torch.inference_mode():
                for span in whole if self.forward.one_pass else documents(row.document_ids):
                    part = slice(span.start, span.stop)
                    self.forward(inputs[:, part], near[part], None if near_last is None else near_last[part])
                return self.carry([(near, out), (near_last, last)])

    def near(self, far: torch.Tensor) -> torch.Tensor:
        """`far`, or memory for the same on the target's device."""
        device = self.target.device
        return far if far.device == device else torch.empty_like(far, device=device)

    def carry(self, pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> Arrival:
        """Copy each first tensor into the second if it is another one: on CUDA on a stream of its own, after what the current one has queued."""
        moves = [(near, far) for near, far in pairs if near is not None and far is not None and near is not far]
        if self._copies is None or not moves:
            for near, far in moves:
                far.copy_(near)
            return ARRIVED
        self._copies.wait_stream(torch.cuda.current_stream(self.target.device))
        try:
            with torch.cuda.stream(self._copies):
                for near, far in moves:
                    far.copy_(near, non_blocking=True)
                    near.record_stream(self._copies)
            return self._copies.record_event(torch.cuda.Event(blocking=True))
        except BaseException:
            self._copies.synchronize()  # whoever gets the error may use the buffers again
            raise

    @contextmanager
    def enough_memory(self, tokens: int) -> Iterator[None]:
        """Running out of memory inside, for a row of `tokens` tokens, is a `TargetError` with what to do."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise TargetError(
                f"out of memory on {self.target.device} while computing a row of {tokens} tokens: {error}",
                "prepare the data with a smaller data.row_tokens, or give the target a larger device",
            ) from error

    def self_check(self, row: TokenRow) -> None:
        """Compare the features of `row` with the model's own forward of each of its documents alone; raise `TargetError` if they differ.

        Also compares embedding, head and their scales. Then frees what a capture doesn't need, unless `keep_target`.
        Takes as long as two or three plain forward passes.
        """
        target, info = self.target, self.target.info
        _whole(target)
        device = target.device
        dtype = target.embedding.dtype
        out = torch.empty(len(row.input_ids), info.feature_width, dtype=dtype, device=device)
        last = (
            torch.empty(len(row.input_ids), info.hidden_size, dtype=dtype, device=device) if self.last_hidden else None
        )
        self.capture(row, out, last)
        ids = self._inputs(row)[0].to(device)
        ends_checked = False
        for document in documents(row.document_ids):
            if document.number == 0:
                continue
            part = slice(document.start, document.stop)
            states, logits = _plain_forward(target.model, ids[part], info.name)
            for layer, got in zip(info.layer_ids, out[part].split(info.hidden_size, dim=1), strict=True):
                self._compare(got, states[layer + 1], f"layer {layer}", document.number)
            if last is not None:
                self._compare(last[part], states[-1], "the last hidden state", document.number)
            if not ends_checked:
                self._check_ends(ids[part], states, logits, document.number)
                ends_checked = True
        if not ends_checked:
            raise TargetError("the row given to the self-check holds no document", "prepare the data again")
        if not self._keep_target:
            target.model = target.anatomy = None

    def _inputs(self, row: TokenRow) -> torch.Tensor:
        """Int64 [3, T] on the CPU: ids, positions, documents."""
        ids, rows = row.input_ids, self.target.info.vocab_size
        if ids.min() < 0 or ids.max() >= rows:
            raise TargetError(
                f"a row holds token id {int(ids.max() if ids.max() >= rows else ids.min())}, but the target has {rows} embedding rows",
                "prepare the data again with this target's tokenizer",
            )
        return torch.from_numpy(np.stack((ids, row.position_ids, row.document_ids)).astype(np.int64))

    def _check_buffer(self, buffer: torch.Tensor, shape: tuple[int, int], name: str) -> None:
        if tuple(buffer.shape) != shape or buffer.dtype != self.target.embedding.dtype:
            raise ValueError(
                f"{name} must be {shape} {self.target.embedding.dtype}, not {tuple(buffer.shape)} {buffer.dtype}"
            )

    def _compare(self, got: torch.Tensor, want: torch.Tensor, what: str, document: int) -> None:
        error, tolerance = vector_error(got, want), TOLERANCE[self.target.embedding.dtype]
        if error <= tolerance:  # false for NaN
            return
        remedy = "this family of models can't be used as a target by this version; use another one, or report it"
        if not bool(torch.isfinite(want).all()):
            remedy = "the model's own forward overflows: set target.dtype to bfloat16 or float32"
        raise TargetError(
            f"{self.target.info.name} failed its self-check: {what} of document {document} differs from the model's own forward "
            f"by {error:.2g} of a token's vector (allowed {tolerance:g}; largest difference of a value "
            f"{float((got.float() - want.float()).abs().max()):.3g})",
            remedy,
        )

    def _check_ends(self, ids: torch.Tensor, states: Any, logits: torch.Tensor, document: int) -> None:
        target, info = self.target, self.target.info
        with torch.inference_mode():
            self._compare(target.embedding[ids] * info.embedding_scale, states[0], "the embedding", document)
            ours = nn.functional.linear(states[-1][-1:], target.head) * info.logit_scale
            if info.logit_softcap is not None:
                ours = info.logit_softcap * torch.tanh(ours / info.logit_softcap)
            self._compare(ours, logits[-1:], "the head's logits", document)


def documents(document_ids: npt.NDArray[np.int32]) -> Iterator[Document]:
    """The runs of equal ids in `document_ids` [T], in order."""
    starts = [0, *(np.flatnonzero(np.diff(document_ids)) + 1).tolist()]
    for start, stop in zip(starts, [*starts[1:], len(document_ids)], strict=True):
        yield Document(int(document_ids[start]), start, stop)


def _whole(target: Target) -> Anatomy:
    if target.model is None or target.anatomy is None:
        raise RuntimeError(
            "this target was cut by an earlier capture; load it again, or build that one with keep_target"
        )
    return target.anatomy


def _plain_forward(model: Any, ids: torch.Tensor, name: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The model's own forward of `ids` [S] alone: hidden states (each [S, H]) and logits ([S, V], or of the last token only)."""
    arguments: dict[str, Any] = {"input_ids": ids[None], "output_hidden_states": True, "use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1
    with torch.inference_mode():
        output = model(**arguments)
    if output.hidden_states is None:
        raise TargetError(
            f"{name}: its forward returns no hidden states, so taps can't be checked", "use another target"
        )
    return [state[0] for state in output.hidden_states], output.logits[0]
