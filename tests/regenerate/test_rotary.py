"""Rotary embeddings that change with the longest text: texts side by side are kept where they don't."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.cli import main
from dflash_mp.config import TargetConfig
from dflash_mp.decode.sampling import GREEDY
from dflash_mp.errors import TargetError
from dflash_mp.regenerate.rotary import steady_positions
from dflash_mp.regenerate.slots import SlotOptions, Slots
from dflash_mp.target.load import load_target

STEADY, NEW = 80, 8


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_target(tmp_path_factory.mktemp("longrope"), family="llama", max_positions=256)
    file = directory / "config.json"
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": STEADY,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
    }
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": rope}))
    return directory


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({}, None),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 5}}, None),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 5}}, 5),
        ({"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 6}, 6),
        ({"rope_scaling": {"type": "su"}}, 0),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 7}, 7),
        ({"rope_parameters": {"full": {"rope_type": "dynamic"}, "near": {}}, "max_position_embeddings": 8}, 8),
    ],
)
def test_how_long_texts_side_by_side_may_become(config: dict[str, Any], positions: int | None) -> None:
    assert steady_positions(SimpleNamespace(**config)) == positions


def test_up_to_there_an_answer_is_the_librarys_own_whatever_is_beside_it(path: Path) -> None:
    target = load_target(TargetConfig(path=str(path), device="cpu", taps=1))
    prompts = [[n * 7 % 200 for n in range(length)] for length in (5, STEADY - NEW, 40)]  # padded beyond, if read alone
    engine = Slots(target, SlotOptions(len(prompts), NEW, (), GREEDY), print)
    engine.fill([0, 1, 2], prompts, [])
    engine.advance(NEW)
    found = {text.slot: text.tokens for text in engine.take()}
    for slot, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        own = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        assert found[slot] == own[0, len(prompt) :].tolist()
    with pytest.raises(TargetError, match=r"rotary embeddings change.*as soon as one is longer than 80"):
        engine.fill([0], [list(range(STEADY - NEW + 1))], [])


def test_longer_prompts_get_no_answer_and_the_log_says_why(path: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "x" * length}) + "\n" for length in (3, 120)))
    words = ["--target", str(path), "--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl"), "--device", "cpu"]
    done = CliRunner().invoke(main, ["regenerate", *words, "--batch", "2", "--max-new-tokens", "8"])
    assert done.exit_code == 0, done.output
    assert (
        "context is 80 here (256, but texts beyond 80 would change their neighbours' rotary embeddings)" in done.output
    )
    found = [json.loads(line)["finish_reason"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found[0] != "prompt_too_long"
    assert found[1] == "prompt_too_long"
    done = CliRunner().invoke(main, ["regenerate", *words, "--max-new-tokens", "80", "--force"])
    assert done.exit_code == 2
    assert "80 new tokens don't fit the target's context of 80" in done.output
