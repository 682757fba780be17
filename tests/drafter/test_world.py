"""Joining the ranks sets the process up as configured."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from dflash_mp.bench.tiny_run import tiny_tree
from dflash_mp.config import RunConfig
from dflash_mp.drafter import world
from dflash_mp.drafter.world import World, join, shares_device
from dflash_mp.errors import ConfigError, StreamError

_JOIN = """
import os, sys
from pathlib import Path
import torch
from dflash_mp.config_file import load_config
from dflash_mp.drafter.world import join
if sys.argv[2:]:
    os.sched_setaffinity(0, map(int, sys.argv[2:]))
join(load_config(Path(sys.argv[1]), []).config)
print(torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG", "unset"), torch.get_num_threads())
"""


def joined(directory: Path, train: dict[str, object], *cores: int) -> str:
    """What a rank alone, on these `cores` or all, prints of itself."""
    tree = tiny_tree(directory)
    tree["train"].update(train)
    file = directory / "run.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    command = [sys.executable, "-c", _JOIN, str(file), *map(str, cores)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout.strip()


@pytest.mark.parametrize(("wanted", "found"), [(True, "True :4096:8"), (False, "False unset")])
def test_deterministic_kernels_are_used_when_asked_for(tmp_path: Path, wanted: bool, found: str) -> None:
    assert joined(tmp_path, {"deterministic": wanted, "threads": 1}) == f"{found} 1"


def test_a_rank_has_a_thread_for_each_core_that_it_may_use(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    assert joined(tmp_path, {"threads": None}).endswith(f" {len(cores)}")
    assert joined(tmp_path, {"threads": None}, cores[-1]).endswith(" 1")


@pytest.mark.parametrize(
    ("device", "what", "remedy"),
    [
        ("cuda", "there is no cuda here: PyTorch sees 0 CUDA devices", "set train.device: cpu, or install a PyTorch"),
        ("cuda:1", "'cuda:1' is not a device that ranks can share out", "train.device: auto, cpu or cuda"),
    ],
)
def test_the_remedy_for_a_device_that_is_not_there_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, what: str, remedy: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    tree = tiny_tree(tmp_path)
    tree["train"]["device"] = device
    with pytest.raises(ConfigError) as refused:
        join(RunConfig.model_validate(tree))
    assert refused.value.what == what
    assert refused.value.remedy.startswith(remedy)


_LOSES_THE_OTHER = """
import os, signal, sys
from pathlib import Path
import torch
from dflash_mp.config_file import load_config
from dflash_mp.drafter.world import data_parallel, join
from dflash_mp.errors import StreamError
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun asks the rank that is left to stop
world = join(load_config(Path(sys.argv[1]), []).config)
model = torch.nn.Linear(4, 4, bias=False)
parallel = data_parallel(model, world)
for _ in range(2):  # DDP has settled its buckets
    parallel(torch.ones(2, 4)).sum().backward()
loss = parallel(torch.ones(2, 4)).sum()
world.barrier()
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
uses = {
    "sum": world.barrier,
    "broadcast": lambda: world.broadcast([torch.ones(1), torch.ones(1)]),
    "backward": loss.backward,
}
try:
    while True:  # what is sent just before an end may still arrive
        uses[sys.argv[2]]()
except StreamError as error:
    print(error, flush=True)
    os._exit(error.exit_code)
"""


@pytest.mark.parametrize("use", ["sum", "broadcast", "backward"])
def test_a_rank_says_in_a_line_that_another_is_gone_and_is_not_the_first_to_fail(tmp_path: Path, use: str) -> None:
    file, script = tmp_path / "run.yaml", tmp_path / "rank.py"
    file.write_text(yaml.safe_dump(tiny_tree(tmp_path)), encoding="utf-8")
    script.write_text(_LOSES_THE_OTHER, encoding="utf-8")
    command = [sys.executable, "-m", "dflash_mp.torchrun", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(script), str(file), use], capture_output=True, text=True, timeout=200)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    what, remedy = done.stdout.splitlines()
    assert re.fullmatch(r"rank 0: another rank is gone \(.*/gloo/.*\)", what), what
    assert "its own log, or the launcher's summary, says why" in remedy
    assert "rank 1 was the first to fail, with exit code -9" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_hangs_is_not_said_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(values: torch.Tensor) -> None:
        raise RuntimeError("[/src/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv")

    monkeypatch.setattr(dist, "all_reduce", fails)
    monkeypatch.setattr(world, "_SEEN_SECONDS", 0.0)
    with pytest.raises(StreamError, match=r"another rank does not answer .*Timed out"):
        World(0, 2, 0, 2, torch.device("cpu")).barrier()


def test_an_error_that_is_not_of_another_rank_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(values: torch.Tensor) -> None:
        raise error

    monkeypatch.setattr(dist, "all_reduce", fails)
    own = (RuntimeError("a tensor of the wrong shape"), dist.DistBackendError("NCCL: unhandled cuda error"))
    for error in own:
        with pytest.raises(type(error)) as raised:
            World(0, 2, 0, 2, torch.device("cpu")).barrier()
        assert raised.value is error


@pytest.mark.parametrize(("devices", "shared"), [("abc", False), ("aba", True), ("aaa", True)])
def test_ranks_that_share_a_device_all_find_out(devices: str, shared: bool) -> None:
    store, found = dist.HashStore(), {}

    def rank(number: int) -> None:
        found[number] = shares_device(store, number, len(devices), devices[number])

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {number: shared for number in range(len(devices))}


_TWO_ON_ONE = """
import os, sys
from pathlib import Path
import torch
from dflash_mp.config_file import load_config
from dflash_mp.drafter.world import data_parallel, join, leave
world = join(load_config(Path(sys.argv[1]), []).config)
model = torch.nn.Linear(4, 4, bias=False).to(world.device, torch.bfloat16)
model.weight.data.fill_(1)
parallel = data_parallel(model, world)
parallel(torch.full((2, 4), float(world.rank + 1), device=world.device, dtype=torch.bfloat16)).sum().backward()
print(torch.distributed.get_backend(), model.weight.grad.unique().tolist(), flush=True)
leave(world)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_ranks_on_one_gpu_add_their_gradients_by_gloo(tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path)
    tree["train"]["device"] = "cuda"
    file, script = tmp_path / "run.yaml", tmp_path / "rank.py"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    script.write_text(_TWO_ON_ONE, encoding="utf-8")
    command = [sys.executable, "-m", "dflash_mp.torchrun", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command += [sys.executable, "-m", "dflash_mp.bench.on_device", "0,0", sys.executable, str(script), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert sorted(done.stdout.split("\n")) == ["", "gloo [6.0]", "gloo [6.0]"]
