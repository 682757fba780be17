"""What the kernel and the container allow: /dev/shm, shared memory without a file, memory, open files, locked memory."""

from __future__ import annotations

import fcntl
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from dflash_mp.doctor.finding import Finding, gib, green, red, yellow
from dflash_mp.stream.memory_limits import left

_SHM = Path("/dev/shm")
_SHM_LEAST = 16 << 20  # below this hardly anything that uses it starts
_SHM_PER_RANK = 64 << 20  # NCCL takes some 10 MB per connection and channel
_SHM_GOOD = 1 << 30
_UNLIMITED = 1 << 60  # a control group without a limit says so with a huge number
_FILES_PER_PROCESS = 16
_FILES_ANYWAY = 256
_FILES_GOOD = 4096


@dataclass(frozen=True)
class Needs:
    """What a run takes of this machine; the least there is without a configuration."""

    processes: int = 2  # feeders and drafters
    gpu_ranks: int = 0  # drafters on GPUs, which share gradients through NCCL
    ring: int = 1 << 20  # bytes of the largest piece of shared memory
    pinned: int = 0  # bytes of page-locked memory of the largest process


def check_limits(needs: Needs) -> list[Finding]:
    """All limits of this process."""
    return [
        _dev_shm(needs.gpu_ranks),
        _memfd(needs.ring),
        _memory(),
        _open_files(needs.processes),
        _locked(needs.pinned),
    ]


def _dev_shm(gpu_ranks: int) -> Finding:
    about, remedy = (
        "/dev/shm",
        "docker run --shm-size=2g (compose: shm_size: 2g; Kubernetes: an emptyDir of medium Memory)",
    )
    try:
        facts = os.statvfs(_SHM)
    except OSError as error:
        return red(about, f"{error.strerror}", f"mount a tmpfs there: {remedy}")
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    needed = max(_SHM_LEAST, gpu_ranks * _SHM_PER_RANK if gpu_ranks > 1 else 0)
    text = f"{gib(free)} of {gib(size)} free"
    if free < needed:
        of = f"NCCL between {gpu_ranks} GPUs" if gpu_ranks > 1 else "anything that uses it"
        return red(about, f"{text}; {of} needs {gib(needed)}", remedy)
    if size < _SHM_GOOD:
        return yellow(about, f"{text}: little for NCCL between many GPUs, enough for one GPU or a CPU", remedy)
    return green(about, text)


def _memfd(nbytes: int) -> Finding:
    """Make what feeders and drafters of one machine share rows through, and let it go."""
    about = "shared memory"
    try:
        descriptor = os.memfd_create("dflash-mp-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        finally:
            os.close(descriptor)
    except OSError as error:
        return yellow(
            about,
            f"a sealed piece of {gib(nbytes)} can't be had ({error.strerror}): rows on one machine go through sockets",
            "allow memfd_create (seccomp profile), and files of that size (ulimit -f unlimited)",
        )
    return green(about, f"a sealed piece of {gib(nbytes)} can be had, whatever /dev/shm holds")


def _memory() -> Finding:
    limits = left()
    if not limits:
        return yellow("host memory", "neither /proc/meminfo nor a control group says what is left", "mount /proc")
    tightest = {who: min(nbytes for whose, nbytes in limits if whose == who) for who, _ in limits}
    text = "; ".join(f"{who} has {gib(nbytes)} left" for who, nbytes in tightest.items() if nbytes < _UNLIMITED)
    if min(tightest.values()) < 1 << 30:
        return yellow(
            "host memory", text, f"free memory, or raise the limit of {min(tightest, key=tightest.__getitem__)}"
        )
    return green("host memory", text)


def _open_files(processes: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_ANYWAY + _FILES_PER_PROCESS * processes
    text = f"{_limit(soft)} open files (hard limit {_limit(hard)}), {needed} needed"
    if soft != resource.RLIM_INFINITY and soft < needed:
        return red(
            "open files", text, f"ulimit -n {max(needed, _FILES_GOOD)} (docker run --ulimit nofile={_FILES_GOOD})"
        )
    return green("open files", text)


def _locked(pinned: int) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    text = "unlimited" if unlimited else gib(soft)
    if not unlimited and soft < max(pinned, 64 << 20) and _has_infiniband():
        return yellow(
            "locked memory",
            f"{text}; NCCL over InfiniBand registers more",
            "ulimit -l unlimited (docker run --ulimit memlock=-1)",
        )
    return green("locked memory", f"{text} (matters for InfiniBand only; the driver pins rows without it)")


def _has_infiniband() -> bool:
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
