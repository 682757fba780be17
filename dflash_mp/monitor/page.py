"""`dflash-mp report`: one HTML page about a run, complete in itself: no script, no address, readable in light and dark, printable.

Plots of loss, acceptance, accuracy per slot, τ by data set (when there are reports of `dflash-mp eval`), throughput, waits and faults; warnings and
errors from the logs; configuration and versions. All text from files is escaped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dflash_mp import __version__
from dflash_mp.errors import DflashError
from dflash_mp.monitor.charts import Axis, Series, bar_chart, line_chart
from dflash_mp.monitor.record import RunRecord, read_run
from dflash_mp.monitor.style import STYLE

_EVENT_ROWS = 100
_SLOTS_SHOWN = 6
_STEP = Axis("optimizer step", whole=True)


def write_report(directory: Path, out: Path, evaluations: Sequence[Path] = ()) -> RunRecord:
    """Write the page about the run in `directory` to `out`. Raises `DflashError`."""
    record = read_run(directory, evaluations)
    try:
        out.write_text(page(record), encoding="utf-8")
    except OSError as error:
        raise DflashError(f"cannot write {out}: {error.strerror}", "name another file with -o") from None
    return record


def page(record: RunRecord) -> str:
    """The page's HTML."""
    name = escape(record.directory.absolute().name)
    charts = [chart for chart in _charts(record) if chart is not None]
    body = [
        f"<h1>{name}</h1>",
        f'<p class="sub">{_summary(record)}</p>',
        _tiles(record),
        "<h2>Curves</h2>",
        '<p class="sub">Dashed lines: the drafters were started again.</p>' if record.starts() and charts else "",
        f'<div class="charts">{"".join(charts)}</div>'
        if charts
        else "<p>No figures yet: the run reported no step.</p>",
        _evaluation_table(record),
        _event_table(record),
        _versions(record),
        f"<details><summary>Configuration</summary><pre>{escape(record.config or 'no config.yaml')}</pre></details>",
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,"><title>{name} · dflash-mp</title>'
        f"<style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _charts(record: RunRecord) -> Iterator[str | None]:
    again = [step for moment in record.starts() if (step := record.step_at(moment)) is not None]
    for title, key, label in (
        ("Loss", "loss", "weighted cross-entropy (nats)"),
        ("Acceptance length τ", "tau", "tokens per block, bonus included"),
    ):
        both = [
            _over_steps("training rows", record.train, key),
            _over_steps("held-out rows", record.held_out, key, True),
        ]
        yield line_chart(title, _STEP, Axis(label), both, again)
    yield line_chart(
        "Accuracy per slot at the end",
        Axis("slot of the block", whole=True),
        Axis("right, or accepted", True, True),
        _by_slot(record),
    )
    yield line_chart(
        "Accuracy per slot over training", _STEP, Axis("right guesses", True, True), _slots_over_steps(record), again
    )
    tau = [
        (
            f"{one['name']}",
            [(_drafter(d, file), d["figures"]["tau"]) for d in one["drafters"] if d["figures"]["tau"] is not None],
        )
        for file, one in _sets(record)
    ]
    yield bar_chart("τ by data set, decoding", Axis("tokens per target pass"), tau)
    yield line_chart(
        "Throughput",
        _STEP,
        Axis("tokens/s", zero=True),
        [_over_steps("all ranks", record.train, "tokens_per_second")],
        again,
    )
    yield line_chart(
        "Waits",
        _STEP,
        Axis("share of the ranks' time", True, True),
        [_over_steps("waiting for rows", record.train, "wait_share")],
        again,
    )
    paces = [("feeders could make", "feeders_rows_per_second"), ("drafters could take", "drafters_rows_per_second")]
    yield line_chart(
        "What both sides could do",
        _STEP,
        Axis("rows/s", zero=True),
        [_over_steps(n, record.train, k) for n, k in paces],
        again,
    )
    yield _faults(record)
    yield line_chart(
        "Gradient norm, before clipping",
        _STEP,
        Axis("norm", zero=True),
        [_over_steps("all ranks", record.train, "gradient_norm")],
        again,
    )


def _faults(record: RunRecord) -> str | None:
    """Warnings, errors and new starts, counted up over the run's time."""
    times = [line["time"] for line in (*record.train, *record.held_out)] + [event.time for event in record.events]
    if not times:
        return None
    first, last = min(times), max(times)
    unit, seconds = next(((u, s) for u, s in (("h", 3600), ("min", 60)) if last - first > 3 * s), ("s", 1))
    kinds = {
        "warnings": [event.time for event in record.events if event.level == "warning"],
        "errors": [event.time for event in record.events if event.level == "error"],
        "new starts": record.starts(),
    }
    series = []
    for name, moments in kinds.items():
        points = [(0.0, 0.0)]
        for count, moment in enumerate(sorted(moments), start=1):
            at = (moment - first) / seconds
            points += [(at, count - 1.0), (at, float(count))]
        series.append(Series(f"{name} ({len(moments)})", [*points, ((last - first) / seconds, points[-1][1])]))
    return line_chart(
        "Faults",
        Axis(f"time since the first line ({unit})", zero=True),
        Axis("count since the beginning", zero=True, whole=True),
        series,
    )


def _over_steps(name: str, lines: Sequence[dict[str, Any]], key: str, marks: bool = False) -> Series:
    points = [(float(line["step"]), float(line[key])) for line in lines if isinstance(line.get(key), (int, float))]
    return Series(name, points, marks)


def _by_slot(record: RunRecord) -> list[Series]:
    series = []
    for name, lines in (("training rows", record.train), ("held-out rows", record.held_out)):
        if lines:
            shares = _slots(lines[-1])
            series.append(Series(f"{name}, step {lines[-1]['step']}", list(enumerate(shares, start=1)), marks=True))
    for file, one in _sets(record):
        for drafter in one["drafters"]:
            shares = [float(share) for share in drafter["figures"]["slots"]]
            series.append(
                Series(
                    f"accepted: {one['name']}, {_drafter(drafter, file)}", list(enumerate(shares, start=1)), marks=True
                )
            )
    return series


def _slots_over_steps(record: RunRecord) -> list[Series]:
    slots = max((len(_slots(line)) for line in record.train), default=0)
    every = math.ceil(slots / _SLOTS_SHOWN) if slots else 1
    return [
        Series(
            f"slot {slot + 1}",
            [(float(line["step"]), _slots(line)[slot]) for line in record.train if len(_slots(line)) > slot],
        )
        for slot in range(0, slots, every)
    ]


def _slots(line: dict[str, Any]) -> list[float]:
    found = line.get("accuracy_per_slot")
    return [float(share) for share in found if isinstance(share, (int, float))] if isinstance(found, list) else []


def _sets(record: RunRecord) -> list[tuple[str, dict[str, Any]]]:
    return [(file, one) for file, evaluation in record.evaluations for one in evaluation["sets"]]


def _drafter(drafter: dict[str, Any], file: str) -> str:
    return f"{drafter['name']} ({file.removesuffix('.json')})"


def _summary(record: RunRecord) -> str:
    steps, last = record.steps, record.last_step
    state = f"step {last:,}" if steps is None else f"step {last:,} of {steps:,}"
    if steps is not None and last >= steps:
        state = f"trained to the end: {state}"
    moments = [line["time"] for line in (*record.train, *record.held_out)]
    more = f" · last figures {_clock(max(moments))}" if moments else ""
    torn = (
        f" · {record.broken_lines} broken line{'s' if record.broken_lines > 1 else ''} of metrics.jsonl left out"
        if record.broken_lines
        else ""
    )
    return f"{state}{more}{torn} · page made {_clock(time.time())} by dflash-mp {__version__}"


def _tiles(record: RunRecord) -> str:
    tiles = []
    for name, lines in (("training", record.train), ("held-out", record.held_out)):
        if lines:
            tiles += [(f"loss, {name}", f"{lines[-1]['loss']:.3f}"), (f"τ, {name}", f"{lines[-1]['tau']:.2f}")]
    rates = sorted(line["tokens_per_second"] for line in record.train if "tokens_per_second" in line)
    waits = [line["wait_share"] for line in record.train if "wait_share" in line]
    if rates:
        tiles.append(("tokens/s, median", f"{rates[len(rates) // 2]:,.0f}"))
    if waits:
        tiles.append(("waiting for rows, mean", f"{sum(waits) / len(waits):.0%}"))
    faults = [event for event in record.events if event.level in ("warning", "error")]
    tiles += [("new starts", str(len(record.starts()))), ("warnings and errors", str(len(faults)))]
    return (
        '<div class="tiles">'
        + "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in tiles)
        + "</div>"
    )


def _evaluation_table(record: RunRecord) -> str:
    rows = [
        (
            one["name"],
            _drafter(d, file),
            _figure(d["figures"]["tau"]),
            f"{d['speed_up']:.2f}×",
            _figure(d["figures"].get("tokens_per_second")),
        )
        for file, one in _sets(record)
        for d in one["drafters"]
    ]
    return _table("Decoding", ("data set", "drafter", "τ", "speed-up", "tokens/s"), rows) if rows else ""


def _event_table(record: RunRecord) -> str:
    found = [event for event in record.events if event.level in ("warning", "error")]
    if not found:
        return "<h2>Warnings and errors</h2><p>None in the logs.</p>"
    title = (
        "Warnings and errors"
        if len(found) <= _EVENT_ROWS
        else f"Warnings and errors, the last {_EVENT_ROWS} of {len(found)}"
    )
    rows = [(_clock(event.time), event.who, event.level, event.text) for event in found[-_EVENT_ROWS:]]
    return _table(title, ("time", "process", "level", "what"), rows)


def _versions(record: RunRecord) -> str:
    facts = record.checkpoint
    rows: list[tuple[str, str]] = [
        (name, str(facts[name])) for name in ("version", "torch", "step", "seed") if name in facts
    ]
    plan = facts.get("plan") if isinstance(facts.get("plan"), dict) else {}
    target = plan.get("target") if isinstance(plan, dict) else None
    if isinstance(target, dict):
        rows += [
            (f"target {name}", str(value)) for name, value in target.items() if isinstance(value, (str, int, float))
        ]
    return _table("Versions and target, from the newest checkpoint", ("", ""), rows) if rows else ""


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<h2>{escape(title)}</h2><div class="wide"><table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, (int, float)) else "–"


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
