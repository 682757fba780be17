from __future__ import annotations

import pytest
import torch

from dflash_mp.bench.fp8_products import Fp8Products
from dflash_mp.bench.step import CASES, bench_cases, gradient_error
from dflash_mp.drafter import loss
from dflash_mp.errors import ConfigError


def test_the_work_counted_is_the_published_count() -> None:
    assert CASES["8b-a"].operations() == pytest.approx(69.4e12, rel=1e-3)
    assert CASES["8b-b"].operations() == pytest.approx(69.0e12, rel=1e-3)


def test_the_floor_of_fp8_counts_all_products_once() -> None:
    case, alike = CASES["8b-a"], Fp8Products(2e14, 2e14, ())
    assert case.fp8_floor(alike, 2e14) == pytest.approx(case.operations() / 2e14)
    in_fp8 = case.operations() / 2e14 - case.fp8_floor(alike, 1e30)
    assert in_fp8 / (case.operations() / 2e14) == pytest.approx(0.015, abs=0.001), "fc's share"


def test_the_gradients_are_those_of_the_float64_twin_and_a_wrong_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert gradient_error(CASES["tiny"], cpu, torch.float32) < 1e-5
    right = loss._cross_entropy_in_place

    def doubled(logits: torch.Tensor, *more: object) -> object:
        total, hits, slope, factor = right(logits, *more)
        return total, hits, slope, factor * 2

    calls = iter([doubled, right])  # the measured pass first, then its twin
    monkeypatch.setattr(loss, "_cross_entropy_in_place", lambda *arguments: next(calls)(*arguments))
    assert gradient_error(CASES["tiny"], cpu, torch.float32) > 0.5


def test_a_case_is_measured_and_an_unknown_one_is_refused_first() -> None:
    (result,) = bench_cases(["tiny"], "cpu", repeats=2)
    assert 0 < result.rate < result.matmul_rate * 2
    assert "tiny, fp32: " in result.line()
    with pytest.raises(ConfigError, match=r"no case 'huge'"):
        list(bench_cases(["tiny", "huge"], "cpu", repeats=2))


def test_fp8_is_measured_beside_bf16_and_told_apart_from_it() -> None:
    (result,) = bench_cases(["tiny"], "cpu", repeats=1, precision="fp8")
    assert result.bf16 is not None
    assert 3 * result.bf16.gradient_error < result.gradient_error < 0.25
    assert "tiny, fp8: " in result.line()
    assert " × as fast as in bf16 (" in result.line()
    assert result.bf16.floor > 0
    assert all(full < 1e-5 for _, _, full in result.bf16.products.sums), "rounding is not in it"
