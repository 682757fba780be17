"""Which layers are tapped."""

from __future__ import annotations

import pytest

from dflash_mp.errors import TargetError
from dflash_mp.target.layer_ids import choose_layer_ids, default_layer_ids


@pytest.mark.parametrize(
    ("layers", "ids"),
    [
        (24, (1, 6, 11, 16, 21)),
        (28, (1, 7, 13, 19, 25)),
        (32, (1, 8, 15, 22, 29)),
        (36, (1, 9, 17, 25, 33)),
        (40, (1, 10, 19, 28, 37)),
        (48, (1, 12, 23, 34, 45)),
        (62, (1, 16, 30, 44, 59)),
        (64, (1, 16, 31, 46, 61)),
        (80, (1, 20, 39, 58, 77)),
        (94, (1, 24, 46, 68, 91)),
    ],
)
def test_five_taps_are_those_of_published_drafters(layers: int, ids: tuple[int, ...]) -> None:
    assert default_layer_ids(layers, 5) == ids


def test_halves_are_rounded_to_even() -> None:
    # 1 + i·26/4 = 1, 7.5, 14, 20.5, 27
    assert default_layer_ids(30, 5) == (1, 8, 14, 20, 27)


def test_one_tap_is_the_middle_layer() -> None:
    assert default_layer_ids(36, 1) == (18,)


@pytest.mark.parametrize("layers", range(2, 12))
def test_shallow_targets_get_distinct_layers_without_the_last(layers: int) -> None:
    for taps in range(1, layers):
        ids = default_layer_ids(layers, taps)
        assert len(set(ids)) == taps
        assert list(ids) == sorted(ids)
        assert ids[0] >= 0
        assert ids[-1] <= layers - 2


def test_more_taps_than_layers_are_refused_with_the_largest_number() -> None:
    with pytest.raises(TargetError, match="at most 3"):
        default_layer_ids(4, 5)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 3], "can't be tapped"),  # the last layer
        ([-1, 1], "outside 0…2"),
        ([2, 1], "ascending"),
        ([1, 1], "ascending"),
        ([], "ascending"),
    ],
)
def test_ids_that_cannot_be_tapped_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(TargetError, match=message):
        choose_layer_ids(4, 5, ids)


def test_configured_ids_win_over_the_number_of_taps() -> None:
    assert choose_layer_ids(4, 5, [0, 2]) == (0, 2)
