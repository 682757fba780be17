"""A feeder whose target is shared by two processes: real processes, real sums between them, the plain feeder's rows."""

from __future__ import annotations

import functools
import ipaddress
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from target_rows import packed_row
from tiny_run import make_tiny_run

from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.config import RunConfig, TargetConfig
from dflash_mp.config_file import load_config
from dflash_mp.data.row import RowKey
from dflash_mp.data.store import PreparedDataset
from dflash_mp.errors import TargetError
from dflash_mp.process import children_of
from dflash_mp.stream.client import RowClient
from dflash_mp.target.capture import Capture
from dflash_mp.target.load import load_target
from dflash_mp.target.split import Share, load_split, split
from dflash_mp.target.unanimity import ask_all

KEYS = [RowKey("train", 0), RowKey("train", 1), RowKey("held_out", 0)]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("split")
    feed = {"threads": 1, "endpoints": [f"ipc://{directory}/f.sock"], "tensor_parallel": 2}
    file = make_tiny_run(directory, sections={"feed": feed, "stream": {"window_mib": 4}})
    write_tiny_target(directory / "target", heads=4, kv_heads=2)
    return file


@contextmanager
def started(file: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "dflash_mp.cli", "feed", "-c", str(file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def received(config: RunConfig) -> list[torch.Tensor]:
    with RowClient.of(config, 0, 1) as client:
        client.connect()
        client.schedule(iter(KEYS))
        rows = []
        for key in KEYS:
            with client.take(key) as row:
                rows.append(row.tensors.features.clone())
        return rows


def listening_hosts(pid: int) -> set[str]:
    """Where the TCP sockets of this process listen."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(link))
    found = set()
    for family, size in (("tcp", 4), ("tcp6", 16)):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in inodes:
                words = bytes.fromhex(local.split(":")[0])
                address = b"".join(words[i : i + 4][::-1] for i in range(0, size, 4))
                found.add(str(ipaddress.ip_address(address)))
    return found


def first_child(process: subprocess.Popen[str]) -> int:
    while process.poll() is None:
        if found := children_of(process.pid):
            return found[0]
        time.sleep(0.001)
    raise RuntimeError("it ended first")


def gone(pid: int, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.05)
    return False


def test_a_split_feeder_serves_the_plain_rows_and_the_same_bits_after_a_restart_and_ends_with_its_parts(
    run_file: Path,
) -> None:
    config = load_config(run_file).config
    with started(run_file) as leader:
        rows = received(config)
        (follower,) = children_of(leader.pid)
        assert listening_hosts(leader.pid) == {"127.0.0.1"}
        for pid in (follower, leader.pid):  # as whoever stops all processes of a service does
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        _, log = leader.communicate(timeout=60)
        assert leader.returncode == 0, log
        assert "split over 2 processes" in log
        assert "did not end by itself" not in log
        assert gone(follower)
    target = load_target(config.target)
    capture, dataset = Capture(target), PreparedDataset.open(config.data.path)
    for key, row in zip(KEYS, rows, strict=True):
        plain = torch.empty_like(row)
        capture.capture(dataset.run_row(key, config.seed), plain)
        torch.testing.assert_close(row, plain, atol=2e-5, rtol=2e-5)
        assert not torch.equal(row, torch.zeros_like(row))
    with started(run_file) as leader:
        os.kill(first_child(leader), signal.SIGTERM)  # before it can have said that it ignores it
        assert all(torch.equal(a, b) for a, b in zip(received(config), rows, strict=True))
        (follower,) = children_of(leader.pid)
        os.kill(follower, signal.SIGSTOP)
        with RowClient.of(config, 0, 1) as client:
            client.connect()
            client.schedule(iter(KEYS))
            time.sleep(1.0)  # the leader waits in a sum
            os.kill(follower, signal.SIGKILL)
            _, log = leader.communicate(timeout=60)
        assert leader.returncode == TargetError.exit_code, log
        assert f"of the 2 processes that share the target, process 1 (pid {follower}) ended by signal 9" in log


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of two, whose sums are only its own part."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)


def test_a_share_that_does_not_add_up_to_the_model_is_found_out(run_file: Path, alone: None) -> None:
    config = TargetConfig(path=str(run_file.parent / "target"), device="cpu", taps=2)
    with pytest.raises(TargetError, match="split over 2 processes its features differ from the unsplit model's"):
        load_split(config, Share(0, 2, torch.device("cpu")), packed_row([40]))


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ({"heads": 3, "kv_heads": 1}, "its 3 heads don't divide by 2"),
        ({"heads": 2, "kv_heads": 1}, "its 1 key/value heads don't divide by 2"),
        ({"heads": 4, "kv_heads": 2, "intermediate": 255}, "the 255 values of layers.0.mlp.gate_proj"),
    ],
)
def test_what_does_not_divide_is_refused(shape: dict[str, Any], says: str, tmp_path: Path, alone: None) -> None:
    write_tiny_target(tmp_path, **shape)
    with pytest.raises(TargetError, match=says):
        load_split(
            TargetConfig(path=str(tmp_path), device="cpu", taps=2), Share(0, 2, torch.device("cpu")), packed_row([40])
        )


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sums_between_processes_are_compiled_with_their_layers(
    run_file: Path, group_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced and made functional as for compiling, then run without a C++ compiler."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    config = TargetConfig(path=str(run_file.parent / "target"), device="cpu", taps=2, attention="packed")
    row = packed_row([40, 20], padding=4)
    target = split(load_target(config), Share(0, 1, torch.device("cpu")))
    kinds = {type(module).__name__ for module in target.anatomy.decoder.modules()}  # type: ignore[union-attr]
    assert "SummedLinear" in kinds
    capture = Capture(target, row_tokens=64, compiled=True)
    capture.self_check(row)
    assert "layers compiled in" in capture.forward.describe()


def test_flash_attention_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    config = TargetConfig(path=str(tmp_path), device="cpu", attention="flash_attention_2")
    with pytest.raises(TargetError, match="can't have flash_attention_2"):
        load_split(config, Share(0, 2, torch.device("cpu")), packed_row([40]))


@pytest.mark.parametrize(("said", "all_good"), [((True, True), True), ((True, False), False), ((False, False), False)])
def test_processes_agree_on_what_failed_in_one_of_them(said: tuple[bool, bool], all_good: bool) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor() as threads:
        heard = list(threads.map(lambda rank: ask_all(store, rank, 2, "compiling", said[rank]), (0, 1)))
    assert heard == [all_good, all_good]


def test_a_process_that_hears_nothing_from_another_ends_with_an_error() -> None:
    with pytest.raises(TargetError, match="compiling failed in process 1, but some other said nothing"):
        ask_all(dist.HashStore(), 1, 2, "compiling", False, seconds=0.1)


def test_a_follower_that_cannot_start_ends_the_leader() -> None:
    """In a process of its own, which it ends."""
    text = (
        "import torch; from dflash_mp.target.split_group import SplitGroup; "
        "SplitGroup('dflash_mp.no_such_module', [torch.device('cpu')] * 2, {})"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == TargetError.exit_code, done.stderr
    assert "process 1" in done.stderr


def test_devices_are_counted_and_dealt_by_feeder(run_file: Path) -> None:
    devices = ["cuda:2", "cuda:3", "cuda:0", "cuda:1"]
    config = load_config(run_file, ["feed.endpoints=[]", "feed.count=2", f"feed.devices={devices}"]).config
    assert [config.feeder_devices(index) for index in (0, 1)] == [["cuda:2", "cuda:3"], ["cuda:0", "cuda:1"]]
    given = load_config(run_file, ["feed.endpoints=[]", "feed.count=2", "target.device=cuda"]).config
    assert given.feeder_devices(1) == ["cuda:2", "cuda:3"]
    tree = config.model_dump(mode="json")
    tree["feed"]["devices"] = devices[:2]
    with pytest.raises(ValidationError, match=r"2 devices for 2 feeders \(feed.count\); give 2 each"):
        RunConfig.model_validate(tree)
