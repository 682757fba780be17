"""Line and bar charts as SVG text, for a page that needs nothing else: no script, no font, no address.

Colours and lines come from the page's style sheet (classes `s0` … `s7`, `axis`, `grid`), so that light and dark are its affair. Every point
that is drawn lies inside the axes; values that are no finite numbers are left out. A chart of no values is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 46
_MOST_POINTS = 1500
_COLOURS = 8


@dataclass(frozen=True)
class Series:
    """A named row of points (x, y). `marks`: draw each point, too."""

    name: str
    points: Sequence[tuple[float, float]]
    marks: bool = False


@dataclass(frozen=True)
class Axis:
    """What an axis says. `percent`: values are shares. `zero`: it begins at 0. `whole`: there are whole numbers only."""

    label: str
    percent: bool = False
    zero: bool = False
    whole: bool = False


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series], marks: Sequence[float] = ()) -> str | None:
    """Lines over a common x. `marks` are places on x at which a vertical line is drawn."""
    shown = [(s, [p for p in s.points if math.isfinite(p[0]) and math.isfinite(p[1])]) for s in series]
    shown = [(s, _thinned(points)) for s, points in shown if points]
    if not shown:
        return None
    everything = [point for _, points in shown for point in points]
    across = _Scale.of([px for px, _ in everything], x, (_LEFT, WIDTH - _RIGHT))
    up = _Scale.of([py for _, py in everything], y, (HEIGHT - _BOTTOM, _TOP))
    parts = [_axes(across, up, x, y)]
    for place in marks:
        if across.low <= place <= across.high:
            parts.append(
                f'<line class="mark" x1="{across(place):.1f}" x2="{across(place):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
            )
    for number, (one, points) in enumerate(shown):
        colour = f"s{number % _COLOURS}"
        path = " ".join(f"{across(px):.1f},{up(py):.1f}" for px, py in points)
        if len(points) > 1:
            parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        if one.marks or len(points) == 1:
            for px, py in points:
                tip = escape(f"{one.name}: {_text(py, y.percent)} at {_text(px, x.percent)}")
                parts.append(
                    f'<circle class="dot {colour}" cx="{across(px):.1f}" cy="{up(py):.1f}" r="3.5"><title>{tip}</title></circle>'
                )
    return _figure(title, parts, [one.name for one, _ in shown])


def bar_chart(title: str, y: Axis, groups: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str | None:
    """Bars from 0 in `groups`, each a name and its (series, value); series of one name share a colour."""
    groups = [(name, [(s, v) for s, v in bars if math.isfinite(v)]) for name, bars in groups]
    names = list(dict.fromkeys(series for _, bars in groups for series, _ in bars))
    if not names:
        return None
    up = _Scale.of([value for _, bars in groups for _, value in bars], replace(y, zero=True), (HEIGHT - _BOTTOM, _TOP))
    room = (WIDTH - _LEFT - _RIGHT) / len(groups)
    width = min(48.0, room * 0.8 / len(names))
    parts = [_axes(None, up, Axis(""), y)]
    for number, (group, bars) in enumerate(groups):
        middle = _LEFT + room * (number + 0.5)
        parts.append(
            f'<text class="tick" x="{middle:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{escape(group)}</text>'
        )
        for series, value in bars:
            place = names.index(series)
            left, top = middle + (place - len(names) / 2) * width, up(value)
            tip = escape(f"{group}, {series}: {_text(value, y.percent)}")
            parts.append(
                f'<rect class="bar s{place % _COLOURS}" x="{left + 1:.1f}" y="{top:.1f}" width="{width - 2:.1f}" '
                f'height="{max(0.0, HEIGHT - _BOTTOM - top):.1f}"><title>{tip}</title></rect>'
                f'<text class="value" x="{left + width / 2:.1f}" y="{top - 4:.1f}" text-anchor="middle">{_text(value, y.percent)}</text>'
            )
    return _figure(title, parts, names)


class _Scale:
    """From values to places on the picture, over round numbers."""

    def __init__(self, low: float, high: float, step: float, places: tuple[float, float]) -> None:
        self.low, self.high, self.step = low, high, step
        self._from, self._to = places

    @staticmethod
    def of(values: Sequence[float], axis: Axis, places: tuple[float, float]) -> _Scale:
        low, high = min(values), max(values)
        if axis.zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if high <= low:
            high = low + (abs(low) * 0.1 or 1.0)
        rough = (high - low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        step = max(step, 1.0) if axis.whole else step
        return _Scale(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step, places)

    def __call__(self, value: float) -> float:
        return self._from + (value - self.low) / (self.high - self.low) * (self._to - self._from)

    def ticks(self) -> list[float]:
        return [self.low + i * self.step for i in range(round((self.high - self.low) / self.step) + 1)]


def _axes(across: _Scale | None, up: _Scale, x: Axis, y: Axis) -> str:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = []
    for value in up.ticks():
        place = up(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{place + 4:.1f}" text-anchor="end">{_text(value, y.percent, up.step)}</text>'
        )
    for value in across.ticks() if across is not None else ():
        place = across(value) if across is not None else 0.0
        parts.append(f'<line class="axis" x1="{place:.1f}" x2="{place:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        step = across.step if across is not None else None
        parts.append(
            f'<text class="tick" x="{place:.1f}" y="{bottom + 18}" text-anchor="middle">{_text(value, x.percent, step)}</text>'
        )
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text class="label" x="{(_LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>'
    )
    parts.append(
        f'<text class="label" x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(y.label)}</text>'
    )
    return "".join(parts)


def _figure(title: str, parts: Sequence[str], names: Sequence[str]) -> str:
    keys = "".join(f'<span><i class="s{n % _COLOURS}"></i>{escape(name)}</span>' for n, name in enumerate(names))
    return (
        f'<figure><h3>{escape(title)}</h3><div class="legend">{keys}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">{"".join(parts)}</svg></figure>'
    )


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most so many points as can be told apart, each the mean of its neighbours."""
    size = math.ceil(len(points) / _MOST_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _text(value: float, percent: bool, step: float | None = None) -> str:
    """The number as people write it; on an axis with as many digits as its `step` needs."""
    if percent:
        digits = 0 if step is None or step >= 0.01 else 1
        return f"{100 * value:.{digits}f} %"
    if step is None:
        return f"{value:.4g}" if abs(value) < 10000 else f"{value:,.0f}"
    if abs(value) >= 1e7 or 0 < step < 1e-4:
        return f"{value:.3g}"
    return f"{value:,.{max(0, -math.floor(math.log10(step)))}f}"
