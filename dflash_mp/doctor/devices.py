"""The GPUs that this process may use, what is free on each, and who uses the rest.

PyTorch says which devices there are and in which order (CUDA_VISIBLE_DEVICES counts); nvidia-smi, where there is one, says what is used and by
whom, without touching the devices. Without it PyTorch is asked for the free memory, which opens a context on each device for a moment.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dflash_mp.doctor.finding import Finding, gib, green, red, yellow
from dflash_mp.drafter.fp8_products import CAPABILITY

_SECONDS = 20.0


@dataclass(frozen=True)
class Gpu:
    """A device. `users`: processes on it, as "PID NAME (GiB)"."""

    index: int
    name: str
    total: int
    free: int
    architecture: str  # sm_90
    users: tuple[str, ...] = ()


ReadGpus = Callable[[], Sequence[Gpu]]


def read_gpus() -> list[Gpu]:
    """All devices that PyTorch sees, in its order."""
    if not torch.cuda.is_available():
        return []
    free, users = _free_by_uuid(), _users_by_uuid()
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        uuid = f"GPU-{facts.uuid}"
        left = free.get(uuid)
        found.append(
            Gpu(
                index,
                facts.name,
                facts.total_memory,
                torch.cuda.mem_get_info(index)[0] if left is None else min(left, facts.total_memory),
                f"sm_{facts.major}{facts.minor}",
                tuple(users.get(uuid, ())),
            )
        )
    return found


def check_gpus(gpus: Sequence[Gpu], built_for: Sequence[str]) -> list[Finding]:
    """One line per device: free memory, and whether this PyTorch has code for it."""
    findings = []
    for gpu in gpus:
        about, text = f"cuda:{gpu.index}", f"{gpu.name}, {gib(gpu.free)} of {gib(gpu.total)} free"
        used_by = f", used by {'; '.join(gpu.users)}" if gpu.users else ""
        if built_for and not _runs(gpu.architecture, built_for):
            findings.append(
                red(
                    about,
                    f"{text}: this PyTorch has no code for {gpu.architecture}",
                    "install a PyTorch built for this GPU",
                )
            )
        elif gpu.free < 0.9 * gpu.total:
            findings.append(
                yellow(about, text + used_by, "end what uses it, or leave this GPU out (CUDA_VISIBLE_DEVICES)")
            )
        else:
            findings.append(green(about, text))
    return findings


def check_fp8(gpus: Sequence[Gpu], drafters: int) -> list[Finding]:
    """What `train.precision: fp8` can't run on, of the devices that `drafters` ranks would use: the first ones."""
    least = "sm_{}{}".format(*CAPABILITY)
    return [
        red(
            f"cuda:{gpu.index}",
            f"train.precision is fp8, but {gpu.name} is {gpu.architecture}: products in fp8 need {least}",
            "set train.precision to bf16 or auto, or use a newer GPU",
            2,
        )
        for gpu in gpus[:drafters]
        if (int(gpu.architecture[3:-1]), int(gpu.architecture[-1])) < CAPABILITY
    ]


def driver_version() -> str | None:
    """Of the NVIDIA driver; None without nvidia-smi."""
    rows = _nvidia_smi("--query-gpu=driver_version")
    return rows[0][0] if rows else None


def _runs(architecture: str, built_for: Sequence[str]) -> bool:
    """Code for the same major version and an earlier or equal minor one runs; so does any older PTX (compute_…)."""
    major, minor = int(architecture[3:-1]), int(architecture[-1])
    for built in built_for:
        kind, _, number = built.partition("_")
        digits = number.rstrip("af")
        if not digits.isdecimal():
            continue
        its_major, its_minor = int(digits[:-1]), int(digits[-1])
        if (its_major == major and its_minor <= minor) or (
            kind == "compute" and (its_major, its_minor) <= (major, minor)
        ):
            return True
    return False


def _free_by_uuid() -> dict[str, int]:
    return {uuid: int(free) << 20 for uuid, free in _nvidia_smi("--query-gpu=uuid,memory.free") if free.isdecimal()}


def _users_by_uuid() -> dict[str, list[str]]:
    users: dict[str, list[str]] = {}
    for uuid, pid, name, used in _nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory"):
        memory = f" ({int(used) / 1024:.1f} GiB)" if used.isdecimal() else ""
        users.setdefault(uuid, []).append(f"process {pid} {name.rpartition('/')[2]}{memory}")
    return users


def _nvidia_smi(query: str) -> list[list[str]]:
    """Rows of its answer; none where it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    width = query.partition("=")[2].count(",") + 1
    rows = csv.reader(io.StringIO(done.stdout), skipinitialspace=True)
    return [row for row in rows if len(row) == width]
