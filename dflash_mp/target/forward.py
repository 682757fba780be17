"""How rows are computed: under which attention, compiled or not, replayed or launched; and what is done where one of these can't be had.

On a CUDA device a row is one pass over its packed documents without a dense mask, rows of the agreed length go through compiled layers,
and that pass is replayed as one CUDA graph. A model that doesn't allow a step gets the next best, with a warning that says what it
costs. On a CPU the model's own attention is used, under a dense mask and not compiled, unless the caller asks otherwise. Layers that carry
state from token to token get the documents of a row one by one. `describe` says what is in use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from dflash_mp.errors import TargetError
from dflash_mp.target.agreement import TOLERANCE, vector_error
from dflash_mp.target.families import Anatomy, keeps_state
from dflash_mp.target.load import Target
from dflash_mp.target.packed_attention import UnsupportedAttention
from dflash_mp.target.recorded import RecordedRow
from dflash_mp.target.trunk import Trunk

log = logging.getLogger("dflash_mp.feed")
_PROBE = 16  # tokens of each document of the probe


class RowForward:
    """The forward pass of rows of `target`.

    `row_tokens`: the length of rows that are worth compiling and recording; None: none are. `compiled`: None is on CUDA only; with True on
    CUDA the rows are recorded, too. Raises `TargetError` if the target's configuration insists on packed attention and its model doesn't allow it.
    """

    def __init__(
        self,
        target: Target,
        anatomy: Anatomy,
        *,
        last_hidden: bool = False,
        row_tokens: int | None = None,
        compiled: bool | None = None,
    ) -> None:
        self._target = target
        self._own_attention = str(getattr(anatomy.config, "_attn_implementation", None) or "own")
        packed = self._packed_trunk(anatomy, last_hidden)
        self.trunk = packed or Trunk(target.info, anatomy, last_hidden=last_hidden)
        #: Whether a row is one pass; otherwise each of its documents is one.
        self.one_pass = packed is not None or (not keeps_state(anatomy.config) and self._isolates(self.trunk))
        wanted = _pays(target.device) if compiled is None else compiled
        self._row_tokens = row_tokens if wanted and packed is not None else None
        self._fast: Trunk | None = None
        if self._row_tokens is not None:
            self._fast = Trunk(target.info, anatomy, last_hidden=last_hidden, packed=True)
            self._fast.compile_layers()
        self._compile_seconds: float | None = None
        self._recorded: RecordedRow | None = None
        #: Entered with the inputs of each pass and left when it is queued, for processes that compute it with this one.
        self.together: Callable[[torch.Tensor], AbstractContextManager[None]] = lambda inputs: nullcontext()

    def __call__(self, inputs: torch.Tensor, out: torch.Tensor, last: torch.Tensor | None) -> None:
        """Fill `out` [S, K·H] and `last` [S, H] on the target's device, in inference mode. On CUDA the work is queued on the current stream.

        `inputs`: int64 [3, S] on the CPU: ids, positions, documents. The first row of `row_tokens` tokens compiles and records.
        """
        with self.together(inputs):
            self._pass(inputs, out, last)

    def describe(self) -> str:
        """For the log."""
        if not self.one_pass:
            text = f"documents one by one, {self._own_attention} attention"
        elif not self.trunk.packed:
            text = f"{self._own_attention} attention under a dense mask"
        else:
            text = "flex attention without a dense mask"
        compiled = "not compiled" if self._compile_seconds is None else f"compiled in {self._compile_seconds:.1f} s"
        text += f", layers {compiled}"
        if self._recorded is not None:
            text += ", each row one CUDA graph"
        return text if self._target.ways == 1 else f"{text}, split over {self._target.ways} processes"

    def _pass(self, inputs: torch.Tensor, out: torch.Tensor, last: torch.Tensor | None) -> None:
        if out.device.type == "cuda":
            inputs = inputs.pin_memory()  # from pageable memory the copy would wait for the device
        trunk = self.trunk
        if self._fast is not None and inputs.shape[1] == self._row_tokens:
            if self._compile_seconds is None:
                self._prepare(self._fast, inputs)
            trunk = self._fast or self.trunk
            if self._recorded is not None:
                self._recorded.run(inputs, out, last)
                return
        try:
            final = trunk(inputs.to(out.device, non_blocking=True), out)
        except TorchDynamoException as error:  # of attention alone, where layers are not compiled
            raise TargetError(
                f"flex attention can't be compiled for {self._target.info.name}: {_short(error)}",
                "set target.attention to sdpa, or to eager if the target caps its attention logits",
            ) from error
        if last is not None:
            last.copy_(final)

    def _packed_trunk(self, anatomy: Anatomy, last_hidden: bool) -> Trunk | None:
        """A trunk with packed attention, if it is asked for and the model allows it."""
        target = self._target
        if target.attention != "packed" and not (target.attention == "auto" and _pays(target.device)):
            return None
        try:
            if keeps_state(anatomy.config):
                raise UnsupportedAttention("its layers carry state from token to token")
            trunk = Trunk(target.info, anatomy, last_hidden=last_hidden, packed=True)
            if not self._works(trunk):
                raise UnsupportedAttention("documents of one row see each other all the same")
            return trunk
        except UnsupportedAttention as unsupported:
            if target.attention == "packed":
                raise TargetError(
                    f"{target.info.name} can't have packed attention: {unsupported}", "set target.attention: auto"
                ) from None
            log.warning(
                "%s can't have flex attention (%s): its own is used, which for packed documents takes a dense mask "
                "and as much time as if each token saw the whole row, or takes them one by one",
                target.info.name,
                unsupported,
            )
            return None

    def _works(self, packed: Trunk) -> bool:
        """Whether it isolates. Raises `UnsupportedAttention` for whatever else the model says to this attention."""
        try:
            return self._isolates(packed)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedAttention(f"{type(error).__name__}: {_short(error)}") from error

    def _isolates(self, trunk: Trunk) -> bool:
        """Whether the second of two packed documents stays the same when the first one changes."""
        target = self._target
        dtype, device = target.embedding.dtype, target.device
        tokens = torch.arange(3 * _PROBE) % min(target.info.vocab_size, 1000)
        positions = torch.arange(_PROBE).repeat(2)
        documents = torch.arange(1, 3).repeat_interleave(_PROBE)
        seen = []
        for first in (0, 1):
            ids = torch.cat([tokens[first * _PROBE :][:_PROBE], tokens[2 * _PROBE :]])
            out = torch.empty(2 * _PROBE, target.info.feature_width, dtype=dtype, device=device)
            with torch.inference_mode():
                trunk(torch.stack((ids, positions, documents)).to(device), out)
            seen.append(out[_PROBE:])
        return vector_error(seen[0], seen[1]) <= TOLERANCE[dtype]

    def _prepare(self, trunk: Trunk, inputs: torch.Tensor) -> None:
        """Compile and record, or say why not and go on without."""
        target, started = self._target, time.monotonic()
        shape = (inputs.shape[1], target.info.feature_width)
        features = torch.empty(shape, dtype=target.embedding.dtype, device=target.device)
        on_device = inputs.to(target.device)
        try:
            trunk(on_device, features)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, FailOnRecompileLimitHit) as error:
            self._fast = None
            log.warning(
                "the layers of %s can't be compiled, so each of their operations launches a kernel and moves its data once more: %s",
                target.info.name,
                _short(error),
            )
            return
        self._compile_seconds = time.monotonic() - started
        if target.device.type != "cuda" or target.ways > 1:  # sums between devices stay out of graphs
            return
        try:
            self._recorded = RecordedRow(trunk, on_device, features)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning(
                "a row of %s can't be recorded as a CUDA graph, so the CPU launches its kernels one by one: %s",
                target.info.name,
                _short(error.__context__ or error),  # the recording's end only says that something was wrong before
            )


def _pays(device: torch.device) -> bool:
    """Whether packed attention and compiling are worth it: kernels for a CPU form all scores, and gain little from being compiled."""
    return device.type == "cuda"


def _short(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:600]
