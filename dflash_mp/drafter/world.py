"""The ranks of a run: who am I, on which device, and the few collectives that training needs.

Started by torchrun, a process is one of `WORLD_SIZE` ranks (NCCL on CUDA, gloo on a CPU, and where ranks share a GPU, which NCCL
refuses); started plainly it is a world of one and no process group exists. Collectives have a time-out of their own, longer than every wait for data, so that a starving rank
reports its own error first.
"""

# Annotations stay evaluated here: DDP checks those of a communication hook when it is registered.
import logging
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from dflash_mp.config import RunConfig
from dflash_mp.control_groups import usable_cores
from dflash_mp.drafter import fp8_products
from dflash_mp.drafter.step_profile import span
from dflash_mp.errors import ConfigError, StreamError

log = logging.getLogger(__name__)

# A rank may wait `row_seconds` for a row while the others already sit in a collective.
_COLLECTIVE_MARGIN_SECONDS = 300.0
# torchrun looks ten times a second; of ranks that it finds dead together it may take any for the first to fail.
_SEEN_SECONDS = 1.0


@dataclass(frozen=True)
class World:
    """This process's place among the ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    store: dist.Store | None = None  # where the ranks met; None in a world of one

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over all ranks, in place on this rank's device; also returns them."""
        if self.size > 1:
            with _others_present():
                dist.all_reduce(values)
        return values

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` (same shapes on every rank) with those of rank 0."""
        if self.size > 1:
            with _others_present():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0)

    def barrier(self) -> None:
        """Wait until every rank is here (bounded by the process group's time-out)."""
        self.sum(torch.zeros(1, device=self.device))


def rank_of_process() -> int:
    """What torchrun says, before anybody has joined."""
    return int(os.environ.get("RANK", "0"))


def join(config: RunConfig) -> World:
    """Join the ranks that torchrun started, or be a world of one. Sets the device and the CPU threads. Raises `ConfigError`."""
    rank, size = rank_of_process(), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = _device(config.train.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    fp8_products.check_device(device, config.train.precision)
    if config.train.deterministic:
        _use_deterministic_kernels()
    torch.set_num_threads(config.train.threads or max(1, usable_cores() // local_size))
    store = None
    if size > 1:
        seconds = config.stream.row_seconds + config.stream.connect_seconds + _COLLECTIVE_MARGIN_SECONDS
        bound = timedelta(seconds=seconds)
        store, _, _ = next(rendezvous("env://", rank, size, timeout=bound))
        nccl = device.type == "cuda"
        if nccl and shares_device(store, rank, size, str(torch.cuda.get_device_properties(device).uuid)):
            log.warning("ranks share a GPU: gradients are added by gloo, through the host's memory, which is slow")
            nccl = False
        dist.init_process_group(
            "nccl" if nccl else "gloo",
            timeout=bound,
            store=dist.PrefixStore("default_pg", store),
            rank=rank,
            world_size=size,
            device_id=device if nccl else None,
        )
    return World(rank, size, local_rank, local_size, device, store)


def shares_device(store: dist.Store, rank: int, size: int, device: str) -> bool:
    """Whether two of `size` ranks say the same `device`, a name that no two devices have. All ranks call it and get the same answer."""
    devices = dist.PrefixStore("devices", store)
    devices.set(str(rank), device)
    return len({devices.get(str(other)) for other in range(size)}) < size


def _use_deterministic_kernels() -> None:
    """An operation that has none raises an error that names it. Before the first product: cuBLAS reads its setting when it starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Nothing here reads what it did not write, so memory need not be filled.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # the stubs lack it


def leave(world: World) -> None:
    """Leave the process group, if there is one."""
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def data_parallel(module: nn.Module, world: World) -> nn.Module:
    """Wrap `module` so that the last backward pass of a step adds the gradients of all ranks (sums: the loss is not a mean).

    DDP re-orders its buckets, and with them its additions, once after the first backward pass. `trainer.warm_up` makes that pass
    before the first step, so that a resumed run adds in the same order as one that was never interrupted.
    """
    if world.size == 1:
        return module
    # Dynamo would cut what is compiled where one of DDP's buckets ends, in the middle of a layer. Layers are compiled one by one: that
    # alone lets reduction overlap with the backward pass.
    torch._dynamo.config.optimize_ddp = False
    with warnings.catch_warnings():
        # What newer versions name instead is not in the older ones.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        parallel = DistributedDataParallel(
            module,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # each rank has the same: how fp8 rounds weights
        )
    parallel.register_comm_hook(None, _sum_gradients)
    return parallel


def _sum_gradients(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    with span("reduce"):
        return _sum_bucket(bucket)


def _sum_bucket(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    work = dist.all_reduce(gradients, async_op=True)
    if dist.get_backend() == "nccl":
        return work.get_future().then(lambda future: future.value()[0])
    # A callback in Python would be freed by gloo's own thread, which needs the interpreter's lock for that. The destructor of
    # the process group holds the lock while it joins that thread: a rank that ends right after a step could hang.
    with _others_present():
        work.wait()
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[gradients.device] if gradients.is_cuda else None
    )
    done.set_result(gradients)
    return done


@contextmanager
def _others_present() -> Iterator[None]:
    """Around a collective: another rank's end is a `StreamError`, late enough for torchrun to see that other rank end first."""
    try:
        yield
    except RuntimeError as error:
        if not _by_another_rank(error):
            raise
        time.sleep(_SEEN_SECONDS)
        reason = str(error).splitlines()[0]
        how = "does not answer" if "timed out" in reason.lower() else "is gone"
        raise StreamError(
            f"rank {rank_of_process()}: another rank {how} ({reason})",
            "its own log, or the launcher's summary, says why; the same command resumes from the last checkpoint",
        ) from error


def _by_another_rank(error: RuntimeError) -> bool:
    """Whether the other end of a connection failed, for all that a collective raises; errors of CUDA come up in one, too."""
    text = str(error)
    return "cuda error" not in text.lower() and (isinstance(error, dist.DistError) or "/gloo/" in text)


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise ConfigError(f"{name!r} is not a device that ranks can share out", "train.device: auto, cpu or cuda")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"there is no cuda here: PyTorch sees {torch.cuda.device_count()} CUDA devices",
            "set train.device: cpu, or install a PyTorch built for this machine's GPU",
        )
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local_rank} of this machine has no GPU: {torch.cuda.device_count()} are visible",
            "start as many processes as GPUs (torchrun --nproc-per-node), or check CUDA_VISIBLE_DEVICES",
        )
    return torch.device("cuda", local_rank)
