"""The manifest of a prepared dataset: what it holds, from what it was made, and the name of its content.

`manifest.json` is written last and read first. It holds no time and no path but the sources': equal inputs give equal bytes.
`fingerprint` covers the settings and the rows, and names the dataset in a stream, a checkpoint and an export.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash_mp.errors import DataError

FORMAT = 1
FILE = "manifest.json"
PROMPTS = "held_out_prompts.jsonl"


@dataclass
class SplitCounts:
    """Sizes of one split, and `content`, a SHA-256 over its rows in order."""

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    padding_tokens: int = 0
    content: str = ""


@dataclass
class SourceCounts:
    """What became of a source's documents. `cut`: kept, but shortened; `dropped`: by reason."""

    path: str
    documents: int = 0
    kept: int = 0
    cut: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass
class StoredFile:
    """Size and SHA-256 of a file of the dataset."""

    bytes: int
    sha256: str


@dataclass
class Manifest:
    """See the fields of `settings` in `data/prepare.py`; `files` by name."""

    row_tokens: int
    seed: int
    thinking: str
    tokenizer: str
    chat_template: str
    shard_rows: int
    settings: dict[str, Any]
    train: SplitCounts
    held_out: SplitCounts
    sources: list[SourceCounts]
    files: dict[str, StoredFile]
    format: int = FORMAT

    @property
    def fingerprint(self) -> str:
        """16 hex digits over the settings and the rows of both splits."""
        facts = [self.format, self.settings, self.train.content, self.held_out.content]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def dropped(self) -> dict[str, int]:
        """Documents left out, by reason, over all sources."""
        total: dict[str, int] = {}
        for source in self.sources:
            for reason, count in source.dropped.items():
                total[reason] = total.get(reason, 0) + count
        return total

    def write(self, directory: Path) -> None:
        """Write `manifest.json` into `directory`."""
        text = json.dumps({"fingerprint": self.fingerprint, **asdict(self)}, indent=1, ensure_ascii=False)
        (directory / FILE).write_text(text + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """The manifest in `directory`. Raises `DataError` when there is none or it is not whole."""
    path = directory / FILE
    again = "run dflash-mp prepare --force"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        fingerprint = tree.pop("fingerprint")
        if tree["format"] != FORMAT:
            raise DataError(f"{path} has format {tree['format']}; this version reads {FORMAT}", again)
        manifest = Manifest(
            **{
                **tree,
                "train": SplitCounts(**tree["train"]),
                "held_out": SplitCounts(**tree["held_out"]),
                "sources": [SourceCounts(**source) for source in tree["sources"]],
                "files": {name: StoredFile(**file) for name, file in tree["files"].items()},
            }
        )
    except FileNotFoundError:
        what = "does not exist" if not directory.exists() else f"holds no {FILE}"
        raise DataError(
            f"the prepared dataset {directory} {what}", "run dflash-mp prepare, or check data.path"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", "check its permissions") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error})", again) from None
    if manifest.fingerprint != fingerprint:
        raise DataError(f"{path} was changed: its fingerprint {fingerprint} is not that of its content", again)
    return manifest
