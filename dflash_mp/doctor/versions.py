"""Python, PyTorch, CUDA, driver and NCCL: whether they are there and go together."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from dflash_mp.doctor.devices import driver_version
from dflash_mp.doctor.finding import Finding, green, red, yellow
from dflash_mp.stream.software import own_software, release

_LEAST_PYTHON = (3, 10)
_LEAST = {"torch": (2, 11), "transformers": (5, 15), "pyzmq": (26, 4), "numpy": (1, 26)}


def check_versions(needs_cuda: bool, ranks: int) -> list[Finding]:
    """`needs_cuda`: the configuration names a CUDA device; `ranks`: drafters on this machine."""
    python = f"{platform.python_version()} at {sys.executable}"
    findings = [
        green("Python", python)
        if sys.version_info >= _LEAST_PYTHON
        else red("Python", python, "install Python 3.10 or newer")
    ]
    installed = dict(own_software())
    for name, least in _LEAST.items():
        version, wanted = installed[name], ".".join(map(str, least))
        if version == "none" or _numbers(version) < least:
            findings.append(red(name, version, f"pip install '{name}>={wanted}'"))
        else:
            findings.append(green(name, version))
    return [*findings, *_bytecode(), _cuda(needs_cuda), *_nccl(ranks)]


def _bytecode() -> list[Finding]:
    """A finding if each process has to compile PyTorch's Python source again: that is most of a start then."""
    source = Path(torch.__file__).parent / "_inductor" / "compile_fx.py"
    compiled = Path(importlib.util.cache_from_source(str(source)))
    writable = os.access(next(parent for parent in compiled.parents if parent.is_dir()), os.W_OK)
    if compiled.exists() or (writable and not sys.dont_write_bytecode):
        return []
    why = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else f"{compiled.parent} can't be written"
    return [
        yellow(
            "bytecode",
            f"PyTorch was installed without its bytecode, and {why}: every feeder and rank takes some ten seconds longer to start",
            "unset PYTHONDONTWRITEBYTECODE, or set PYTHONPYCACHEPREFIX to a directory that may be written",
        )
    ]


def _cuda(needed: bool) -> Finding:
    driver = driver_version()
    with_driver = f"driver {driver}" if driver else "no driver found (no nvidia-smi)"
    built = torch.version.cuda
    if torch.cuda.is_available():
        return green("CUDA", f"PyTorch built for {built}, {with_driver}, {torch.cuda.device_count()} devices")
    if built is None:
        text, remedy = f"this PyTorch is built without CUDA; {with_driver}", "install PyTorch's CUDA build"
    else:
        text = f"PyTorch is built for CUDA {built}, but can use no device; {with_driver}"
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES; the driver must be at least as new as that CUDA"
    if needed:
        return red("CUDA", text, remedy)
    if driver is None:
        return green("CUDA", f"{text}: everything runs on the CPU")
    return yellow("CUDA", f"{text}: everything would run on the CPU", remedy)


def _nccl(ranks: int) -> list[Finding]:
    if not torch.cuda.is_available():
        return []
    if not dist.is_nccl_available():
        say = red if ranks > 1 else yellow
        return [say("NCCL", "this PyTorch has none, so drafters can't share gradients", "install PyTorch's CUDA build")]
    return [green("NCCL", ".".join(map(str, torch.cuda.nccl.version())))]


def _numbers(version: str) -> tuple[int, ...]:
    parts = release(version).split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
