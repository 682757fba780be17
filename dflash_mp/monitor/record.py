"""What a run directory tells: figures, starts, warnings, evaluations, configuration and versions, of a run that ended, goes on, or was cut short.

Reads `metrics.jsonl`, `logs/`, `config.yaml`, the newest checkpoint's `state.json`, and every `*.json` of `dflash-mp eval` in the directory or below
`eval/`. Nothing is required but the directory. A line that is not whole, such as the last one of a killed process, is left out and counted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from dflash_mp.errors import DflashError
from dflash_mp.logs import redacted

_MOST_LOG_BYTES = 32 << 20  # of one log file, its end
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ([a-z]+(?: \d+)?) \| (?:(warning|error|critical): )?(.*)")
_START = re.compile(r"starts ([a-z]+(?: \d+)?): ")


@dataclass(frozen=True)
class LogEvent:
    """A warning, an error, or the start of a part (`level` "start"). `time`: seconds since the epoch."""

    time: float
    who: str
    level: str
    text: str


@dataclass
class RunRecord:
    """A run directory, read. `train` and `held_out` are lines of figures in the order of their steps."""

    directory: Path
    train: list[dict[str, Any]] = field(default_factory=list)
    held_out: list[dict[str, Any]] = field(default_factory=list)
    broken_lines: int = 0
    events: list[LogEvent] = field(default_factory=list)
    evaluations: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # file name and contents
    config: str = ""
    checkpoint: dict[str, Any] = field(default_factory=dict)  # facts of the newest

    @property
    def steps(self) -> int | None:
        """Steps to train, as configured."""
        try:
            steps = yaml.safe_load(self.config)["train"]["steps"]
        except (yaml.YAMLError, LookupError, TypeError):
            return None
        return steps if isinstance(steps, int) else None

    @property
    def last_step(self) -> int:
        return max((int(line["step"]) for line in (*self.train, *self.held_out)), default=0)

    def starts(self) -> list[float]:
        """When drafters were started, after the first time."""
        return sorted(event.time for event in self.events if event.level == "start" and event.who == "drafters")[1:]

    def step_at(self, moment: float) -> float | None:
        """The step that had been reported by then."""
        return max((line["step"] for line in self.train if line["time"] <= moment), default=None)


def read_run(directory: Path, evaluations: Sequence[Path] = ()) -> RunRecord:
    """Read the run in `directory`, and further reports of `dflash-mp eval`. Raises `DflashError` when there is no run."""
    record = RunRecord(directory)
    if not any((directory / name).exists() for name in ("metrics.jsonl", "config.yaml", "logs")):
        raise DflashError(
            f"{directory} holds no run: neither metrics.jsonl nor config.yaml nor logs",
            "name the run_dir of a configuration that was started with dflash-mp run",
        )
    record.config = redacted(_text(directory / "config.yaml"))
    _read_metrics(record, _text(directory / "metrics.jsonl"))
    for log in sorted((directory / "logs").glob("*.log")):
        record.events += _events(log)
    record.events.sort(key=lambda event: event.time)
    for file in sorted([*directory.glob("*.json"), *directory.glob("eval/*.json")]):
        if (found := _evaluation(file)) is not None:
            record.evaluations.append((file.name, found))
    for file in evaluations:
        found = _evaluation(file)
        if found is None:
            raise DflashError(f"{file} is no report of dflash-mp eval", "make one with dflash-mp eval --json FILE")
        record.evaluations.append((file.name, found))
    states = sorted(directory.glob("checkpoints/step-*/state.json"))
    if states:
        record.checkpoint = _json_object(_text(states[-1])) or {}
    return record


def _read_metrics(record: RunRecord, text: str) -> None:
    """The later line of a step counts: it was trained again."""
    found: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "held_out": {}}
    for line in text.split("\n"):
        if not line.strip():
            continue
        figures = _json_object(line)
        if figures is None or figures.get("kind") not in found or not _whole(figures):
            record.broken_lines += 1
        else:
            found[figures["kind"]][int(figures["step"])] = figures
    record.train, record.held_out = ([lines[step] for step in sorted(lines)] for lines in found.values())


def _whole(figures: dict[str, Any]) -> bool:
    numbers = all(isinstance(figures.get(key), (int, float)) for key in ("time", "loss", "tau"))
    return numbers and isinstance(figures.get("step"), int) and math.isfinite(figures["time"])


def _events(log: Path) -> Iterator[LogEvent]:
    for line in _text(log, _MOST_LOG_BYTES).splitlines():
        if line.startswith("{"):
            event = _json_event(line)
        else:
            match = _LINE.fullmatch(line)
            event = None
            if match is not None:
                moment = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").timestamp()
                event = _event(moment, match[2], match[3] or "info", match[4])
        if event is not None:
            yield event


def _json_event(line: str) -> LogEvent | None:
    tree = _json_object(line)
    try:
        if tree is None:
            return None
        moment = datetime.fromisoformat(str(tree["time"]).replace("Z", "+00:00")).timestamp()
        who = str(tree["role"]) if tree.get("rank") is None else f"{tree['role']} {tree['rank']}"
        return _event(moment, who, str(tree["level"]), str(tree["message"]))
    except (KeyError, ValueError):
        return None


def _event(moment: float, who: str, level: str, text: str) -> LogEvent | None:
    start = _START.match(text) if who == "run" else None
    if start is not None:
        return LogEvent(moment, start[1], "start", text)
    if level in ("warning", "error", "critical"):
        return LogEvent(moment, who, "warning" if level == "warning" else "error", redacted(text))
    return None


def _evaluation(file: Path) -> dict[str, Any] | None:
    tree = _json_object(_text(file))
    if tree is None or not isinstance(tree.get("sets"), list):
        return None
    try:
        for one in tree["sets"]:
            if not isinstance(one["name"], str):
                return None
            for drafter in one["drafters"]:
                figures = drafter["figures"]
                if not (figures["tau"] is None or math.isfinite(figures["tau"])) or not isinstance(
                    figures["slots"], list
                ):
                    return None
                str(drafter["name"])
                float(drafter["speed_up"])
    except (KeyError, TypeError, ValueError):
        return None
    return tree


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        tree = json.loads(text)
    except ValueError:
        return None
    return tree if isinstance(tree, dict) else None


def _text(file: Path, most: int | None = None) -> str:
    """The file's text, or of a longer one its end; "" where there is none."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(max(0, size - most) if most is not None else 0)
            return opened.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise DflashError(f"cannot read {file}: {error.strerror}", "look at its permissions") from None
