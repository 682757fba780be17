"""Findings for people (a table on a terminal, a line each elsewhere) and for machines (JSON)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_mp.doctor.finding import Finding, exit_code

_MARKS = {"green": "ok", "yellow": "warning", "red": "FAILS"}


def as_json(findings: Sequence[Finding]) -> str:
    """An object with the exit code and all findings."""
    return json.dumps(
        {"exit_code": exit_code(findings), "findings": [asdict(finding) for finding in findings]}, indent=1
    )


def show(findings: Sequence[Finding], console: Console, details: bool) -> None:
    """Print them, and a last line that counts. `details`: also how memory and bandwidth were reckoned."""
    if console.is_terminal:
        console.print(_table(findings, details))
    else:
        for line in lines(findings, details):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    counts = Counter(finding.level for finding in findings)
    text = f"{counts['green']} green, {counts['yellow']} yellow, {counts['red']} red"
    console.print(
        f"{text}: {'a run would fail or go wrong' if counts['red'] else 'nothing speaks against a run'}",
        highlight=False,
    )


def lines(findings: Sequence[Finding], details: bool) -> list[str]:
    """Plain text: the mark, what it is about, what was found, and below it the remedy."""
    out = []
    for finding in findings:
        out.append(f"{_MARKS[finding.level]:8}{finding.about}: {finding.found}")
        if finding.remedy:
            out.append(f"{'':8}→ {finding.remedy}")
        if details or finding.level == "red":
            out += [f"{'':10}{line}" for line in finding.details]
    return out


def _table(findings: Sequence[Finding], details: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        text = Text(finding.found)
        if details or finding.level == "red":
            text.append("".join(f"\n{line}" for line in finding.details), style="dim")
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style="bold")
        table.add_row(Text("●", style=finding.level), Text(finding.about, style="bold"), text)
    return table
