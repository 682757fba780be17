from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dflash_mp.bench import timing
from dflash_mp.bench.fp8_products import Fp8Products
from dflash_mp.bench.step import CASES, StepCase, bench_cases, build, gradient_error, make_batch
from dflash_mp.drafter import frozen_head
from dflash_mp.errors import ConfigError


def test_the_work_counted_is_the_published_count() -> None:
    assert CASES["8b-a"].operations() == pytest.approx(69.4e12, rel=1e-3)
    assert CASES["8b-b"].operations() == pytest.approx(69.0e12, rel=1e-3)


def test_the_floor_of_fp8_counts_all_products_once() -> None:
    case, alike = CASES["8b-a"], Fp8Products(2e14, 2e14, ())
    assert case.fp8_floor(alike, 2e14) == pytest.approx(case.operations() / 2e14)
    in_fp8 = case.operations() / 2e14 - case.fp8_floor(alike, 1e30)
    assert in_fp8 / (case.operations() / 2e14) == pytest.approx(0.015, abs=0.001), "fc's share"


def counted(case: StepCase, precision: str) -> int:
    """Operations of the matrix products that PyTorch makes in a pass; those of the mask's blocks excluded."""
    cpu, dtype = torch.device("cpu"), torch.bfloat16 if precision == "fp8" else torch.float32
    model, objective = build(case, cpu, dtype, precision == "fp8")
    batch = make_batch(case, cpu, dtype, seed=1)
    with FlopCounterMode(display=False) as made:
        objective.loss(model, batch).total.backward()
    return sum(n for product, n in made.get_flop_counts()["Global"].items() if "bmm" not in str(product))


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_what_gradient_checkpointing_computes_again_is_what_pytorch_does(precision: str) -> None:
    plain = CASES["tiny"]
    again = replace(plain, gradient_checkpointing=True)
    assert plain.recomputed(whole=True) == 0
    assert again.recomputed(whole=precision == "fp8") == counted(again, precision) - counted(plain, precision)


def test_the_share_of_recomputation_at_8b() -> None:
    case = CASES["8b-a-checkpointing"]
    assert case.recomputed(whole=True) / case.operations() == pytest.approx(0.23, abs=0.01)


def test_works_are_timed_in_series_of_a_like_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing._SERIES, "cpu", (0.02, 2))
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    calls: list[str] = []

    def work(name: str, seconds: float) -> None:
        calls.append(name[0])
        now[0] += seconds

    turns = timing.by_turns((lambda: work("long", 0.05), lambda: work("short", 0.01)), torch.device("cpu"), turns=3)
    assert [len(turn) for turn in turns] == [2, 2, 2]
    assert all(turn == pytest.approx((0.05, 0.01)) for turn in turns)
    assert "".join(calls) == "ls" + 3 * ("ll" + 10 * "s")


def test_the_gradients_are_those_of_the_float64_twin_and_a_wrong_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert gradient_error(CASES["tiny"], cpu, torch.float32) < 1e-5
    right = frozen_head.terms_in_place

    def doubled(logits: torch.Tensor, *more: object) -> object:
        losses, hits, slope, factor = right(logits, *more)
        return losses, hits, slope, factor * 2

    calls = iter([doubled, right])  # the measured pass first, then its twin
    monkeypatch.setattr(frozen_head, "terms_in_place", lambda *arguments: next(calls)(*arguments))
    assert gradient_error(CASES["tiny"], cpu, torch.float32) > 0.5


def test_a_case_is_measured_and_an_unknown_one_is_refused_first() -> None:
    (result,) = bench_cases(["tiny"], "cpu", repeats=2)
    assert 0 < result.rate < result.matmul_rate * 2
    assert 0 < result.ratio < 2
    line = result.line()
    assert line.startswith(f"tiny, fp32: {result.seconds * 1e3:.1f} ms in a row, {result.rate / 1e12:.2f} TFLOP/s = ")
    assert "computes again" not in line
    again = replace(result, host_seconds=0.028, ratio=0.5, recomputed=result.case.operations() / 2).line()
    assert " ms in a row, host 28.0 ms, " in again
    assert "TFLOP/s = 50% of a plain fp32 matrix product's" in again
    assert "TFLOP/s = 75% with what gradient checkpointing computes again; " in again
    with pytest.raises(ConfigError, match=r"no case 'huge'"):
        list(bench_cases(["tiny", "huge"], "cpu", repeats=2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no CUDA device here"):
        next(bench_cases(["tiny"], "cuda", repeats=2))


def test_fp8_is_measured_beside_bf16_and_told_apart_from_it() -> None:
    (result,) = bench_cases(["tiny"], "cpu", repeats=1, precision="fp8")
    assert result.bf16 is not None
    assert 3 * result.bf16.gradient_error < result.gradient_error < 0.25
    assert "tiny, fp8: " in result.line()
    assert " × as fast as in bf16 (" in result.line()
    assert result.bf16.floor > 0
    assert all(full < 1e-5 for _, _, full in result.bf16.products.sums), "rounding is not in it"
