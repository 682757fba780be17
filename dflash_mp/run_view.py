"""What `dflash-mp run` shows: one live view on a terminal; elsewhere, and as JSON, the lines of its parts.

Both read what the parts write (their log files and `metrics.jsonl`) and never stand between a part and its log: a slow terminal slows
nothing. Each reads at most a MiB of a log at a time; lines that are not metrics are skipped, not failed on. An output that is gone (a closed
pipe, a hung-up terminal) ends the view with one warning, and not the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dflash_mp import logs
from dflash_mp.supervisor import Running

log = logging.getLogger(__name__)
_READ_BYTES = 1 << 20
_REFRESH_SECONDS = 0.5
_EVENT_LINES = 10


class LogTail:
    """The complete lines that a growing file got since the last call. A file that became shorter is read anew."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self._offset = start
        self._rest = b""

    def new_lines(self) -> list[str]:
        try:
            with self.path.open("rb") as file:
                if self.path.stat().st_size < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                data = file.read(_READ_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = re.split(rb"[\r\n]+", self._rest + data)
        return [line.decode(errors="replace") for line in lines if line.strip()]


class PlainView:
    """Passes on each new line of each part. Lines of a log say themselves who speaks and when; others get their part's name, or
    become an object of their own when the log is JSON.
    """

    def __init__(self, out: Any = None, settings: logs.Settings = logs.DEFAULT) -> None:
        self._out = out or sys.stdout
        self._settings = settings
        self._tails: dict[str, LogTail] = {}

    def __call__(self, running: Sequence[Running]) -> None:
        for one in running:
            tail = self._tails.setdefault(one.part.name, LogTail(one.part.log, one.log_start))
            for line in tail.new_lines():
                self._out.write(f"{self._said(one.part.name, line)}\n")
            self._out.flush()

    def _said(self, part: str, line: str) -> str:
        if logs.is_line(line):
            return line
        if self._settings.format == "json":
            role, _, number = part.partition(" ")
            return logs.line(logs.Speaker(role, int(number) if number.isdigit() else None), self._settings, line)
        return f"[{part}] {logs.redacted(line)}"

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class LiveView:
    """A block that stays in place: the training's progress, each part's state and last line, and the latest lines of the drafters."""

    def __init__(self, run_dir: Path, steps: int, console: Console) -> None:
        self._run_dir, self._steps = run_dir, steps
        self._started = time.monotonic()
        self._drawn = 0.0
        self._tails: dict[str, LogTail] = {}
        self._last: dict[str, str] = {}
        self._events: deque[str] = deque(maxlen=_EVENT_LINES)
        metrics = run_dir / "metrics.jsonl"
        self._metrics_tail = LogTail(metrics, metrics.stat().st_size if metrics.exists() else 0)
        self._metrics: dict[str, Any] = {}
        self._live = Live(console=console, auto_refresh=False)

    def __call__(self, running: Sequence[Running]) -> None:
        for one in running:
            tail = self._tails.setdefault(one.part.name, LogTail(one.part.log, one.log_start))
            for line in tail.new_lines():
                self._last[one.part.name] = line
                if not one.part.serves:
                    self._events.append(line)
        for line in self._metrics_tail.new_lines():
            self._metrics.update(parse_metrics(line))
        if time.monotonic() - self._drawn >= _REFRESH_SECONDS or all(one.exit_code is not None for one in running):
            self._drawn = time.monotonic()
            self._live.update(self._block(running), refresh=True)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def _block(self, running: Sequence[Running]) -> Group:
        step = int(self._metrics.get("step", 0))
        head = Table.grid(padding=(0, 2))
        clock = time.strftime("%H:%M:%S", time.gmtime(time.monotonic() - self._started))
        head.add_row(
            Text(str(self._run_dir), style="bold"),
            Text(clock),
            Text(f"step {step} of {self._steps}"),
            ProgressBar(total=self._steps, completed=step, width=30),
            Text(describe_metrics(self._metrics), style="cyan"),
        )
        parts = Table.grid(padding=(0, 2))
        for one in running:
            line = self._last.get(one.part.name, "starting") if one.part.serves or not self._events else ""
            parts.add_row(one.part.name, one.state, Text(line, overflow="ellipsis", no_wrap=True, style="dim"))
        events = (Text(line, overflow="ellipsis", no_wrap=True, style="dim") for line in self._events)
        return Group(head, parts, *events)


class View:
    """Shows `view` for as long as `out`, the stream that it writes to, takes it. The first OSError switches it off; nothing is raised."""

    def __init__(self, view: LiveView | PlainView, out: TextIO) -> None:
        self._view, self._out = view, out
        self._on = True

    def __call__(self, running: Sequence[Running]) -> None:
        if self._on:
            try:
                self._view(running)
            except OSError as error:
                self._switch_off(error)

    def __enter__(self) -> View:
        try:
            self._view.__enter__()
        except OSError as error:
            self._switch_off(error)
        return self

    def __exit__(self, *error: object) -> None:
        if self._on:
            try:
                self._view.__exit__(*error)
            except OSError as gone:
                self._switch_off(gone)

    def _switch_off(self, error: OSError) -> None:
        self._on = False
        logs.to_nowhere(self._out)
        with contextlib.suppress(OSError):  # of that same stream
            self._view.__exit__()
        log.warning("the run goes on, but shows nothing more: %s; logs are in RUN/logs", error)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the process."""
        raise BrokenPipeError("the output's reader is gone")


def open_view(run_dir: Path, steps: int, settings: logs.Settings) -> View:
    """The view for where the output goes; a context manager to be called with the running parts."""
    console = _Console()
    live = console.is_terminal and settings.format == "text" and settings.level in ("debug", "info")
    return View(LiveView(run_dir, steps, console) if live else PlainView(settings=settings), sys.stdout)


def parse_metrics(line: str) -> dict[str, Any]:
    """The figures in a line of `metrics.jsonl`; nothing when it is not one."""
    try:
        figures = json.loads(line)
    except ValueError:
        return {}
    return {k: v for k, v in figures.items() if isinstance(v, (int, float))} if isinstance(figures, dict) else {}


def describe_metrics(metrics: dict[str, Any]) -> str:
    """The figures that matter while one watches, those that there are."""
    shown = (
        ("loss", "loss {:.3f}"),
        ("tau", "τ {:.2f}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("wait_share", "waiting for rows {:.0%}"),
    )
    return " · ".join(form.format(metrics[key]) for key, form in shown if key in metrics)
