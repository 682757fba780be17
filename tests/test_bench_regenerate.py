"""`dflash-mp bench regenerate`: what it says of a tiny target, and the floor that it reckons with."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_mp.bench.regenerate import Work, bench_regenerate, step_bytes
from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.cli import main
from dflash_mp.config import TargetConfig
from dflash_mp.decode.sampling import GREEDY
from dflash_mp.errors import TargetError
from dflash_mp.regenerate.slots import Slots
from dflash_mp.target.load import load_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), layers=2, heads=4, kv_heads=2, head_dim=32, hidden=96)


def test_both_ways_are_measured_beside_one_floor(target: Path) -> None:
    words = ["bench", "regenerate", "--target", str(target), "--device", "cpu", "--batch", "3", "--compare"]
    done = CliRunner().invoke(main, [*words, "--prompt-tokens", "20", "--new-tokens", "9", "--rounds", "1"])
    assert done.exit_code == 0, done.output
    prompts = Work(3, 20, 9, GREEDY).prompts(288)
    read = sum(map(len, prompts))
    (floor,) = re.findall(r"bytes of 9 steps .*: floor ([\d.]+) s = ([\d,]+) tokens/s\n", done.output)
    assert float(floor[1].replace(",", "")) > 1
    for way in ("grouped heads over all places", "the model's own, sdpa"):
        assert re.search(rf"^{way}: first round [\d.]+ s$", done.output, re.MULTILINE)
        found = re.search(
            rf"^{way}: {read} prompt tokens in .*; 27 new tokens in ([\d.]+) s", done.output, re.MULTILINE
        )
        assert found is not None
        assert float(found[1]) > 0


def test_one_way_is_out_and_freed_before_the_other_begins_and_writes_no_step_too_many(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_target(TargetConfig(path=str(target), device="cpu", taps=1))
    engines: list[weakref.ref[Slots]] = []
    steps: list[int] = []
    begin, step = Slots.__init__, Slots._step

    def noted_init(self: Slots, *given: Any) -> None:
        if engines:
            assert [engine() for engine in engines] == [None]
            raise TargetError("out of memory", "a smaller batch")
        engines.append(weakref.ref(self))
        begin(self, *given)

    monkeypatch.setattr(Slots, "__init__", noted_init)
    monkeypatch.setattr(Slots, "_step", lambda self, width: (steps.append(width), step(self, width)))
    lines = bench_regenerate(loaded, Work(3, 20, 9, GREEDY), 2, compare=True)
    said = [next(lines) for _ in range(3)]
    assert said[-1].startswith("grouped heads over all places: ")
    found = re.search(r"27 new tokens in ([\d.]+) s, ([\d.]+) ms a step", said[-1])
    assert found is not None
    assert float(found[2]) == pytest.approx(float(found[1]) / 9 * 1e3, abs=0.1)
    assert len(steps) == 3 * 9
    with pytest.raises(TargetError, match="out of memory"):
        next(lines)


def test_a_choice_that_greedy_ignores_is_refused(target: Path) -> None:
    done = CliRunner().invoke(main, ["bench", "regenerate", "--target", str(target), "--top-k", "20"])
    assert done.exit_code == 2
    assert "--top-k: without effect with --temperature 0" in done.output


def test_a_step_must_read_the_weights_and_each_texts_own_places(target: Path) -> None:
    loaded = load_target(TargetConfig(path=str(target), device="cpu", taps=1))
    head, place = 288 * 96, 2 * 2 * 2 * 32  # layers, keys and values, KV heads, size
    layer = 2 * 96 * 128 + 2 * 96 * 64 + 3 * 96 * 256 + 2 * 96 + 2 * 32
    assert step_bytes(loaded, [[1, 2, 3], [4]], 5) == 4 * (2 * layer + head + (8 + 6) * place)


def test_texts_that_the_target_has_no_positions_for_are_refused(target: Path) -> None:
    done = CliRunner().invoke(main, ["bench", "regenerate", "--target", str(target), "--new-tokens", "5000"])
    assert done.exit_code == 2
    assert "ask for shorter texts" in done.output
