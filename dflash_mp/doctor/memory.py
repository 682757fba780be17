"""How much memory a run takes, reckoned from shapes alone: the formulas behind `doctor`, and what was measured against them.

P are the drafter's parameters, L its layers, H, V, I, q, kv widths (hidden, vocabulary, MLP, heads · head_dim, key/value heads · head_dim), w bytes of a
value (2 in bf16), T tokens of the rows of a micro-batch, D their draft tokens (anchors · block size). A compiled layer keeps, for each draft
token, 4·H + 6·q + 3·I + kv values for its backward pass and for each context token 2·q + kv: keys and values once for each query head. The loss works in
chunks of 4,096 positions. With `train.precision: fp8` a compiled layer keeps 2·H + 5·q + 2·I + kv values and q bytes, and the head exists in fp8, too,
twice. Against the allocator's peak on an H200 it is 0.1% high for `bench step`'s case 8b-b in fp8; that is the one case measured.

What is not in it: the CUDA context, NCCL's buffers and fragmentation (`fit.py` leaves room for those), attention kernels other than flex, and
caches of the compiler. A feeder's formula is for dense models.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_mp.config import TrainConfig
from dflash_mp.doctor.finding import gib
from dflash_mp.drafter.fp8_products import MULTIPLE
from dflash_mp.drafter.frozen_head import chunk_size
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.stream.layout import FLOAT_TYPES, RowLayout
from dflash_mp.stream.plan import TargetInfo

_EAGER = 1.6  # a layer that isn't compiled keeps that much more
_MASKS = 3  # bytes per pair of tokens: a boolean mask and its form in 16 bits


@dataclass(frozen=True)
class Term:
    """One part of the memory: what it is, how it is reckoned, bytes."""

    name: str
    formula: str
    nbytes: int

    def line(self) -> str:
        return f"{gib(self.nbytes):>10}  {self.name}: {self.formula}"


@dataclass(frozen=True)
class Memory:
    """`resident` stays; of `peaks`, which come one after the other, the largest counts."""

    resident: tuple[Term, ...]
    peaks: tuple[tuple[Term, ...], ...]

    @property
    def nbytes(self) -> int:
        """At the peak."""
        return sum(term.nbytes for term in (*self.resident, *self._highest()))

    def lines(self) -> tuple[str, ...]:
        """Each term that the peak consists of, largest part first within resident and passing memory."""
        return tuple(term.line() for term in (*self.resident, *self._highest()) if term.nbytes)

    def _highest(self) -> tuple[Term, ...]:
        return max(self.peaks, key=lambda terms: sum(term.nbytes for term in terms))


def drafter_memory(
    shape: DrafterShape,
    train: TrainConfig,
    row: RowLayout,
    *,
    width: int,
    tied: bool,
    compiled: bool,
) -> Memory:
    """Of one rank that computes in values of `width` bytes, on rows that lie as `row` says."""
    p, w = shape.parameter_count(), width
    rows, row_tokens, fp8 = train.micro_batch_rows, row.row_tokens, row.unpacked_nbytes > 0
    copies = 2 + (rows > 1 and not fp8)
    frozen = (1 if tied else 2) * w * shape.vocab_size * shape.hidden_size
    masters = (Term("masters", f"4·P, P = {p / 1e6:,.1f} M", 4 * p),) if w < 4 else ()
    scaled = train.precision == "fp8" and shape.hidden_size % MULTIPLE == 0
    head = (Term("head in fp8", "2·V·H, by rows and by columns", 2 * shape.vocab_size * shape.hidden_size),)
    resident = (
        Term("weights and gradients", f"2·{w}·P, P = {p / 1e6:,.1f} M", 2 * w * p),
        *masters,
        Term("moments", "8·P", 8 * p),
        *(head if scaled else ()),
        Term("embedding and head", f"{1 if tied else 2}·{w}·V·H, frozen{', tied' if tied else ''}", frozen),
        Term(
            "rows",
            f"{copies} batches of {rows} × {row_tokens} tokens{', in fp8 and unpacked' if fp8 else ''}",
            copies * rows * (row.nbytes + row.unpacked_nbytes),
        ),
    )
    kept, recomputed = _activations(shape, train, rows * row_tokens, w, compiled)
    return Memory(resident, ((kept, _loss(shape, train, w, compiled)), (kept, recomputed)))


def feeder_memory(target: TargetInfo, parameters: int, row_tokens: int) -> Memory:
    """Of one feeder: all of the target while its self-check runs over a row that is one document.

    Features: those that the CUDA graph writes, and of two rows on their way. Its memory is a layer's, kept beside that of plain passes.
    """
    w, t, h = FLOAT_TYPES[target.dtype].itemsize, row_tokens, target.hidden_size
    q, kv = target.heads * target.head_dim, target.kv_heads * target.head_dim
    layer = f"{w}·(4·H + 2·q + 2·kv + 3·I)·T"
    graph = t * (4 * h + 2 * q + 2 * kv + 3 * target.intermediate_size) * w
    return Memory(
        (
            Term("target", f"{w} bytes × {parameters / 1e6:,.1f} M parameters", w * parameters),
            Term("features", f"3·{w}·K·H for each of {t} tokens", 3 * w * t * target.feature_width),
            Term("a row's CUDA graph", layer, graph),
        ),
        (
            (
                Term(
                    "hidden states",
                    f"{w}·H for each token and layer, in the self-check",
                    w * (target.num_layers + 1) * t * h,
                ),
                Term("a layer at work", f"{layer} + {_MASKS}·T²", graph + _MASKS * t * t),
            ),
        ),
    )


def _activations(shape: DrafterShape, train: TrainConfig, tokens: int, w: int, compiled: bool) -> tuple[Term, Term]:
    """What is kept for the backward pass, and what that computes again."""
    h, q, kv = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    draft = train.micro_batch_rows * train.anchors_per_row * shape.block_size
    keys = (
        3 * kv if train.attention == "sdpa" else kv + 2 * q
    )  # flex attention gets keys and values for each query head
    values = 4 * h + 4 * q + 3 * shape.intermediate_size + keys
    layer = w * (draft * values + tokens * keys) + 4 * draft * shape.heads
    saved = 0
    if (
        train.precision == "fp8"
    ):  # inputs of products are rounded again in the backward pass; only that of o_proj is kept, in one byte
        saved = draft * (w * (2 * h + shape.intermediate_size + q) - q)
    layer -= saved
    layer = layer if compiled else int(_EAGER * layer)
    # Around the layers: fused context and last norm (three stages each), rotation, block inputs, scored slots and their gradient.
    around = (tokens + draft) * (h * 3 * w + 2 * shape.head_dim * w) + 3 * draft * h * w
    if train.attention == "sdpa":
        around += draft * (tokens + draft)
    if not train.gradient_checkpointing:
        kept_keys = "3·kv" if train.attention == "sdpa" else "(kv + 2·q)"
        formula = f"L·{w}·[D·(4·H + 4·q + 3·I + {kept_keys}) + T·{kept_keys}], D = {draft}, and around the layers"
        if saved:
            formula += f", less L·D·({w}·(2·H + I + q) − q) for fp8"
        return Term("activations", formula, shape.layers * layer + around), Term("", "", 0)
    kept = shape.layers * w * draft * h + around
    return Term("activations", f"L·{w}·D·H (checkpointing), D = {draft}, and around the layers", kept), Term(
        "a layer computed again", "its activations, and their gradients", 2 * layer
    )


def _loss(shape: DrafterShape, train: TrainConfig, w: int, compiled: bool) -> Term:
    """Of a chunk: logits and slope in the head's dtype, or the slope in fp8; not compiled, logits and exponents in fp32 as well."""
    slots = train.micro_batch_rows * train.anchors_per_row * (shape.block_size - 1)
    chunk = min(chunk_size(slots, True, compiled), slots)
    scaled = train.precision == "fp8" and shape.hidden_size % MULTIPLE == 0
    values = (w + (1 if scaled else w) + (0 if compiled else 8)) * chunk
    formula = f"V × {chunk} logits of {w} bytes and slopes of {1 if scaled else w}"
    formula += "" if compiled else ", and twice in fp32"
    if train.objective == "distill":
        values, formula = 2 * values, f"{formula}, for the target's distribution as well"
    return Term("loss", formula, values * shape.vocab_size)
