"""The page docs/operations.md as something to run: its commands by host, and its pieces of configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "operations.md"


def section(title: str) -> str:
    """The text below the heading `title`."""
    text = PAGE.read_text(encoding="utf-8")
    return re.split(r"^## ", text.partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[0]


def commands(title: str) -> list[tuple[str, str]]:
    """(host, command line) of each line "    HOST$ command" of a section, in order."""
    return re.findall(r"^    (\w*)\$ (.+)$", section(title), re.MULTILINE)


def configuration(title: str) -> dict[str, Any]:
    """The section's first block of YAML."""
    found = re.search(r"```yaml\n(.*?)```", section(title), re.DOTALL)
    assert found is not None
    tree: dict[str, Any] = yaml.safe_load(found[1])
    return tree
