"""`dflash-mp run` before and around its processes: the plan, the checks, the lock, the view."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from process_trees import eventually, part, shell
from rich.console import Console
from tiny_run import make_tiny_run

from dflash_mp.cli import main
from dflash_mp.config_file import LoadedConfig, load_config
from dflash_mp.data.writer import replacing
from dflash_mp.errors import DflashError
from dflash_mp.preflight import check
from dflash_mp.run import describe_plan, plan
from dflash_mp.run_lock import RunLock
from dflash_mp.run_view import LiveView, LogTail, PlainView, describe_metrics, parse_metrics
from dflash_mp.supervisor import Running


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("run"))


def refusal(loaded: LoadedConfig) -> DflashError:
    with pytest.raises(DflashError) as caught:
        check(loaded.config)
    assert caught.value.remedy
    return caught.value


def test_the_plan_starts_each_feeder_and_one_group_of_drafters(run_file: Path) -> None:
    overrides = ("feed.count=2", "train.drafters=3")
    parts = plan(load_config(run_file, overrides), overrides)
    assert [(p.name, p.serves) for p in parts] == [("feeder 0", True), ("feeder 1", True), ("drafters", False)]
    assert "--index 1" in shlex.join(parts[1].command)
    assert "--nproc-per-node 3" in shlex.join(parts[2].command)
    for one in parts:
        assert one.command[-6:] == ("--config", str(run_file), *(w for o in overrides for w in ("--set", o)))


@pytest.mark.parametrize(("gpus", "device", "own"), [(3, "auto", True), (2, "auto", False), (3, "cpu", False)])
def test_ranks_see_only_their_own_gpu_where_each_has_one(
    gpus: int, device: str, own: bool, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    overrides = ("train.drafters=3", f"train.device={device}")
    drafters = plan(load_config(run_file, overrides), overrides)[-1]
    assert ("--virtual-local-rank" in drafters.command) == own


def test_plan_prints_every_option_with_its_source_and_starts_nothing(run_file: Path) -> None:
    done = CliRunner().invoke(main, ["run", "-c", str(run_file), "--set", "train.steps=7", "--plan"])
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line.split()[1:] for line in done.output.splitlines() if line and not line.startswith(" ")}
    assert rows["train.steps"] == ["7", "--set"]
    assert rows["train.rows_per_step"] == ["4", "file"]
    assert rows["train.clip"] == ["1.0", "default"]
    loaded = load_config(run_file, ["train.steps=7"])
    assert set(loaded.sources) <= set(rows)
    for command in (shlex.join(p.command) for p in plan(loaded, ("train.steps=7",))):
        assert f"  {command}" in done.output.splitlines()
    assert not loaded.config.run_dir.exists()


def test_a_run_that_can_start_passes_the_checks(run_file: Path) -> None:
    check(load_config(run_file).config)


@pytest.mark.parametrize(
    ("override", "words", "exit_code"),
    [
        ("data.path=/nowhere/data", "/nowhere/data does not exist", 3),
        ("data.row_tokens=512", "has rows of 256 tokens, data.row_tokens is 512", 3),
        ("target.path=/nowhere/target", "no target at /nowhere/target", 4),
        ("target.path=model.gguf", "no target at model.gguf", 4),
        ("feed.endpoints=[ipc:///tmp/a, ipc:///tmp/a]", "ipc:///tmp/a twice", 2),
        ("feed.endpoints=[http://localhost:1]", "is no feeder address", 5),
        (f"feed.endpoints=['ipc:///tmp/{'x' * 200}']", "a Unix socket's may have", 5),
        ("feed.endpoints=['tcp://127.0.0.1:*']", "leaves the port open", 2),
        ("feed.endpoints=['tcp://192.0.2.1:5555']\nfeed.insecure_no_auth=true", "cannot listen on tcp://192.0.2.1", 5),
    ],
)
def test_what_keeps_a_run_from_starting_is_said_before(
    run_file: Path, override: str, words: str, exit_code: int
) -> None:
    error = refusal(load_config(run_file, override.split("\n")))
    assert words in error.what
    assert error.exit_code == exit_code


def test_a_port_in_use_is_named(run_file: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        error = refusal(load_config(run_file, [f"feed.endpoints=['{endpoint}']"]))
    assert f"cannot listen on {endpoint}" in error.what
    assert "another address" in error.remedy


def test_a_hub_id_is_left_to_the_feeder(run_file: Path) -> None:
    check(load_config(run_file, ["target.path=Qwen/Qwen3-8B"]).config)


def test_a_run_directory_serves_one_run_at_a_time(tmp_path: Path) -> None:
    with RunLock(tmp_path / "run"), pytest.raises(DflashError, match=f"process {os.getpid()}"):
        RunLock(tmp_path / "run")
    with RunLock(tmp_path / "run"):
        pass


def test_a_killed_run_leaves_its_directory_free(tmp_path: Path) -> None:
    program = f"from pathlib import Path; from dflash_mp.run_lock import RunLock; lock = RunLock(Path({str(tmp_path)!r})); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DflashError, match=f"process {holder.pid}"):
            RunLock(tmp_path)
        holder.kill()
        holder.wait()
    RunLock(tmp_path).__exit__()


def test_a_holder_on_another_host_is_named_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dflash_mp.run_lock._LEASE_SECONDS", 1.0)
    started = time.monotonic()
    with RunLock(tmp_path):
        (tmp_path / ".lock").write_text("other-host:7\n")
        with pytest.raises(DflashError, match=r"another run \(process 7 on other-host\)"):
            RunLock(tmp_path)
    assert time.monotonic() - started > 1
    assert caplog.messages == [f"waiting up to 1 s for process 7 on other-host, which has {tmp_path}"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def without_locks(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", without_locks)
    with RunLock(tmp_path / "run"):
        pass
    with replacing(tmp_path / "data") as directory:
        (directory / "a").touch()
    assert (tmp_path / "data" / "a").exists()
    assert [message.partition(" cannot be locked")[0] for message in caplog.messages] == [
        str(tmp_path / "run" / ".lock"),
        str(tmp_path / ".data.preparing"),
    ]


def test_an_unwritable_run_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DflashError, match="cannot write to run_dir"):
        RunLock(tmp_path / "file" / "run")


def test_a_run_directory_on_a_full_disk_is_named_and_left_free(small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(64 << 10))
    with pytest.raises(DflashError, match=r"cannot write to run_dir .*No space left") as caught:
        RunLock(small_disk / "run")
    assert caught.value.remedy.startswith("free space")
    filler.unlink()
    with RunLock(small_disk / "run"):
        pass


def test_errors_are_printed_without_a_traceback(run_file: Path) -> None:
    done = CliRunner().invoke(main, ["run", "-c", str(run_file), "--set", "data.path=/nowhere/data"])
    assert done.exit_code == 3
    assert done.output.startswith("dflash-mp: ")
    assert "→" in done.output
    assert "Traceback" not in done.output


def test_a_log_is_followed_line_by_line_and_read_anew_when_it_shrinks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = LogTail(log)
    assert tail.new_lines() == []
    log.write_text("one\ntw")
    assert tail.new_lines() == ["one"]
    with log.open("a") as more:
        more.write("o\n\n10%\r20%\r")
    assert tail.new_lines() == ["two", "10%", "20%"]
    log.write_text("new\n")
    assert tail.new_lines() == ["new"]


@pytest.mark.parametrize(
    ("line", "figures"),
    [
        ('{"step": 3, "loss": 1.5, "kind": "train", "slots": [1]}', {"step": 3, "loss": 1.5}),
        ("", {}),
        ('{"step": 3, "lo', {}),
        ("[1]", {}),
    ],
)
def test_metrics_are_read_tolerantly(line: str, figures: dict[str, float]) -> None:
    assert parse_metrics(line) == figures


def test_metrics_that_are_missing_are_not_shown() -> None:
    assert describe_metrics({"step": 3, "loss": 1.25, "wait_share": 0.031}) == "loss 1.250 · waiting for rows 3%"


@pytest.fixture
def talking(tmp_path: Path) -> Iterator[list[Running]]:
    parts = [
        part(tmp_path, "feeder 0", shell("echo '[3 rows/s]'; exec sleep 600"), serves=True),
        part(tmp_path, "drafters", shell("echo started; echo training; exec sleep 600")),
    ]
    running = [Running(one, os.environ) for one in parts]
    last = {"feeder 0": "3 rows/s]\n", "drafters": "training\n"}
    eventually(lambda: all(last[p.name] in p.log.read_text() for p in parts), "both have said all that they say")
    yield running
    for one in running:
        one.process.kill()
        one.process.wait()


def test_without_a_terminal_each_line_carries_its_part(talking: list[Running]) -> None:
    out = io.StringIO()
    with PlainView(out) as view:
        view(talking)
        view(talking)
    assert out.getvalue() == "[feeder 0] [3 rows/s]\n[drafters] started\n[drafters] training\n"


def test_on_a_terminal_one_block_shows_progress_parts_and_last_lines(talking: list[Running], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 9, "wait_share": 0.9}\n')
    out = io.StringIO()
    with LiveView(tmp_path, 200, Console(file=out, force_terminal=True, width=160, color_system=None)) as view:
        with (tmp_path / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": 50, "loss": 4.5, "tau": 1.75, "tokens_per_second": 1234.5}) + "\n")
        view(talking)
    shown = out.getvalue()
    for text in ("step 50 of 200", "loss 4.500 · τ 1.75 · 1,234 tokens/s", "[3 rows/s]", "started", "training"):
        assert text in shown
    assert "waiting" not in shown  # an earlier start's figure


def test_the_resolved_configuration_can_be_run_again(run_file: Path, tmp_path: Path) -> None:
    loaded = load_config(run_file, ["train.steps=7"])
    file = tmp_path / "resolved.yaml"
    file.write_text(yaml.safe_dump(loaded.config.model_dump(mode="json")))
    assert load_config(file).config == loaded.config
    assert next(iter(describe_plan(loaded, ()))).split() == ["option", "value", "source"]
