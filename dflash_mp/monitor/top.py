"""`dflash-mp top`: a running job as its endpoints show it: feeders, ranks, who waits, rates, the last warnings and errors.

Reads endpoints only, so it runs on any host that reaches them and costs the run nothing but the answers. Rates are differences between two
readings. `once` prints one plain picture, which is the same text on a terminal and in a pipe. An endpoint that does not answer is a line that says
why; nothing waits for it longer than the scraper's time-out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dflash_mp.monitor.scrape import Reading, Scraper

_EVENT_LINES = 8
_MUCH = 0.1  # a share of time worth a word
_WIDE = 128  # columns that hold a table with memory and endpoint


def watch(scraper: Scraper, console: Console, seconds: float) -> None:
    """Show the run until Ctrl-C, a new picture every `seconds`."""
    before: dict[str, Reading] = {}
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            now = scraper.read()
            live.update(picture(now, before, console.width), refresh=True)
            before = {**before, **_by_endpoint(reading for reading in now if not reading.problem)}
            time.sleep(seconds)


def once(scraper: Scraper, console: Console, seconds: float) -> bool:
    """Print one picture, with rates over `seconds`. False when no endpoint answered."""
    before = _by_endpoint(scraper.read())
    if any(not reading.problem for reading in before.values()):
        time.sleep(seconds)
    now = scraper.read()
    console.print(picture(now, before, console.width))
    return any(not reading.problem for reading in now)


def picture(now: Sequence[Reading], before: Mapping[str, Reading], width: int) -> RenderableType:
    """Everything about the run, with rates since `before`; what doesn't fit `width` columns is left out."""
    wide = width >= _WIDE
    seen = [_Seen(reading, before.get(reading.endpoint)) for reading in now if not reading.problem]
    feeders = sorted((s for s in seen if s.now.role == "feeder"), key=lambda s: s.now.index)
    ranks = sorted((s for s in seen if s.now.role == "drafter"), key=lambda s: s.now.index)
    parts: list[RenderableType] = [_head(seen, ranks), Text(who_waits(feeders, ranks), style="yellow"), Text("")]
    if feeders:
        parts.append(_feeder_table(feeders, wide))
    if ranks:
        parts.append(_rank_table(ranks, wide))
    for reading in now:
        if reading.problem:
            parts.append(Text(f"{reading.endpoint}: {reading.problem}", style="red"))
    parts += list(_events(seen))
    return Group(*parts)


class _Seen:
    """A process, at two moments."""

    def __init__(self, now: Reading, before: Reading | None) -> None:
        self.now = now
        # A process that was started anew in between counts from 0 again.
        same = before is not None and not before.problem and self._started(before) == self._started(now)
        self._before = before if same and before is not None and now.moment > before.moment else None

    @property
    def name(self) -> str:
        return f"{self.now.role} {self.now.index}"

    def rate(self, metric: str, **labels: str) -> float | None:
        """Growth per second; None before there are two readings."""
        if self._before is None:
            return None
        later, earlier = self.now.value(metric, **labels), self._before.value(metric, **labels)
        if later is None or earlier is None:
            return None
        return max(0.0, later - earlier) / (self.now.moment - self._before.moment)

    @staticmethod
    def _started(reading: Reading) -> float | None:
        return reading.value("dflash_mp_start_time_seconds")


def who_waits(feeders: Sequence[_Seen], ranks: Sequence[_Seen]) -> str:
    """One sentence about which side waits for the other."""
    waiting = _mean(rank.rate("dflash_mp_stream_waited_seconds_total") for rank in ranks)
    idle = _mean(_share(feeder, "idle") for feeder in feeders)
    blocked = _mean(_share(feeder, "blocked") for feeder in feeders)
    if waiting is None or idle is None or blocked is None:
        return "who waits: not known before two readings of a feeder and a rank"
    text = f"drafters wait {waiting:.0%} of their time for rows, feeders {idle + blocked:.0%} of theirs for drafters"
    if waiting >= _MUCH and idle + blocked < _MUCH:
        return f"{text}: the feeders are the slower side"
    if idle + blocked >= _MUCH and waiting < _MUCH:
        return f"{text}: the drafters are the slower side"
    if waiting >= _MUCH:
        return f"{text}: both wait, so something between them is slow, or the run has just begun"
    return f"{text}: well balanced"


def _head(seen: Sequence[_Seen], ranks: Sequence[_Seen]) -> Text:
    runs = sorted({s.now.run for s in seen})
    words = [f"run {', '.join(runs)}" if runs else "no endpoint answers"]
    if len(runs) > 1:
        words[0] += " (endpoints of several runs)"
    first = next((rank for rank in ranks if rank.now.index == 0), None)
    if first is not None:
        value = first.now.value
        step, last = value("dflash_mp_train_step"), value("dflash_mp_train_last_step")
        if step is not None and last is not None:
            words.append(f"step {step:.0f} of {last:.0f}")
        for name, metric, form in (
            ("loss", "dflash_mp_loss", "{:.3f}"),
            ("τ", "dflash_mp_acceptance_length_tokens", "{:.2f}"),
        ):
            train, held_out = value(metric, split="train"), value(metric, split="held_out")
            if train is not None:
                more = "" if held_out is None else f" (held-out {form.format(held_out)})"
                words.append(f"{name} {form.format(train)}{more}")
        tokens = first.rate("dflash_mp_train_tokens_total")
        if tokens is not None:
            words.append(f"{tokens:,.0f} tokens/s")
    words.append(time.strftime("%H:%M:%S"))
    return Text(" · ".join(words), style="bold")


def _feeder_table(feeders: Sequence[_Seen], wide: bool) -> Table:
    table = _table(
        wide, "feeder", "rows/s", "tokens/s", "MB/s", "computing", "idle", "blocked", "queued", "drafters", "errors"
    )
    for one in feeders:
        bytes_ = one.rate("dflash_mp_feeder_delivered_bytes_total")
        table.add_row(
            one.name,
            _number(one.rate("dflash_mp_feeder_made_rows_total"), "{:.2f}"),
            _number(one.rate("dflash_mp_feeder_made_tokens_total"), "{:,.0f}"),
            _number(None if bytes_ is None else bytes_ / 1e6, "{:.1f}"),
            *(_number(_share(one, state), "{:.0%}") for state in ("computing", "idle", "blocked")),
            _number(one.now.value("dflash_mp_feeder_queued_rows"), "{:.0f}"),
            _number(one.now.value("dflash_mp_feeder_drafters"), "{:.0f}"),
            _number(one.now.value("dflash_mp_feeder_errors_total"), "{:.0f}"),
            *((*_memory(one.now), one.now.endpoint) if wide else ()),
        )
    return table


def _rank_table(ranks: Sequence[_Seen], wide: bool) -> Table:
    table = _table(
        wide, "drafter", "rows/s", "MB/s", "waiting", "ready", "asked", "free", "feeders", "retries", "errors"
    )
    for one in ranks:
        bytes_ = one.rate("dflash_mp_stream_received_bytes_total")
        connected = one.now.by_label("dflash_mp_stream_feeder_connected", "feeder")
        window = one.now.by_label("dflash_mp_stream_window_rows", "state")
        table.add_row(
            one.name,
            _number(one.rate("dflash_mp_stream_rows_total"), "{:.2f}"),
            _number(None if bytes_ is None else bytes_ / 1e6, "{:.1f}"),
            _number(one.rate("dflash_mp_stream_waited_seconds_total"), "{:.0%}"),
            *(_number(window.get(state), "{:.0f}") for state in ("ready", "asked", "free")),
            f"{sum(connected.values()):.0f} of {len(connected)}",
            _number(one.now.value("dflash_mp_stream_retries_total"), "{:.0f}"),
            _number(one.now.value("dflash_mp_stream_errors_total"), "{:.0f}"),
            *((*_memory(one.now), one.now.endpoint) if wide else ()),
        )
    return table


def _table(wide: bool, first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2 if wide else 1, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True)
    for column in (*columns, *(("memory", "GPU") if wide else ())):
        table.add_column(column, justify="right", no_wrap=True)
    if wide:
        table.add_column("endpoint", no_wrap=True, style="dim")
    return table


def _events(seen: Sequence[_Seen]) -> Iterator[Text]:
    found = sorted(((event, one.name) for one in seen for event in one.now.events), key=lambda pair: pair[0].time)
    if found:
        yield Text("\nlast warnings and errors", style="dim")
    for event, name in found[-_EVENT_LINES:]:
        clock = time.strftime("%H:%M:%S", time.localtime(event.time))
        line = f"{clock} {name} | {event.level}: {event.text}"
        yield Text(line, style="red" if event.level == "error" else "", overflow="ellipsis", no_wrap=True)


def _memory(reading: Reading) -> tuple[str, str]:
    host = reading.value("dflash_mp_resident_memory_bytes")
    gpu = reading.by_label("dflash_mp_gpu_memory_bytes", "kind")
    on_gpu = f"{gpu['reserved'] / 1e9:.1f} of {gpu['total'] / 1e9:.1f} GB" if gpu.get("total") else "–"
    return _number(None if host is None else host / 1e9, "{:.1f} GB"), on_gpu


def _share(feeder: _Seen, state: str) -> float | None:
    return feeder.rate("dflash_mp_feeder_time_seconds_total", state=state)


def _by_endpoint(readings: Iterable[Reading]) -> dict[str, Reading]:
    return {reading.endpoint: reading for reading in readings}


def _mean(values: Iterator[float | None] | Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
