"""The tables that `dflash-mp eval` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from dflash_mp.decode.evaluate import DrafterResult, Evaluation, SetResult


def print_report(evaluation: Evaluation, console: Console) -> None:
    """For each set of prompts a table of figures and one of acceptance. Fits 80 columns up to a block size of 16."""
    options = evaluation.options
    way = "greedy" if options["temperature"] == 0 else f"temperature {options['temperature']:g}"
    console.print(
        f"target {evaluation.target} · {evaluation.dtype} on {evaluation.device} · {way} · "
        f"at most {options['max_new_tokens']} new tokens · thinking {evaluation.thinking}",
        highlight=False,
    )
    for result in evaluation.sets:
        console.print(_figures_table(result))
        console.print(_acceptance_table(result))
        for line in _remarks(result, evaluation.dtype):
            console.print(line, highlight=False)


def _figures_table(result: SetResult) -> Table:
    table = Table(
        title=f"{result.name}: {result.plain.prompts} prompts",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("drafter", overflow="fold")
    for heading in ("tokens", "τ", "τ/prompt", "tokens/s", "speed-up", "same output"):
        table.add_column(heading, justify="right", no_wrap=True)
    plain = result.plain
    table.add_row("none", str(plain.tokens), "", "", f"{plain.tokens_per_second:.1f}", "1.00×", "")
    for drafter in result.drafters:
        found = drafter.figures
        same = "" if drafter.differing is None else f"{found.prompts - len(drafter.differing)} of {found.prompts}"
        table.add_row(
            drafter.name,
            str(found.tokens),
            _number(found.tau),
            _number(found.tau_by_prompt),
            f"{found.tokens_per_second:.1f}",
            f"{drafter.speed_up:.2f}×",
            same,
        )
    return table


def _acceptance_table(result: SetResult) -> Table:
    """For each drafter two lines over the block: share of blocks in which slot k was accepted, and of blocks of length k."""
    width = max((len(d.figures.lengths) for d in result.drafters), default=0)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("% of blocks", no_wrap=True)
    for number in range(1, width + 1):
        table.add_column(str(number), justify="right", no_wrap=True, min_width=3)
    for drafter in result.drafters:
        blocks = max(1, drafter.figures.blocks)
        table.add_row(drafter.name)
        table.add_row("  slot accepted", *(_per_cent(share) for share in drafter.figures.slots))
        table.add_row("  length", *(_per_cent(count / blocks) for count in drafter.figures.lengths))
    return table


def _remarks(result: SetResult, dtype: str) -> list[str]:
    lines = []
    if result.left_out:
        lines.append(f"left out, too long for the target's context: {result.left_out}")
    for drafter in result.drafters:
        if drafter.differing:
            lines.append(_difference(drafter, dtype))
    return lines


def _difference(drafter: DrafterResult, dtype: str) -> str:
    places = ", ".join(f"prompt {number} from token {place}" for number, place in (drafter.differing or [])[:4])
    if dtype == "float32":
        return f"[red]{drafter.name}: the output differs from the target's own ({places}); in float32 it must not[/red]"
    return f"{drafter.name}: the output differs from the target's own ({places}): in {dtype}, reading a block rounds otherwise than reading a token"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _per_cent(share: float) -> str:
    return f"{100 * share:.0f}"
