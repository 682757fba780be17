"""Tapping the target: a row of tokens in, the outputs of the tapped layers out.

`Capture` runs the decoder up to the last tapped layer and no further: neither later layers nor the head are computed or, after
`self_check`, kept in memory. Every row is computed alone, in one forward pass of one shape, so its features don't depend on which
rows came before. Documents packed in a row don't see each other: positions restart in each, and transformers' masks (full, sliding or
chunked) separate sequences where positions restart. Models that don't (layers that carry state past the masks, such as linear
attention, convolution and Mamba; gpt-oss) are found by a probe and get the documents of a row one by one. Layer outputs are written straight into the caller's buffer: one copy of the features is made.

`self_check` compares all this with the model's own plain forward of each document alone and raises `TargetError` if they differ;
call it once before serving rows. One instance serves one thread at a time.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dflash_mp.data.row import TokenRow
from dflash_mp.errors import TargetError
from dflash_mp.stream.arrival import ARRIVED, Arrival
from dflash_mp.target.families import Anatomy, keeps_state
from dflash_mp.target.load import Target

# Largest `_error` that passes. Sound: SmolLM2 1e-6, 3e-4 and 2e-3, an untrained model of 36 layers 0.035 in bfloat16. Tapped one layer
# off, or with a document that sees the one before it: 0.1 to 1.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}


class Document(NamedTuple):
    """Tokens `start … stop - 1` of a row belong to document `number` (0: padding)."""

    number: int
    start: int
    stop: int


class Capture:
    """Features of rows of `target`, K taps of H values. See the module's docstring.

    `last_hidden`: also run the remaining layers and the final norm, for callers that want the last hidden state.
    `keep_target`: leave the whole model in `target` after `self_check`, for callers that go on to use it.
    """

    def __init__(self, target: Target, *, last_hidden: bool = False, keep_target: bool = False) -> None:
        anatomy = _whole(target)
        self.target = target
        #: Whether a row's last hidden state is asked for.
        self.last_hidden = last_hidden
        self._keep_target = keep_target
        self._multi_axis = "mrope_section" in (getattr(anatomy.config, "rope_parameters", None) or {})
        self._destination: torch.Tensor | None = None
        self._copies = torch.cuda.Stream(target.device) if target.device.type == "cuda" else None
        self._trunk = self._build_trunk(anatomy)
        #: Whether a row is one forward pass; otherwise each of its documents is one.
        self.packed = not keeps_state(anatomy.config) and self._isolates()

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
        ids, positions = self._inputs(row)
        spans = [Document(0, 0, len(row.input_ids))] if self.packed else list(documents(row.document_ids))
        with self.enough_memory(row):
            near, near_last = self.near(out), None if last is None else self.near(last)
            with torch.inference_mode():
                for span in spans:
                    part = slice(span.start, span.stop)
                    final = self._forward(ids[part], positions[part], near[part])
                    if near_last is not None:
                        near_last[part].copy_(final)
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
    def enough_memory(self, row: TokenRow) -> Iterator[None]:
        """Running out of memory inside is a `TargetError` with what to do."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise TargetError(
                f"out of memory on {self.target.device} while computing a row of {len(row.input_ids)} tokens: {error}",
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
        ids, _ = self._inputs(row)
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

    def _build_trunk(self, anatomy: Anatomy) -> nn.Module:
        """The decoder again, sharing its parameters, with hooks on the tapped layers and without those behind the last of them."""
        taps = {layer: index for index, layer in enumerate(self.target.info.layer_ids)}
        count = len(anatomy.layers) if self.last_hidden else max(taps) + 1
        layers = []
        for number, layer in enumerate(list(anatomy.layers)[:count]):
            if number in taps:
                layer = _twin(layer)
                layer.register_forward_hook(self._tap(taps[number]))
            layers.append(layer)
        trunk = _twin(anatomy.decoder)
        setattr(trunk, anatomy.layers_name, nn.ModuleList(layers))
        return trunk

    def _isolates(self) -> bool:
        """Whether the second of two packed documents stays the same when the first one changes."""
        length, info = 16, self.target.info
        tokens = torch.arange(3 * length) % min(info.vocab_size, 1000)
        positions = torch.arange(length).repeat(2).to(self.target.device)
        seen = []
        for first in (0, 1):
            ids = torch.cat([tokens[first * length :][:length], tokens[2 * length :]]).to(self.target.device)
            out = torch.empty(
                2 * length, info.feature_width, dtype=self.target.embedding.dtype, device=self.target.device
            )
            with torch.inference_mode():
                self._forward(ids, positions, out)
            seen.append(out[length:])
        return _error(seen[0], seen[1]) <= _TOLERANCE[self.target.embedding.dtype]

    def _tap(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        hidden = self.target.info.hidden_size

        def write(module: nn.Module, arguments: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            destination = self._destination
            if destination is None:
                raise RuntimeError("a tapped layer ran outside Capture.capture")
            if states.shape != (1, destination.shape[0], hidden):
                raise TargetError(
                    f"{self.target.info.name}: a decoder layer gave {tuple(states.shape)}, not {(1, destination.shape[0], hidden)}",
                    "this family of models can't be tapped; use another target",
                )
            destination[:, index * hidden : (index + 1) * hidden].copy_(states[0])

        return write

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
        """Fill `destination` [S, K·H]; return the decoder's output [S, H]."""
        place = positions.expand(4, 1, -1) if self._multi_axis else positions[None]
        self._destination = destination
        try:
            output = self._trunk(input_ids=ids[None], position_ids=place, use_cache=False)
        finally:
            self._destination = None
        final: torch.Tensor = output[0][0]
        return final

    def _inputs(self, row: TokenRow) -> tuple[torch.Tensor, torch.Tensor]:
        ids = row.input_ids.astype(np.int64)
        rows = self.target.info.vocab_size
        if ids.min() < 0 or ids.max() >= rows:
            raise TargetError(
                f"a row holds token id {int(ids.max() if ids.max() >= rows else ids.min())}, but the target has {rows} embedding rows",
                "prepare the data again with this target's tokenizer",
            )
        positions = row.position_ids.astype(np.int64)
        return self._on_device(ids), self._on_device(positions)

    def _on_device(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        """On CUDA without waiting for what the device has to do, as a copy from pageable memory would."""
        tensor = torch.from_numpy(numbers)
        if self._copies is None:
            return tensor.to(self.target.device)
        return tensor.pin_memory().to(self.target.device, non_blocking=True)

    def _check_buffer(self, buffer: torch.Tensor, shape: tuple[int, int], name: str) -> None:
        if tuple(buffer.shape) != shape or buffer.dtype != self.target.embedding.dtype:
            raise ValueError(
                f"{name} must be {shape} {self.target.embedding.dtype}, not {tuple(buffer.shape)} {buffer.dtype}"
            )

    def _compare(self, got: torch.Tensor, want: torch.Tensor, what: str, document: int) -> None:
        error, tolerance = _error(got, want), _TOLERANCE[self.target.embedding.dtype]
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


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """How far the vectors of `got` [S, …] are from those of `want`, relative to their length.

    In float32 the worst token's. In half precision, where a token near a tie may go to another expert, the mean over all tokens or,
    if larger, over the first 32, which would see most of a leak.
    """
    relative = (got.float() - want.float()).norm(dim=1) / want.float().norm(dim=1).clamp_min(1e-12)
    if want.dtype == torch.float32 and got.dtype == torch.float32:
        return float(relative.max())
    return max(float(relative.mean()), float(relative[:32].mean()))


def _whole(target: Target) -> Anatomy:
    if target.model is None or target.anatomy is None:
        raise RuntimeError(
            "this target was cut by an earlier capture; load it again, or build that one with keep_target"
        )
    return target.anatomy


def _twin(module: nn.Module) -> nn.Module:
    """A module with the same parameters and submodules whose own hooks and submodules can be changed without touching `module`."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin._forward_hooks = OrderedDict(module._forward_hooks)
    twin._forward_hooks_with_kwargs = OrderedDict(module._forward_hooks_with_kwargs)
    twin._forward_hooks_always_called = OrderedDict(module._forward_hooks_always_called)
    return twin


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
