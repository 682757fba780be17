"""The target writing many texts at once: `fill` slots with prompts, `advance` all of them, `take` the ones that are done.

One forward pass gives every slot its next token, in one of a few fixed shapes; choosing, counting and stopping are done on the device, so that
between two looks at it nothing waits for Python. Slots become free one by one and are filled again. Bounds: memory is
slots × longest text × (keys and values of a token), allocated with the first prompt; a device that lacks it is a `TargetError`.

New tokens attend by `slot_attention` (its docstring has the floor of a step); a model that takes no attention but its own keeps that, with a
notice that says what it costs. On CUDA the forward pass of each shape is recorded once as a CUDA graph; a model that can't be recorded runs
without, with a notice. With the kernel of `slot_attention` there is one shape, otherwise one for each width of the cache that is looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dflash_mp.decode.sampling import Sampling
from dflash_mp.errors import TargetError
from dflash_mp.regenerate.choice import choose
from dflash_mp.regenerate.norms import fusable, fused
from dflash_mp.regenerate.recording import Recorder
from dflash_mp.regenerate.rotary import steady_positions
from dflash_mp.regenerate.slot_attention import Way, head_sizes, obstacle, way_of
from dflash_mp.regenerate.slot_cache import SlotCache, SlotMasks
from dflash_mp.target.load import Target

_WIDTHS = 128  # widths of the cache that are looked at are multiples of this
_PROMPT_LENGTHS = 32  # prompts are padded to multiples of this
_PROMPT_TOKENS = 1 << 15  # of one forward pass
_CHECKED = 640  # tokens that the self-check goes through: several tiles of the kernel, several widths, many a window
# Without cuDNN, which makes a plan for each new shape: prompts have many.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Largest error of a token's logits, relative to their length, between a slot and the model's own forward pass.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class SlotOptions:
    """`slots` texts at once, each of at most `max_new_tokens` after its prompt, up to and including one of `stop_tokens`.

    `own_forward`: by the model's own attention and norms and any backend, to compare with.
    """

    slots: int
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    sampling: Sampling
    cuda_graphs: bool = True
    own_forward: bool = False


class Text(NamedTuple):
    """What slot number `slot` has written; `stopped`: its last token is a stop token, otherwise it was cut."""

    slot: int
    tokens: list[int]
    stopped: bool


class Slots:
    """A loaded target's slots. `say` gets notices."""

    def __init__(self, target: Target, options: SlotOptions, say: Callable[[str], None]) -> None:
        if target.anatomy is None:
            raise ValueError("the target's model was freed")
        self._target, self._options, self._say = target, options, say
        self._config = target.anatomy.config
        self._norms = [] if options.own_forward else fusable(target.anatomy.decoder)
        why_own = "asked for" if options.own_forward else obstacle(target.model, target.anatomy.decoder, self._config)
        self._use(None if why_own else self._best_way(), why_own)
        self._multi_axis = "mrope_section" in (getattr(target.anatomy.config, "rope_parameters", None) or {})
        known = inspect.signature(target.model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"
        self._cache = SlotCache(options.slots, _WIDTHS)
        device, count = target.device, options.slots
        self._tokens, self._positions, self._counts = (
            torch.zeros(count, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._live, self._stopped = (torch.zeros(count, dtype=torch.bool, device=device) for _ in range(2))
        self._written = torch.zeros(count, options.max_new_tokens, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(count, options.max_new_tokens, dtype=torch.float64, device=device)
        self._stops = torch.tensor(sorted(options.stop_tokens), dtype=torch.int64, device=device)
        self._reach = np.zeros(count, np.int64)  # no slot's position is beyond this
        self._occupied = np.zeros(count, np.bool_)
        self._due = np.zeros(count, np.int64)  # the reach at which a slot's text must have ended
        self._steps = Recorder(device) if options.cuda_graphs and device.type == "cuda" else None
        self._cache.positions = self._positions
        self.positions = steady_positions(self._config)
        """How long a text may become; None: as the target says."""

    @property
    def attention(self) -> str:
        """How new tokens attend, for people."""
        if self._way is None:
            return f"the model's own, {self._config._attn_implementation}"
        return "a kernel that reads each text's own places" if self._by_kernel else "grouped heads over all places"

    def free(self) -> list[int]:
        """Slots that hold no text."""
        return np.flatnonzero(~self._occupied).tolist()

    def fill(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]], numbers: Sequence[npt.NDArray[np.float64]]
    ) -> None:
        """Put `prompts` (at least one token each) into free `slots`, each with the random `numbers` [max_new_tokens] of its answer.

        Raises `TargetError` for texts that don't fit `positions`, or the device.
        """
        longest = max(map(len, prompts)) + self._options.max_new_tokens
        self._refuse_beyond_positions(longest)
        self._make_room(longest)
        where = self._put(np.array(slots))
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for group in _groups([(i, len(prompts[i]) - 1) for i in order]):
            self._read([slots[i] for i in group], [prompts[i][:-1] for i in group])
        ends = self._put(np.array([[prompt[-1], len(prompt) - 1] for prompt in prompts]))
        self._tokens[where], self._positions[where] = ends[:, 0], ends[:, 1]
        self._counts[where], self._stopped[where], self._live[where] = 0, False, True
        if not self._options.sampling.greedy:
            self._numbers[where] = self._put(np.stack(numbers))
        self._reach[list(slots)] = [len(prompt) - 1 for prompt in prompts]
        self._due[list(slots)] = self._reach[list(slots)] + self._options.max_new_tokens
        self._occupied[list(slots)] = True

    def advance(self, steps: int) -> None:
        """Write up to `steps` more tokens in every slot; returns before the device is done."""
        for _ in range(steps):
            self._guarded(partial(self._step, self._width()))
            self._reach += 1

    def take(self) -> list[Text]:
        """The texts that are done, whose slots are free from now on; waits for the device. Raises `TargetError` if one ought to have ended."""
        live, counts, stopped = torch.stack((self._live.long(), self._counts, self._stopped.long())).cpu().numpy()
        if (self._occupied & (live != 0) & (self._reach >= self._due)).any():
            raise TargetError(
                f"{self._target.info.name} on {self._target.device}: after {self._options.max_new_tokens} steps a text has fewer tokens",
                "give --no-cuda-graphs, and report it",
            )
        done = np.flatnonzero(self._occupied & (live == 0))
        if not len(done):
            return []
        written = self._written[self._put(done), : int(counts[done].max())].cpu().numpy()
        self._occupied[done] = False
        return [
            Text(int(slot), row[: counts[slot]].tolist(), bool(stopped[slot]))
            for slot, row in zip(done, written, strict=True)
        ]

    def self_check(self, prompt: Sequence[int]) -> None:
        """Compare the logits of the last of `prompt`'s first 640 tokens with the model's own forward pass. Before the first fill.

        What fails is replaced by the model's own; if that fails, too: `TargetError`.
        """
        allowed, ids = _TOLERANCE[self._target.embedding.dtype], list(prompt)[:_CHECKED]
        error, why = self._tried(ids)
        if not error <= allowed and (self._way is not None or self._norms):
            self._norms = []
            self._use(None, why)
            error, _ = self._tried(ids)
        if not error <= allowed:
            raise TargetError(
                f"{self._target.info.name} failed its self-check: with many texts side by side its logits differ from its own forward "
                f"pass by {error:.2g} of their length",
                "serve this target with vLLM or SGLang, and give --server",
            )

    def _tried(self, ids: list[int]) -> tuple[float, str]:
        """`_error`, and what to say if that is too large; NaN where this way of attention can't run."""
        with_this = f"with {self.attention}" + (" and fused norms" if self._norms else "")
        try:
            error = self._error(ids)
        except TargetError:
            raise
        except Exception as problem:  # of any class, as in `way_of`
            if self._way is None:  # nothing is left to take over
                raise
            return float("nan"), f"{with_this}: {type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
        return error, f"{with_this} its logits differed by {error:.2g} of their length"

    def _error(self, ids: list[int]) -> float:
        """The largest error of the logits after one of the last tokens of `ids`, over their length."""
        apart = min(4, len(ids))
        self._make_room(len(ids))
        target = self._target
        with torch.inference_mode():
            whole = self._put(np.array([ids]))
            ask = partial(target.model, input_ids=whole, use_cache=False, logits_to_keep=apart)
            own = self._guarded(ask).logits[0, -apart:]
        if len(ids) > apart:
            self._read([0], [ids[:-apart]])
        self._live[0] = True
        errors = []
        try:
            for place in range(len(ids) - apart, len(ids)):
                self._tokens[0], self._positions[0] = ids[place], place
                logits = self._guarded(lambda: self._logits(self._cache.capacity))[0]
                want = own[place - len(ids)].float()
                errors.append((logits.float() - want).norm() / want.norm())
        finally:
            self._live.zero_()
            self._positions.zero_()
        return float(torch.stack(errors).max())  # NaN if one is

    def _best_way(self) -> Way:
        info, target = self._target.info, self._target
        sizes = head_sizes(self._config, info.head_dim)
        way = way_of(target.device, target.embedding.dtype, info.heads, info.kv_heads, *sizes)
        if way.name != "dflash_kernel" and target.device.type == "cuda":
            self._say(
                f"attention goes without its kernel ({way.why_not}): for every text all places up to the longest one's are read"
            )
        return way

    def _use(self, way: Way | None, why_own: str) -> None:
        """Attend by `way` from now on; None: by the model's own attention."""
        config, info = self._config, self._target.info
        self._way = way
        self._masks = SlotMasks(config, info.name, self._target.embedding.dtype, way.name if way else None)
        if way is None and not self._options.own_forward:
            repeats = info.heads // max(1, info.kv_heads)
            self._say(
                f"{info.name} keeps its own attention ({why_own}): for every text all places up to the longest one's are read"
                + (f", and perhaps copied {repeats} times" if repeats > 1 else "")
            )

    @property
    def _by_kernel(self) -> bool:
        return self._way is not None and self._way.name == "dflash_kernel"

    def _width(self) -> int:
        """Places of the cache that the next step is given."""
        if self._by_kernel:  # which looks at the places of each slot's span only
            return self._cache.capacity
        reach = int(self._reach[self._occupied].max(initial=0)) + 1
        return min(-(-reach // _WIDTHS) * _WIDTHS, self._cache.capacity)

    def _step(self, width: int) -> None:
        if self._steps is not None and width in self._steps:
            self._steps.replay(width)
            return
        self._write(width)  # warms up what recording needs
        if self._steps is not None:
            self._record(self._steps, width)

    def _write(self, width: int) -> None:
        """One token for every slot; changes the slots' state in place and never waits for the device."""
        logits = self._logits(width)
        with torch.inference_mode():
            at = self._counts.clamp_max(self._options.max_new_tokens - 1)[:, None]
            chosen = choose(logits, self._options.sampling, self._numbers.gather(1, at)[:, 0])
            live = self._live
            self._written.scatter_(1, at, torch.where(live[:, None], chosen[:, None], self._written.gather(1, at)))
            stopped = (chosen[:, None] == self._stops).any(-1) & live
            self._counts += live
            self._stopped |= stopped
            self._tokens.copy_(torch.where(live, chosen, self._tokens))
            self._live &= ~stopped & (self._counts < self._options.max_new_tokens)
            self._positions += self._live

    def _logits(self, width: int) -> torch.Tensor:
        """float [slots, V] after each slot's token."""
        self._cache.width = width
        # Slots without a live text look at their first place only: nothing is read for them.
        mask = self._masks.of_tokens(self._positions * self._live, width)
        return self._forward(self._tokens[:, None], self._positions[:, None], mask)[:, -1]

    def _read(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """One forward pass that stores `prompts`; of its logits only the last place's are made, and not used."""
        length = -(-max(map(len, prompts)) // _PROMPT_LENGTHS) * _PROMPT_LENGTHS
        padded = np.zeros((len(prompts), length), np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        device = self._target.device
        self._cache.rows = self._put(np.array(slots))
        # Padding has the last token's place: one beyond it could be one too many for the rotary embeddings.
        places = torch.arange(length, device=device).clamp_max(max(map(len, prompts)) - 1).expand(len(prompts), -1)
        mask = self._masks.of_prompts(length, device)
        try:
            self._guarded(lambda: self._forward(self._put(padded), places, mask))
        finally:
            self._cache.rows = None

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: Any) -> torch.Tensor:
        places = positions.expand(4, -1, -1) if self._multi_axis else positions
        backends = nullcontext() if self._options.own_forward else sdpa_kernel(_BACKENDS)
        with torch.inference_mode(), fused(self._norms), self._attending(), backends:
            output = self._target.model(
                input_ids=ids,
                position_ids=places,
                attention_mask=mask,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: self._cache},
            )
        logits: torch.Tensor = output.logits
        return logits

    @contextmanager
    def _attending(self) -> Iterator[None]:
        before = self._config._attn_implementation
        if self._way is not None:
            self._config._attn_implementation = self._way.name
        try:
            yield
        finally:
            self._config._attn_implementation = before

    def _put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """`array` on the device, without waiting for what the device does."""
        here, device = torch.from_numpy(array), self._target.device
        if device.type != "cuda":
            return here.to(device)
        with self._on_device():
            return here.pin_memory().to(device, non_blocking=True)

    def _on_device(self) -> AbstractContextManager[Any]:
        """The target's device as the current one, for what asks no tensor where to run."""
        device = self._target.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _record(self, steps: Recorder, width: int) -> None:
        try:
            steps.record(width, partial(self._write, width))
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = " ".join(str(error).split())[:200]
            self._say(
                f"this target can't be recorded as a CUDA graph ({reason}); every step is launched anew, which is slower"
            )
            self._steps = None

    def _make_room(self, tokens: int) -> None:
        room = -(-(tokens + 1) // _WIDTHS) * _WIDTHS
        if room > self._cache.capacity:
            if self._steps is not None:
                self._steps.forget()  # they read the smaller cache
            self._guarded(lambda: self._cache.grow(room))

    def _refuse_beyond_positions(self, tokens: int) -> None:
        if self.positions is not None and tokens > self.positions:
            raise TargetError(
                f"texts of {tokens} tokens: {self._target.info.name}'s rotary embeddings change for all texts side by side as soon as one is longer "
                f"than {self.positions}",
                "ask for shorter texts (--max-prompt-tokens, --max-new-tokens), or serve the target with vLLM or SGLang and give --server",
            )

    def _guarded(self, work: Callable[[], Any]) -> Any:
        try:
            with self._on_device():
                return work()
        except torch.OutOfMemoryError as error:
            raise TargetError(
                f"out of memory on {self._target.device} with {self._options.slots} texts of up to {self._cache.capacity} tokens side by side: "
                f"{error}",
                "lower --batch or --max-prompt-tokens; what is written already stays, and the same command goes on",
            ) from error


def _groups(prompts: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Split (number, length) in ascending order of length into forward passes of bounded size; empty prompts need none."""
    groups: list[list[int]] = [[]]
    for number, length in prompts:
        padded = -(-length // _PROMPT_LENGTHS) * _PROMPT_LENGTHS
        if groups[-1] and (len(groups[-1]) + 1) * padded > _PROMPT_TOKENS:
            groups.append([])
        if length:
            groups[-1].append(number)
    return [group for group in groups if group]
