"""Short versions of `dflash-mp bench hostile` and `bench memory`: right rows and a living feeder; their figures are for a quiet machine."""

from __future__ import annotations

import pytest

from dflash_mp.bench.hostile import ATTACKS, hostile
from dflash_mp.bench.memory import FLAT_BYTES, MemoryReport, memory
from dflash_mp.errors import DflashError


@pytest.mark.parametrize(("transport", "attacks"), [("tcp", tuple(ATTACKS)), ("ipc", ("a message without end",))])
def test_an_honest_drafter_gets_right_rows_beside_an_attack(transport: str, attacks: tuple[str, ...]) -> None:
    effects = hostile(rounds=1, seconds=0.1, transport=transport, attacks=attacks)
    assert tuple(effect.attack for effect in effects) == attacks
    for effect in effects:
        assert effect.attempts > 0
        assert effect.beside[0] > 0
        most_mib = 512 if effect.attack == "idle connections" else 64 if transport == "tcp" else 1024
        assert effect.growth_bytes < most_mib << 20, effect.line()


def test_an_attack_that_there_is_not_is_refused() -> None:
    with pytest.raises(DflashError, match="there is no attack 'tickling'") as caught:
        hostile(attacks=("tickling",))
    assert "garbage" in caught.value.remedy


def test_memory_stays_flat_over_a_few_hundred_rows() -> None:
    report = memory(rows=500)
    assert report.flat, report.lines()
    assert len(report.feeder) == 100


def test_memory_that_grows_is_noticed() -> None:
    growing = [number * FLAT_BYTES // 40 for number in range(100)]
    assert not MemoryReport(100, feeder=growing, drafter=[1] * 100, stopped=[1] * 100).flat
    assert MemoryReport(100, feeder=[7] * 100, drafter=growing[:20] + growing[19:20] * 80, stopped=[1] * 100).flat
