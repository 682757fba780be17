"""What can't be answered here gets its line and its reason, and costs no other conversation its answer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_mp.bench.tiny import CHATML, write_tiny_target
from dflash_mp.cli import main
from dflash_mp.config import DataConfig, SourceConfig, TargetConfig
from dflash_mp.data.prepare import prepare
from dflash_mp.regenerate.local import stop_tokens
from dflash_mp.target.load import load_target
from dflash_mp.target.tokenizer import load_tokenizer

_NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system, please') }}{% endif %}" + CHATML


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_target(tmp_path_factory.mktemp("target"), max_positions=256)
    (path / "chat_template.jinja").write_text(_NO_SYSTEM)
    return path


def run(target: Path, records: list[dict[str, Any]], directory: Path, *more: str) -> tuple[int, str]:
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = [
        "regenerate",
        "--target",
        target,
        "--prompts",
        prompts,
        "--out",
        directory / "out.jsonl",
        "--device",
        "cpu",
    ]
    done = CliRunner().invoke(main, [*map(str, words), "--batch", "2", "--max-new-tokens", "8", *more])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def written(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "out.jsonl").read_text().splitlines()]


def test_a_conversation_that_the_template_refuses_strands_no_other(target: Path, tmp_path: Path) -> None:
    bad = {"prompt": "b", "system": "s"}
    code, said = run(target, [{"prompt": "a"}, bad, {"prompt": "c\ud800"}, {"prompt": "d"}], tmp_path)
    assert code == 0, said
    found = written(tmp_path)
    assert [record["finish_reason"] == "refused" for record in found] == [False, True, True, False]
    assert "no system, please" in found[1]["refusal"]
    assert "surrogate" in found[2]["refusal"]
    assert "2 conversations were refused, the first of them" in said
    assert "prompts.jsonl:2" in said
    fields = {"path": tmp_path / "data", "sources": [SourceConfig(path=str(tmp_path / "out.jsonl"))], "held_out": 0.0}
    config = DataConfig.model_validate({**fields, "row_tokens": 256, "min_supervised_tokens": 2})
    manifest = prepare(config, load_tokenizer(TargetConfig(path=str(target))), seed=0)
    assert manifest.dropped() == {"answer refused when generated": 2}


def test_an_answer_with_a_special_token_inside_is_refused(target: Path, tmp_path: Path) -> None:
    code, said = run(target, [{"prompt": f"question {n}"} for n in range(60)], tmp_path, "--temperature", "5")
    assert code == 0, said
    refused = [record for record in written(tmp_path) if record["finish_reason"] == "refused"]
    assert 0 < len(refused) < 60
    for record in refused:
        assert [message["role"] for message in record["messages"]] == ["user"]
        assert re.search(r"its answer holds <\|(endoftext|im_start|mask)\|>.*--server", record["refusal"])
    assert any("<|im_start|>" in record["refusal"] for record in refused)


def test_the_chat_templates_end_of_turn_ends_an_answer(target: Path, tmp_path: Path) -> None:
    file = target / "generation_config.json"
    before = file.read_text()
    try:
        file.write_text(json.dumps({**json.loads(before), "eos_token_id": 256}))
        loaded = load_target(TargetConfig(path=str(target), device="cpu", taps=1))
        run(target, [{"prompt": f"question {n}"} for n in range(60)], tmp_path, "--temperature", "5")
    finally:
        file.write_text(before)
    end = loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end not in loaded.info.eos_token_ids
    assert {end, 256} <= set(stop_tokens(loaded, "default"))
    found = written(tmp_path)
    assert any(record["finish_reason"] == "stop" and record["answer_tokens"] < 8 for record in found)
    assert not any("<|im_end|>" in record.get("refusal", "") for record in found)


def test_nothing_but_refusals_is_an_error_and_leaves_nothing(target: Path, tmp_path: Path) -> None:
    code, said = run(target, [{"prompt": "b", "system": "s"}] * 3, tmp_path)
    assert code == 3
    assert "no system, please" in said
    assert [file.name for file in tmp_path.iterdir()] == ["prompts.jsonl"]
    code, said = run(target, [{"prompt": "x" * 400}] * 3, tmp_path)
    assert code == 2
    assert "3 prompt_too_long" in said
    assert "lower --max-new-tokens" in said


def test_what_greedy_answers_ignore_is_refused_before_any_work(tmp_path: Path) -> None:
    missing = tmp_path / "no target"
    code, said = run(missing, [{"prompt": "a"}], tmp_path, "--top-k", "20", "--seed", "3", "--top-p", "1")
    assert code == 2
    assert "--top-k, --seed: without effect with --temperature 0, which is greedy; to sample, give one above 0" in said
    assert "--top-p" not in said
    assert [file.name for file in tmp_path.iterdir()] == ["prompts.jsonl"]
