"""What the stream must carry, and what the path carries.

A row has the same bytes whoever takes it; GB/s follow from rows/s: those given, else those that the run's drafters could take when it ran
last. A path on this machine is probed with a feeder process and rows of random bytes; a path to another host with the embedding of the
feeder that runs there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dflash_mp.doctor.finding import Finding, gib, green, red, yellow
from dflash_mp.doctor.fit import Plans

_COMFORT = 1.5  # times what is needed
_METRIC = "drafters_rows_per_second"


def measured_rate(run_dir: Path) -> float | None:
    """Rows/s that the drafters of this run could take when they last said so; None if they never did."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if _METRIC in line:
            try:
                return float(json.loads(line)[_METRIC])
            except (ValueError, KeyError, TypeError):
                continue
    return None


def check_bandwidth(plans: Plans, rate: float | None, paths: Mapping[str, float], feeders: int = 1) -> list[Finding]:
    """`rate`: rows/s of the whole run; `paths`: bytes/s by name of the path to a feeder, every one used for its share of `feeders`."""
    info, row = plans.size.info, plans.row_bytes()
    tokens = plans.config.data.row_tokens
    formula = "K·H + 4·K + 13" if plans.row().unpacked_nbytes else "2·K·H + 13 (4 in place of 2 in fp32)"
    per_token = f"{row / tokens:,.0f} bytes per token, {gib(row)} per row"
    if rate is None:
        findings = [green("stream", f"{per_token}; give --rows-per-second to compare the paths with what a run needs")]
    else:
        findings = [
            green(
                "stream",
                f"{per_token}; {rate:.3g} rows/s = {rate * tokens:,.0f} tokens/s need {rate * row / 1e9:.3g} GB/s",
                (f"{formula} bytes per token, K = {len(info.layer_ids)}, H = {info.hidden_size}",),
            )
        ]
    for name, carried in paths.items():
        findings.append(_path(name, carried, row, tokens, None if rate is None else rate * row / max(1, feeders)))
    return findings


def _path(name: str, carried: float, row: int, tokens: int, needed: float | None) -> Finding:
    about = "path"
    text = (
        f"{name} carries {carried / 1e9:.2f} GB/s = {carried / row:.3g} rows/s = {carried / row * tokens:,.0f} tokens/s"
    )
    if needed is None:
        return green(about, text)
    text += f"; a feeder's share is {needed / 1e9:.2f} GB/s"
    remedy = (
        "more feeders on other hosts or ports share the load; on one machine use ipc, between hosts a faster network"
    )
    if carried < needed:
        return red(about, text, remedy, 5)
    if carried < _COMFORT * needed:
        return yellow(about, text, remedy)
    return green(about, text)
