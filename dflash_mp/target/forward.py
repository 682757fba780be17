"""How rows are computed: under which attention, compiled or not, replayed or launched; and what is done where one of these can't be had.

On a CUDA device a row is one pass over its packed documents without a dense mask, rows of the agreed length go through compiled layers,
and that pass is replayed as one CUDA graph. A model that doesn't allow a step gets the next best, with a warning that says what it
costs; processes that share a target agree on it. On a CPU the model's own attention is used, under a dense mask and not compiled, unless the
caller asks otherwise. Layers that carry state from token to token get the documents of a row one by one. `describe` says what is in use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from dflash_mp.errors import DflashError, TargetError
from dflash_mp.target.agreement import TOLERANCE, vector_error
from dflash_mp.target.families import Anatomy, keeps_state
from dflash_mp.target.load import Target
from dflash_mp.target.packed_attention import UnsupportedAttention
from dflash_mp.target.recorded import RecordedRow, waiting_rotary
from dflash_mp.target.trunk import Trunk
from dflash_mp.target.unanimity import all_succeeded

log = logging.getLogger("dflash_mp.feed")
_PROBE = 16  # tokens of each document of the probe
_OWN_ATTENTION = (
    "its own is used, which for packed documents takes a dense mask and as much time as if each token saw the whole row, "
    "or takes them one by one"
)
_FOREVER = (torch.OutOfMemoryError, DflashError)  # what another way to compute a row doesn't cure


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
        self._last_hidden = last_hidden
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
        self._passed = False  # whether `trunk` has computed a row
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
        except _FOREVER:
            raise
        except Exception as error:
            if trunk is not self.trunk or not self._attention_failed(error):
                raise
            self._leave_packed(error)
            final = None
        if final is None:  # out here, what the failed pass has made is freed
            self._each(inputs, out, last)
            return
        self._passed |= trunk is self.trunk
        if last is not None:
            last.copy_(final)

    def _attention_failed(self, error: Exception) -> bool:
        """Whether `error`, of `trunk`, may come from compiling flex attention alone, which each new length of rows does."""
        compiling = isinstance(error, (TorchDynamoException, FailOnRecompileLimitHit))
        return self.trunk.packed and (compiling or not self._passed)

    def _leave_packed(self, error: Exception) -> None:
        """Go on with the model's own attention, if that was left to us and the model is still whole; else raise `TargetError`."""
        target, anatomy = self._target, self._target.anatomy
        what = f"flex attention can't be compiled for {target.info.name}"
        reason = f"{type(error).__name__}: {_short(error)}"
        if target.attention != "auto" or anatomy is None or target.ways > 1:
            raise TargetError(
                f"{what}: {reason}",
                "set target.attention to sdpa, or to eager if the target caps its attention logits",
            ) from error
        log.warning("%s (%s): %s", what, reason, _OWN_ATTENTION)
        self._fast = self._recorded = self._compile_seconds = None
        self.trunk = Trunk(target.info, anatomy, last_hidden=self._last_hidden)
        self.one_pass = self._isolates(self.trunk)

    def _each(self, inputs: torch.Tensor, out: torch.Tensor, last: torch.Tensor | None) -> None:
        """A row that was given as one pass, now that it may take one for each document."""
        spans = [inputs.shape[1]]
        if not self.one_pass:
            spans = torch.unique_consecutive(inputs[2], return_counts=True)[1].tolist()
        lasts = [None] * len(spans) if last is None else last.split(spans)
        for part, features, end in zip(inputs.split(spans, 1), out.split(spans), lasts, strict=True):
            self._pass(part, features, end)

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
                "%s can't have flex attention (%s): %s",
                target.info.name,
                unsupported,
                _OWN_ATTENTION,
            )
            return None

    def _works(self, packed: Trunk) -> bool:
        """Whether it isolates. Raises `UnsupportedAttention` for whatever else the model says to this attention."""
        try:
            return self._isolates(packed)
        except (*_FOREVER, UnsupportedAttention):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {_short(error)}"
            if self._target.ways > 1:  # the other processes may be in the middle of this pass
                raise TargetError(
                    f"{self._target.info.name} failed in flex attention: {reason}", "set target.attention: sdpa"
                ) from error
            raise UnsupportedAttention(reason) from error

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
        failure = None
        try:
            trunk(on_device, features)
        except _FOREVER:
            raise
        except Exception as error:
            failure = f"{type(error).__name__}: {_short(error)}"
        if failure is not None:
            self._stay_uncompiled(failure)
        alike = target.ways == 1 or all_succeeded("compiling the layers", failure is None, target.device)
        if failure is None and not alike:
            self._stay_uncompiled("they can't in another process that shares the target")
        if self._fast is None:
            return
        self._compile_seconds = time.monotonic() - started
        if target.device.type == "cuda" and target.ways == 1:  # sums between devices stay out of graphs
            self._record(trunk, on_device, features)

    def _stay_uncompiled(self, reason: str) -> None:
        self._fast = None
        log.warning(
            "the layers of %s can't be compiled, so each of their operations launches a kernel and moves its data once more: %s",
            self._target.info.name,
            reason,
        )

    def _record(self, trunk: Trunk, inputs: torch.Tensor, features: torch.Tensor) -> None:
        reason = None
        if (rotary := waiting_rotary(trunk.module)) is not None:
            reason = f"its rotary embedding ({rotary}) waits for the highest position of each row"
        else:
            try:
                self._recorded = RecordedRow(trunk, inputs, features)
            except _FOREVER:
                raise
            except Exception as error:
                # The recording's end only says that something was wrong before.
                reason = _short(error.__context__ or error)
        if reason is not None:
            log.warning(
                "a row of %s can't be recorded as a CUDA graph, so the CPU launches its kernels one by one: %s",
                self._target.info.name,
                reason,
            )


def _pays(device: torch.device) -> bool:
    """Whether packed attention and compiling are worth it: kernels for a CPU form all scores, and gain little from being compiled."""
    return device.type == "cuda"


def _short(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:600]
