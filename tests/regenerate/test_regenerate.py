"""`dflash-mp regenerate` with a target of its own: what it writes, and that no kill and no bad input costs an answer."""

from __future__ import annotations

import fcntl
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.cli import main
from dflash_mp.config import DataConfig, SourceConfig, TargetConfig
from dflash_mp.data.documents import Record
from dflash_mp.data.prepare import prepare
from dflash_mp.data.store import PreparedDataset
from dflash_mp.errors import DataError
from dflash_mp.regenerate.conversations import to_conversation
from dflash_mp.target.tokenizer import load_tokenizer

NEW = 12
# The command with a target that needs half a minute for 100 answers.
_SLOWLY = """
import sys, time
from dflash_mp.cli import main
from dflash_mp.regenerate.slots import Slots
take = Slots.take
Slots.take = lambda self: time.sleep(0.5) or take(self)
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), max_positions=256)


def write_prompts(file: Path, count: int) -> Path:
    records: list[dict[str, Any]] = [{"prompt": f"question {n}" + "?" * (n * 7 % 40)} for n in range(count)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


def command(target: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    words = ["regenerate", "--target", target, "--prompts", prompts, "--out", out, "--device", "cpu", "--batch", "4"]
    return [*map(str, words), "--max-new-tokens", str(NEW), *more]


def run(*arguments: Any) -> tuple[int, str]:
    done = CliRunner().invoke(main, command(*arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def partial_of(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


def lines_of(file: Path) -> int:
    """0 if the file is not there: not yet, or no more."""
    try:
        return file.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def test_answers_come_in_the_order_of_the_prompts_with_their_settings_beside_them(target: Path, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", 11), tmp_path / "answers.jsonl"
    assert run(target, prompts, out)[0] == 0
    found = records(out)
    assert [record["index"] for record in found] == list(range(11))
    for n, record in enumerate(found):
        assert [m["role"] for m in record["messages"]] == ["user", "assistant"]
        assert record["messages"][0]["content"].startswith(f"question {n}")
        assert record["finish_reason"] == ("length" if record["answer_tokens"] == NEW else "stop")
        assert record["finish_reason"] == "stop" or not record["messages"][1]["content"].endswith("\ufffd")
    settings = json.loads((tmp_path / "answers.jsonl.settings.json").read_text())
    assert settings["temperature"] == 0.0
    assert settings["max_new_tokens"] == NEW
    assert len(settings["weights"]) == 32
    assert settings["versions"].keys() == {"dflash-mp", "python", "torch", "transformers"}
    assert sum(settings["counts"].values()) == 11
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "answers.jsonl",
        "answers.jsonl.settings.json",
        "prompts.jsonl",
    ]
    before = out.stat().st_mtime_ns
    code, said = run(target, prompts, out)
    assert (code, out.stat().st_mtime_ns) == (0, before)
    assert "nothing to do" in said


def test_a_killed_command_goes_on_where_it_was_to_the_same_file(target: Path, tmp_path: Path) -> None:
    prompts, undisturbed, out = (
        write_prompts(tmp_path / "prompts.jsonl", 100),
        tmp_path / "whole.jsonl",
        tmp_path / "out.jsonl",
    )
    sampled = ("--temperature", "0.9", "--top-p", "0.9", "--seed", "3")
    assert run(target, prompts, undisturbed, *sampled)[0] == 0
    words = [sys.executable, "-c", _SLOWLY, *command(target, prompts, out, *sampled)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    partial = partial_of(out)
    deadline = time.monotonic() + 120
    while lines_of(partial) < 6:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not out.exists(), "it was done before it was killed"
    written = lines_of(partial)
    assert 6 <= written < 100
    with partial.open("ab") as file:  # what a power cut might leave of a line
        file.write(b'{"index": 98, "messages": [{"ro')
    code, said = run(target, prompts, out, *sampled)
    assert code == 0
    assert "were torn" in said
    assert f"going on after {written} conversations" in said
    assert out.read_bytes() == undisturbed.read_bytes()


def test_other_settings_other_prompts_and_a_second_writer_are_refused(target: Path, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", 5), tmp_path / "answers.jsonl"
    run(target, prompts, out)
    code, said = run(target, prompts, out, "--temperature", "0.5")
    assert code == 2
    assert "temperature 0.0 instead of 0.5" in said
    write_prompts(prompts, 6)
    code, said = run(target, prompts, out)
    assert code == 2
    assert "prompts" in said
    assert run(target, prompts, out, "--force")[0] == 0
    assert len(records(out)) == 6
    with partial_of(out).open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, said = run(target, prompts, out)
    assert code == 1
    assert "another process is writing" in said
    mine = tmp_path / "mine.jsonl"
    mine.write_text("precious\n")
    code, said = run(target, prompts, mine)
    assert code == 3
    assert mine.read_text() == "precious\n"


def test_every_question_of_a_conversation_gets_a_new_answer(target: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "old answer"},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "old answer"},
    ]
    long = [{"role": "user", "content": "x" * 400}]
    prompts.write_text("".join(json.dumps({"messages": m}) + "\n" for m in (talk, long)))
    assert run(target, prompts, out)[0] == 0
    cut, without = records(out)
    assert cut["finish_reason"] == "length"
    assert [m["role"] for m in cut["messages"]] == ["system", "user", "assistant"]
    assert without["finish_reason"] == "prompt_too_long"
    assert [m["role"] for m in without["messages"]] == ["user"]

    # With every byte a token that ends an answer, answers are whole and of one token.
    generation = target / "generation_config.json"
    before = generation.read_text()
    try:
        generation.write_text(json.dumps({**json.loads(before), "eos_token_id": list(range(256))}))
        assert run(target, prompts, out, "--force")[0] == 0
    finally:
        generation.write_text(before)
    answered = records(out)[0]
    assert answered["finish_reason"] == "stop"
    assert answered["answer_tokens"] == 2
    assert [m["role"] for m in answered["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert "old answer" not in json.dumps(answered)


def test_any_number_of_prompts_that_are_too_long_hides_none_behind_them(target: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in [*["x" * 400] * 70, "short"]))
    code, said = run(target, prompts, out)
    assert code == 0
    assert "70 prompt_too_long" in said
    assert [record["finish_reason"] == "prompt_too_long" for record in records(out)] == [True] * 70 + [False]


def test_prepare_reads_what_was_written(target: Path, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", 8), tmp_path / "answers.jsonl"
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": "x" * 400}) + "\n")
    run(target, prompts, out)
    fields = {"path": tmp_path / "data", "sources": [SourceConfig(path=str(out))], "held_out": 0.0}
    config = DataConfig.model_validate({**fields, "row_tokens": 256, "min_supervised_tokens": 2})
    tokenizer = load_tokenizer(TargetConfig(path=str(target)))
    manifest = prepare(config, tokenizer, seed=0)
    assert manifest.dropped() == {"no assistant turn": 1}
    cut = sum(record["finish_reason"] == "length" for record in records(out))
    assert cut > 0
    dataset, ends = PreparedDataset.open(config.path), {}
    for row in (dataset.row("train", index) for index in range(dataset.rows("train"))):
        for document in range(1, int(row.document_ids.max()) + 1):
            here = row.document_ids == document
            question = re.search(r"question \d", tokenizer.decode(row.input_ids[here]))
            assert question is not None
            ends[question[0]] = row.input_ids[here][row.loss_mask[here] == 1][-1] == tokenizer.eos_token_id
    asked = {record["messages"][0]["content"][:10]: record["finish_reason"] == "stop" for record in records(out)[:8]}
    assert ends == asked


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"prompt": "a"}, [["user"]]),
        ({"turns": ["a", "b"]}, [["user"], ["user"]]),
        ({"turns": ["a", "b"], "system_prompt": "s"}, [["system", "user"], ["user"]]),
        ({"prompt": "a", "system_prompt": "s"}, [["system", "user"]]),
        ({"prompt": "x", "messages": [{"role": r, "content": "a"} for r in ("system", "user")]}, [["system", "user"]]),
        ({"turns": ["x"], "messages": [{"role": r, "content": "a"} for r in ("system", "user")]}, [["system", "user"]]),
        ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}, [["system", "user"]]),
        ({"question": "a", "answer": "b"}, [["user"]]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [["user"]]),
        (
            {"messages": [{"role": r, "content": "x"} for r in ("user", "assistant", "tool", "assistant")]},
            [["user", "assistant", "tool"]],
        ),
    ],
)
def test_records_of_every_shape_ask(fields: dict[str, Any], parts: list[list[str]]) -> None:
    conversation = to_conversation(Record("file:1", fields), "auto", 0)
    assert [[message["role"] for message in part] for part in conversation.parts] == parts


@pytest.mark.parametrize("asked", [{"turns": ["a"]}, {"prompt": "a"}, {"prompt": [{"role": "user", "content": "a"}]}])
def test_tools_beside_every_way_to_ask_are_kept(asked: dict[str, Any]) -> None:
    conversation = to_conversation(Record("file:1", {**asked, "tools": '[{"type": "function"}]'}), "auto", 0)
    assert conversation.tools == [{"type": "function"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "only a text"},
        {"messages": [{"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]},
        {"turns": ["a", 1]},
        {"other": "a"},
    ],
)
def test_a_record_that_asks_nothing_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="file:7"):
        to_conversation(Record("file:7", fields), "auto", 0)


@pytest.mark.parametrize(
    ("way", "idle"),
    [
        (["--target", "t"], ["--concurrency", "64"]),
        (["--target", "t"], ["--api-key-env", "K"]),
        (["--server", "http://host/v1", "--model", "m"], ["--batch", "128"]),
        (["--server", "http://host/v1", "--model", "m"], ["--max-prompt-tokens", "9"]),
        (["--server", "http://host/v1", "--model", "m"], ["--cuda-graphs"]),
    ],
)
def test_an_option_without_effect_is_refused(tmp_path: Path, way: list[str], idle: list[str]) -> None:
    done = CliRunner().invoke(main, ["regenerate", *way, *idle, "--prompts", "p", "--out", str(tmp_path / "o.jsonl")])
    assert done.exit_code == 2
    assert f"{idle[0]}: without effect with {way[0]}" in done.output


def test_bad_input_is_said_plainly(target: Path, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", 2), tmp_path / "answers.jsonl"
    code, said = run(target, tmp_path / "none.jsonl", out)
    assert code == 3
    assert "none.jsonl does not exist" in said
    code, said = run(target, prompts, out, "--max-new-tokens", "256")
    assert code == 2
    assert "lower --max-new-tokens" in said
    code, said = run(tmp_path / "nowhere", prompts, out)
    assert code == 4
    assert CliRunner().invoke(main, ["regenerate", "--prompts", str(prompts), "--out", str(out)]).exit_code == 2
    prompts.write_text('{"prompt": "a"}\nnot json\n')
    code, said = run(target, prompts, out)
    assert code == 3
    assert f"{prompts}:2" in said
    assert not out.exists()
    assert not partial_of(out).exists()
