"""Small sources and datasets for the tests of prepare and the store."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from chat_families import CHATML, byte_tokenizer

from dflash_mp.config import DataConfig
from dflash_mp.data.prepare import prepare
from dflash_mp.data.store import PreparedDataset

WORDS = ["the", "answer", "is", "one", "that", "they", "gave", "then", "and", "there", "in", "other", "tones", "user"]


def pairs(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Question and answer pairs of 2 to 30 words, all different."""
    words = random.Random(seed)
    return [
        {"prompt": f"question {n}", "response": " ".join(words.choices(WORDS, k=words.randint(2, 30)))}
        for n in range(count)
    ]


def write_jsonl(path: Path, records: list[Any]) -> Path:
    """Write `records` as JSON lines, making the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def data_config(path: Path, *sources: Path, **options: Any) -> DataConfig:
    """A `DataConfig` with small rows."""
    defaults = {"row_tokens": 256, "min_supervised_tokens": 8, "held_out": 0.2, "shard_tokens": 2048}
    listed = [{"path": str(source)} for source in sources]
    return DataConfig.model_validate({"path": path, "sources": listed, **defaults, **options})


def prepare_pairs(directory: Path, count: int = 200, template: str | None = CHATML, **options: Any) -> PreparedDataset:
    """A dataset of `count` pairs at `directory/"prepared"`."""
    source = write_jsonl(directory / "pairs.jsonl", pairs(count))
    config = data_config(directory / "prepared", source, **options)
    prepare(config, byte_tokenizer(template), seed=1)
    return PreparedDataset.open(config.path)


def stored_files(path: Path) -> dict[str, bytes]:
    """Every file under `path`, by name."""
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}
