"""Which versions a process runs: said in the handshake, so that hosts that differ are found before they cost a run.

A row must be the same bits whichever feeder makes it, and that holds only for feeders of one PyTorch. Nothing is imported to
learn a version; a package that is not installed is "none".
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from functools import cache
from typing import Annotated, NamedTuple

import torch

from dflash_mp import __version__
from dflash_mp.stream.codec import FOR_PEOPLE, at_most

_NONE = "none"


class Package(NamedTuple):
    """One piece of software and its version, in the writing of its own `__version__`."""

    name: Annotated[str, at_most(64), FOR_PEOPLE]
    version: Annotated[str, at_most(64), FOR_PEOPLE]


Software = Annotated[tuple[Package, ...], at_most(32)]


@cache
def own_software() -> tuple[Package, ...]:
    """This process's versions."""
    return (
        Package("dflash-mp", __version__),
        Package("python", platform.python_version()),
        Package("torch", str(torch.__version__)),
        Package("cuda", str(torch.version.cuda or _NONE)),
        *(Package(name, _installed(name)) for name in ("transformers", "numpy", "pyzmq")),
    )


def differences(here: Sequence[Package], there: Sequence[Package]) -> list[tuple[str, str, str]]:
    """(name, version here, version there) of each that both sides name and that differs, in the order of `here`."""
    theirs = dict(there)
    return [(name, version, theirs[name]) for name, version in here if theirs.get(name, version) != version]


def release(version: str) -> str:
    """`version` without the build that follows a plus: "2.11.0" of "2.11.0+cu130"."""
    return version.partition("+")[0]


def torch_mismatch(here: Sequence[Package], there: Sequence[Package]) -> str | None:
    """In words, if the two sides run different releases of PyTorch; None otherwise, or where one side doesn't say."""
    for name, ours, theirs in differences(here, there):
        if name == "torch" and release(ours) != release(theirs):
            return f"it runs PyTorch {theirs}, this side {ours}: its rows may differ in their last bits from those made elsewhere"
    return None


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _NONE
