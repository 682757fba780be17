"""The table of metrics in docs/operations.md is the catalogue's. `python tests/monitor/test_metrics_table.py` rewrites it."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_mp.monitor.catalogue import table

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
_BLOCK = re.compile(r"(<!-- metrics: [^>]* -->\n).*(<!-- /metrics -->)", re.DOTALL)


def test_the_documentation_lists_every_metric_as_it_is() -> None:
    found = _BLOCK.search(OPERATIONS.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0].removeprefix(found[1]).removesuffix(found[2]) == table(), f"run python {Path(__file__).name}"


if __name__ == "__main__":
    text = OPERATIONS.read_text(encoding="utf-8")
    OPERATIONS.write_text(_BLOCK.sub(lambda match: match[1] + table() + match[2], text), encoding="utf-8")
