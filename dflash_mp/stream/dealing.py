"""Which row is asked of which feeder: pure decisions from what each feeder has been asked for and how fast it was.

Rows are dealt in order, each to the feeder that would have it first, counting the rows before it; one that would be late everywhere but at a
feeder that is full waits for that feeder. So a feeder at a tenth of the speed of another gets every eleventh row, ten rows ahead of its
use, and none when the window is shorter than that. `takeovers` mends what the forecast got wrong: while the trainer waits, a
feeder with nothing to do is asked for a row that another one would bring much later, or never. Nothing here affects what a row holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from dflash_mp.stream.window import Request, Want

LOOK_AHEAD = 64  # rows that are dealt at once
_WEIGHT = 0.3  # of the latest row in a feeder's time for a row
_FORGET_SECONDS = (
    10.0  # in which that of an idle feeder is taken for half of what it was: it may have been slow for once
)
_ALIKE = 1.25  # feeders whose forecasts differ by less take turns
_UNKNOWN_SECONDS = 1.0  # how late a row must be for a feeder that has made none yet to take it over
_HUNG_SECONDS = 1.0  # at one row, and ten times what it usually takes, before a feeder counts as hung
_SLACK_SECONDS = 0.02  # what scheduling may cost, and is no lateness


class RowTime:
    """Seconds that a feeder takes for a row of this drafter, by its latest answers; None before the first."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._last = 0.0

    def done(self, asked_at: float, now: float) -> None:
        """A row came that was asked for at `asked_at`."""
        took = now - self.began(asked_at)
        self.seconds = took if self.seconds is None else (1 - _WEIGHT) * self.seconds + _WEIGHT * took
        self._last = now

    def began(self, asked_at: float) -> float:
        """When the feeder could begin with the oldest row that it owes: it makes one after the other."""
        return max(asked_at, self._last)

    def rested(self, now: float) -> float | None:
        """What to expect of a feeder that owes nothing."""
        return None if self.seconds is None else self.seconds * 0.5 ** ((now - self._last) / _FORGET_SECONDS)


class Feeder(Protocol):
    """A live feeder, as far as dealing is concerned."""

    endpoint: str
    asked: dict[int, Request]  # what it owes, oldest first
    row_time: RowTime

    @property
    def most(self) -> int:
        """Rows that it may be asked for at once."""


F = TypeVar("F", bound=Feeder)


def seconds_until(feeder: Feeder, rows: int, now: float) -> float | None:
    """Forecast for the last of `rows` rows, those first that it owes; None when nothing is known.

    A row that takes longer than the ones before is expected to take twice what it took until now.
    """
    usual, oldest = feeder.row_time.seconds, next(iter(feeder.asked.values()), None)
    if oldest is None:
        rested = feeder.row_time.rested(now)
        return None if rested is None else rested * rows
    elapsed = now - feeder.row_time.began(oldest.asked_at)
    if usual is None:
        return None if elapsed < _UNKNOWN_SECONDS else elapsed * rows
    return abs(usual - elapsed) + max(usual, elapsed) * (rows - 1)


def hung(feeder: Feeder, now: float) -> bool:
    """Whether it has been at its oldest row for so long that the rows after that can't be relied on."""
    oldest, usual = next(iter(feeder.asked.values()), None), feeder.row_time.seconds
    patience = max(_HUNG_SECONDS, 10 * (_UNKNOWN_SECONDS if usual is None else usual))
    return oldest is not None and now - feeder.row_time.began(oldest.asked_at) > patience


def untried(want: Want, feeders: Iterable[F], now: float) -> list[F]:
    """Those that have not failed at `want` and get on."""
    return [feeder for feeder in feeders if feeder.endpoint not in want.failed_at and not hung(feeder, now)]


def candidates(want: Want, feeders: Sequence[F], now: float) -> Sequence[F]:
    """Whom `want` may be asked of: those that failed at it only when nobody else gets on."""
    return (untried(want, feeders, now) or feeders) if want.failed_at else feeders


def deal(waiting: Iterable[Want], feeders: Sequence[F], now: float, turn: int) -> Iterator[tuple[Want, F]]:
    """Who is to be asked for which of the `waiting` rows. `turn` decides between feeders that are alike."""
    if not feeders:
        return
    turn %= len(feeders)
    order = [*feeders[turn:], *feeders[:turn]]
    owed = {feeder.endpoint: len(feeder.asked) for feeder in order}
    # One row will tell how fast a feeder is. Before that it gets no more, unless nobody is known to be fast.
    careful = any(feeder.row_time.seconds is not None for feeder in order)
    room = {f.endpoint: 1 if careful and f.row_time.seconds is None else f.most for f in order}
    for want in waiting:
        if all(owed[feeder.endpoint] >= room[feeder.endpoint] for feeder in order):
            return
        apart = candidates(want, order, now)
        others = [f for f in apart if f.row_time.seconds is not None or owed[f.endpoint] < room[f.endpoint]]
        if not others:  # it waits for a feeder that makes its first row
            continue
        forecasts = {f.endpoint: seconds_until(f, owed[f.endpoint] + 1, now) or 0.0 for f in others}
        near = min(forecasts.values()) * _ALIKE + 1e-3
        alike = [feeder for feeder in others if forecasts[feeder.endpoint] <= near]
        chosen = min(alike, key=lambda feeder: owed[feeder.endpoint])
        if owed[chosen.endpoint] < room[chosen.endpoint]:
            yield want, chosen
        owed[chosen.endpoint] += 1


def takeovers(late: Iterable[Want], feeders: Mapping[str, F], now: float) -> Iterator[tuple[Want, F]]:
    """Which of the rows that others owe are to be asked of feeders with nothing to do as well. `late` are in order."""
    idle = [feeder for feeder in feeders.values() if not feeder.asked]
    for want in late:
        left = [_seconds_left(feeders[r.feeder], r, now) for r in want.requests if r.feeder in feeders]
        for feeder in idle:
            if any(request.feeder == feeder.endpoint for request in want.requests) or not left:
                continue
            if feeder.endpoint in want.failed_at and untried(want, feeders.values(), now):
                continue
            mine = seconds_until(feeder, 1, now)
            if mine is None:
                mine = _UNKNOWN_SECONDS / 2
            if min(left) > 2 * mine + _SLACK_SECONDS:
                idle.remove(feeder)
                yield want, feeder
                break


def _seconds_left(feeder: Feeder, request: Request, now: float) -> float:
    position = next(n for n, one in enumerate(feeder.asked.values(), start=1) if one is request)
    forecast = seconds_until(feeder, position, now)
    return 0.0 if forecast is None else forecast
