"""One real run over tcp with keys, credentials in the environment, its log in JSON, as detailed as it gets, and a profile of each rank."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_ports
from test_secrets_of_a_run import leaks
from tiny_run import make_tiny_run

from dflash_mp.drafter.step_profile import SPANS
from dflash_mp.stream.keys import keygen

CREDENTIALS = {
    "WANDB_API_KEY": "wandb-0123456789abcdef0123456789abcdef",
    "HF_TOKEN": "hf_ABCDEFGHIJKLMNOP",
    "OPENAI_API_KEY": "sk-0123456789",
    "AWS_SECRET_ACCESS_KEY": "aws/0123456789/secret",
}


@dataclass
class Finished:
    run_dir: Path
    keys: Path
    output: str
    errors: str
    plan: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    directory = tmp_path_factory.mktemp("logged")
    file = make_tiny_run(directory)
    keygen(directory / "keys")
    sets = (
        f"feed.endpoints=['tcp://127.0.0.1:{free_ports()[0]}']",
        f"stream.keys={directory}/keys",
        "train.drafters=2",
        "feed.stats_seconds=0.2",
    )
    command = [sys.executable, "-m", "dflash_mp.cli", "run", "-c", str(file), "-v", "--log-format", "json"]
    sets_of_it = [word for text in sets for word in ("--set", text)]
    plan = subprocess.run([*command, *sets_of_it, "--plan"], capture_output=True, text=True, timeout=120, check=True)
    command += ["--profile", "steps=2..3", "--profile", "ranks=0,1"]
    command += sets_of_it
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **CREDENTIALS}, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Finished(directory / "run", directory / "keys", done.stdout, done.stderr, plan.stdout + plan.stderr)


def trace(finished: Finished, rank: int) -> list[dict[str, Any]]:
    """The spans of a rank's trace that the training named."""
    with gzip.open(finished.run_dir / "profile" / f"rank-{rank}-steps-2-3.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and event.get("cat") == "user_annotation"]


def test_every_line_is_an_object_that_says_when_who_and_what(finished: Finished) -> None:
    lines = [json.loads(line) for line in finished.output.splitlines()]
    for line in lines:
        assert {"time", "level", "role", "rank", "message"} <= set(line)
    speakers = {(line["role"], line["rank"]) for line in lines}
    assert {("feeder", 0), ("drafter", 0), ("drafter", 1)} <= speakers
    steps = [line for line in lines if line.get("event") == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["loss"] > 0 and line["tokens_per_second"] > 0 for line in steps)
    first = next(line for line in lines if line.get("event") == "first_step")
    assert first["step"] == 1
    assert 0 < first["first_pass_seconds"] < first["seconds"] < 300


def test_the_parts_log_files_hold_the_same_lines_and_no_control_characters(finished: Finished) -> None:
    for name in ("feeder-0.log", "drafters.log"):
        text = (finished.run_dir / "logs" / name).read_text()
        assert json.loads(text.splitlines()[0])["message"].startswith("starts ")
        for line in text.splitlines()[1:]:
            assert line in finished.output or not line.startswith("{")
        assert "\r" not in text
        assert "\x1b" not in text


def test_no_credential_is_anywhere(finished: Finished) -> None:
    secrets = [value.encode() for value in CREDENTIALS.values()]
    for file in finished.keys.glob("*.secret"):
        secrets += [word.strip('"').encode() for word in file.read_text().split() if len(word) >= 40]
    assert len(secrets) >= len(CREDENTIALS) + 2
    written = [file for file in finished.run_dir.rglob("*") if file.is_file()]
    texts = {str(file): file.read_bytes() for file in written}
    texts |= {name: getattr(finished, name).encode() for name in ("output", "errors", "plan")}
    texts = {name: gzip.decompress(text) if name.endswith(".gz") else text for name, text in texts.items()}
    assert len(texts) > 8
    assert any(b"connected" in text for name, text in texts.items() if "feeder" in name)
    assert leaks(sorted(finished.keys.iterdir()), texts) == []
    for name, text in texts.items():
        for secret in secrets:
            assert secret not in text, name


@pytest.mark.parametrize("rank", [0, 1])
def test_the_trace_has_the_steps_that_were_asked_for_and_what_each_is_made_of(finished: Finished, rank: int) -> None:
    events = trace(finished, rank)
    steps = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("step ")}
    assert set(steps) == {"step 2", "step 3"}
    for begin, end in steps.values():
        inside = [e for e in events if begin <= e["ts"] and e["ts"] + e["dur"] <= end]
        count = {name: sum(e["name"] == name for e in inside) for name in SPANS}
        # Four rows of two ranks, one at a time; gradients and figures are added over the ranks.
        assert (count["data wait"], count["forward"], count["backward"], count["optimizer"]) == (2, 2, 2, 1)
        assert count["reduce"] >= 2
    starts = {name: min(e["ts"] for e in events if e["name"] == name) for name in SPANS}
    assert sorted(starts, key=lambda name: starts[name]) == list(SPANS)
