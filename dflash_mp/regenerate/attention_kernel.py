"""The Triton kernel of `slot_attention`. Imported where it is launched only: builds of PyTorch for a CPU come without Triton."""

import triton
import triton.language as tl


@triton.jit
def attend_to_span(  # type: ignore[no-untyped-def]  # noqa: ANN201
    query,
    keys,
    values,
    spans,
    out,
    query_slot,
    query_head,
    keys_slot,
    keys_head,
    keys_place,
    values_slot,
    values_head,
    values_place,
    scale,
    group: tl.constexpr,
    rows: tl.constexpr,
    size: tl.constexpr,
    columns: tl.constexpr,
    value_size: tl.constexpr,
    value_columns: tl.constexpr,
    tile: tl.constexpr,
    precision: tl.constexpr,
):
    """One KV head of one slot: its `group` query heads against the places of the slot's span, `tile` at a time.

    The softmax is taken on the way, in float32. `rows` and `columns` are `group` and `size` rounded up to what a matrix product takes. `out` is
    contiguous, [slots, heads, value_size]; `scale` is of powers of two: that of the scores times log2(e).
    """
    head = tl.program_id(0)
    slot = tl.program_id(1).to(tl.int64)
    first = tl.load(spans + slot * 2).to(tl.int32)
    last = tl.load(spans + slot * 2 + 1).to(tl.int32)
    heads = head * group + tl.arange(0, rows)
    row_here = tl.arange(0, rows) < group
    at = tl.arange(0, columns)
    column_here = at < size
    asked = query + slot * query_slot + heads[:, None] * query_head + at[None, :]
    q = tl.load(asked, mask=row_here[:, None] & column_here[None, :], other=0.0)
    value_at = tl.arange(0, value_columns)
    value_here = value_at < value_size
    keys_here = keys + slot * keys_slot + head * keys_head
    values_here = values + slot * values_slot + head * values_head
    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    answer = tl.zeros([rows, value_columns], tl.float32)
    for start in range(first // tile * tile, last + 1, tile):
        places = start + tl.arange(0, tile)
        seen = (places >= first) & (places <= last)
        k = tl.load(
            keys_here + places[None, :] * keys_place + at[:, None], mask=seen[None, :] & column_here[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision=precision) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))  # finite: each tile has a place of the span
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(best - higher)
        v = tl.load(
            values_here + places[:, None] * values_place + value_at[None, :],
            mask=seen[:, None] & value_here[None, :],
            other=0.0,
        )
        answer = answer * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=precision)
        total = total * shrink + tl.sum(weights, 1)
        best = higher
    answer = answer / total[:, None]
    target = out + (slot * (tl.num_programs(0) * group) + heads[:, None]) * value_size + value_at[None, :]
    tl.store(target, answer.to(out.dtype.element_ty), mask=row_here[:, None] & value_here[None, :])
