"""A run small enough for a test or a drill: a tiny random target, made-up conversations, a prepared dataset and a configuration file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

WORDS = [
    "the",
    "a",
    "red",
    "green",
    "small",
    "large",
    "cat",
    "dog",
    "tree",
    "house",
    "runs",
    "sees",
    "has",
    "under",
    "over",
    "near",
]


def write_conversations(file: Path, count: int, seed: int = 0) -> None:
    """`count` prompt/response pairs of random words."""
    draw = random.Random(seed)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(count):
            prompt, response = (" ".join(draw.choices(WORDS, k=draw.randint(4, 12))) for _ in range(2))
            out.write(json.dumps({"prompt": prompt, "response": response}) + "\n")


def tiny_tree(directory: Path) -> dict[str, Any]:
    """A configuration whose files lie below `directory`: 4 optimizer steps of 4 rows."""
    return {
        "run_dir": str(directory / "run"),
        "target": {"path": str(directory / "target"), "device": "cpu", "taps": 2},
        "data": {
            "path": str(directory / "data"),
            "sources": [{"path": str(directory / "pairs.jsonl")}],
            "row_tokens": 256,
            "held_out": 0.1,
            "min_supervised_tokens": 8,
        },
        "feed": {"threads": 1},
        "drafter": {"layers": 1, "block_size": 4},
        "train": {
            "device": "cpu",
            "threads": 1,
            "steps": 4,
            "rows_per_step": 4,
            "anchors_per_row": 8,
            "log_every": 1,
            "checkpoint_every": 2,
            "held_out_every": 0,
            "held_out_rows": 1,
        },
    }


def make_tiny_run(
    directory: Path, documents: int = 120, seed: int = 0, sections: dict[str, dict[str, Any]] | None = None
) -> Path:
    """Write target, data and configuration below `directory`, prepare the data, and return the configuration file.

    `sections` changes the options of `tiny_tree`; `seed` is that of the conversations and of the run.
    """
    from dflash_mp.bench.tiny import write_tiny_target
    from dflash_mp.config_file import load_config
    from dflash_mp.data.prepare import prepare
    from dflash_mp.target.tokenizer import load_tokenizer

    write_tiny_target(directory / "target")
    write_conversations(directory / "pairs.jsonl", documents, seed)
    tree = {**tiny_tree(directory), "seed": seed}
    for name, options in (sections or {}).items():
        tree[name] = {**tree.get(name, {}), **options}
    file = directory / "run.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    config = load_config(file).config
    prepare(config.data, load_tokenizer(config.target), seed=config.seed)
    return file
