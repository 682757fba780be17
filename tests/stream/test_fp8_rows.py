"""Hidden states in fp8: what comes back, beside a slow twin that looks every value up in the format's table, and what it costs in bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dflash_mp.bench.synthetic import synthetic_plan
from dflash_mp.stream.codec import plain
from dflash_mp.stream.fp8_rows import LARGEST, dequantise, not_finite, quantise
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.plan import StreamPlan

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def written(states: torch.Tensor, taps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales, in memory that held not-a-number before."""
    values = torch.full(states.shape, 0xFF, dtype=torch.uint8, device=states.device).view(torch.float8_e4m3fn)
    scales = torch.full((states.shape[0], taps), torch.nan, device=states.device)
    quantise(states, values, scales)
    return values, scales


def through(states: torch.Tensor, taps: int) -> torch.Tensor:
    return dequantise([written(states, taps)], states.dtype)[0]


def twin(states: torch.Tensor, taps: int) -> torch.Tensor:
    """Token by token, tap by tap, value by value: the nearest number of the format's table, of two the one with the even mantissa."""
    numbers = [m * 2.0**-9 for m in range(8)]
    numbers += [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    table, even = np.array(numbers), np.arange(len(numbers)) % 2
    assert table[-1] == LARGEST
    out = torch.empty_like(states)
    for token in range(states.shape[0]):
        parts, results = states[token].view(taps, -1), out[token].view(taps, -1)
        for part, result in zip(parts, results, strict=True):
            exact = part.float().numpy()
            scale = max(np.abs(exact).max() * np.float32(1 / LARGEST), np.finfo(np.float32).tiny)
            for place, value in enumerate(exact):
                away = np.abs(np.abs(np.float64(value / scale)) - table)
                nearest = np.lexsort((even, away))[0]
                result[place] = float(np.copysign(np.float32(table[nearest]) * scale, value))
    return out


def hidden_states(tokens: int, taps: int, hidden: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Taps of different magnitude, two channels that are far larger than the others, and one token where they are larger still."""
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, taps, hidden, generator=random)
    states *= torch.tensor([0.05, 3.0, 30.0])[:taps, None]
    states[:, :, [1, hidden // 2]] *= 25
    states[tokens // 2, :, 1] *= 10
    return states.flatten(1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "taps", "hidden"), [(1, 1, 16), (1, 3, 40), (7, 2, 33), (12, 3, 64)])
def test_it_does_what_the_slow_twin_does(tokens: int, taps: int, hidden: int, dtype: torch.dtype) -> None:
    states = hidden_states(tokens, taps, hidden, dtype, seed=tokens + hidden)
    assert torch.equal(through(states, taps), twin(states, taps))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_value_is_off_by_a_sixteenth_of_itself_at_most_and_a_tokens_vector_by_little_more_than_two_hundredths(
    dtype: torch.dtype,
) -> None:
    states = hidden_states(64, 3, 256, dtype, seed=5)
    _, scales = written(states, 3)
    exact, got = states.double().view(64, 3, 256), through(states, 3).double().view(64, 3, 256)
    rounding = exact.abs() * torch.finfo(dtype).eps
    assert ((got - exact).abs() <= torch.maximum(exact.abs() / 16, scales.double()[..., None] / 1024) + rounding).all()
    error = (got - exact).norm(dim=2) / exact.norm(dim=2)
    assert 0.005 < error.mean() < 0.03
    assert error.max() < 0.05


def test_a_taps_error_does_not_depend_on_the_magnitude_of_the_others() -> None:
    small = hidden_states(9, 1, 64, torch.float32, seed=1)
    beside = torch.cat((small, 1e9 * torch.randn(9, 64)), 1)
    assert torch.equal(through(beside, 2)[:, :64], through(small, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_come_back_and_zeros_stay_zeros(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = [448.0, 449.0, 464.0, 1.0, 0.3, 57344.0, largest, -largest, 0.0]
    states = torch.tensor([[value, 0.0, -value, 0.0] for value in values]).to(dtype)
    got = through(states, 1)
    assert got.isfinite().all()
    torch.testing.assert_close(got, states, rtol=4e-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_too_small_for_a_scale_become_zeros_or_come_back_and_never_infinities(dtype: torch.dtype) -> None:
    small = torch.finfo(dtype).smallest_normal
    states = torch.tensor([[small, -small, 0.0], [small / 4, small / 8, 0.0], [1e-45, 0.0, 0.0]]).to(dtype)
    got = through(states, 1)
    assert ((got - states).abs() <= torch.maximum(states.abs() / 16, torch.tensor(2.0**-136))).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_found(bad: float, dtype: torch.dtype) -> None:
    states = hidden_states(6, 3, 32, dtype, seed=2)
    assert not_finite(written(states, 3)[1]) is None
    states[4, 40] = bad
    assert not_finite(written(states, 3)[1]) == (4, 1)


def test_rows_come_back_side_by_side() -> None:
    rows = [hidden_states(5, 2, 16, torch.bfloat16, seed) for seed in range(3)]
    got = dequantise([written(row, 2) for row in rows], torch.bfloat16)
    assert torch.equal(got, torch.stack([through(row, 2) for row in rows]))


def test_states_need_not_be_contiguous() -> None:
    wide = hidden_states(8, 3, 32, torch.bfloat16, seed=3)
    assert torch.equal(through(wide[:, :64], 2), through(wide[:, :64].contiguous(), 2))


# -- bytes ------------------------------------------------------------------------------------------------------------------------


def plans(dtype: str, last_hidden: bool) -> tuple[StreamPlan, StreamPlan]:
    """A row of 512 tokens with two taps of 1,024 values, plain and in fp8."""
    plan = synthetic_plan(row_tokens=512, hidden_size=1024)
    plan = replace(plan, target=replace(plan.target, dtype=dtype, last_hidden=last_hidden))
    return plan, replace(plan, target=replace(plan.target, wire_dtype="fp8"))


@pytest.mark.parametrize("last_hidden", [False, True])
@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.5), ("float16", 0.5), ("float32", 0.25)])
def test_a_row_has_half_the_bytes_of_one_in_16_bits(dtype: str, share: float, last_hidden: bool) -> None:
    before, fp8 = (RowLayout.of(plan) for plan in plans(dtype, last_hidden))
    assert share < fp8.nbytes / before.nbytes < 1.02 * share
    taps = 2 + last_hidden
    assert fp8.nbytes == 512 * (1024 * taps + 4 * taps + 13)


@pytest.mark.parametrize("last_hidden", [False, True])
@pytest.mark.parametrize("wire", ["auto", "fp8"])
def test_parts_lie_one_after_the_other_and_views_reach_every_byte_of_them(wire: str, last_hidden: bool) -> None:
    plan = synthetic_plan(row_tokens=3, hidden_size=8)
    layout = RowLayout.of(replace(plan, target=replace(plan.target, last_hidden=last_hidden, wire_dtype=wire)))
    buffer, covered = torch.zeros(layout.nbytes, dtype=torch.uint8), 0
    views = layout.views(buffer)
    for part in layout.parts:
        assert part.offset % 64 == 0
        view = getattr(views, part.name)
        assert (tuple(view.shape), view.dtype) == (part.shape, part.dtype)
        assert view.data_ptr() == buffer.data_ptr() + part.offset
        view.view(torch.uint8).add_(1)
        covered += view.view(torch.uint8).numel()
    assert int(buffer.max()) == 1, "no two parts overlap"
    assert int(buffer.sum()) == covered
    fp8 = wire == "fp8"
    assert (views.feature_scales is not None, views.last_scales is not None) == (fp8, fp8 and last_hidden)


def test_a_plan_of_plain_rows_is_what_it_was_before_there_were_others() -> None:
    before, fp8 = plans("bfloat16", False)
    assert "wire_dtype" not in plain(before)["target"]
    assert fp8.fingerprint() != before.fingerprint()
    assert fp8.differences(before) == ["target.wire_dtype: 'fp8' here, 'auto' there"]


# -- on a GPU ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_makes_the_same_bytes(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for tokens, taps, hidden in ((1, 1, 16), (257, 3, 513), (2048, 3, 1024)):
        states = hidden_states(tokens, taps, hidden, dtype, seed=tokens)
        states[tokens // 3, 3] = torch.finfo(dtype).max
        states[tokens // 4] = 0
        (values, scales), near = written(states, taps), states.cuda()
        on_gpu = written(near, taps)
        for there, here in zip(on_gpu, (values, scales), strict=True):
            assert torch.equal(there.cpu().view(torch.uint8), here.view(torch.uint8))
        assert torch.equal(dequantise([on_gpu], dtype).cpu(), dequantise([(values, scales)], dtype))


@pytest.mark.gpu
def test_both_directions_take_little_of_the_time_of_a_large_row() -> None:
    """4,096 tokens with five taps of 4,096 values in bf16, whose forward pass takes an 8 B target 70 ms and more."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    states = torch.randn(4096, 5 * 4096, device="cuda").bfloat16()
    values, scales = torch.empty_like(states, dtype=torch.float8_e4m3fn), torch.empty(4096, 5, device="cuda")
    for name, work in (
        ("quantise", lambda: quantise(states, values, scales)),
        ("dequantise", lambda: dequantise([(values, scales)], torch.bfloat16)),
    ):
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        print(f"{name}: {sorted(times)[10]:.2f} ms")
        assert sorted(times)[10] < 5
