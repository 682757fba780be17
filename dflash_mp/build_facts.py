"""What this installation is: `dflash-mp --version`, and the first lines of a bug report.

Nothing here imports PyTorch, which takes seconds: its versions are read from its files. What cannot be found out is "none".
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import subprocess
from pathlib import Path

from dflash_mp import __version__

_GIT_SECONDS = 5.0
_CUDA = re.compile(r"^cuda\b[^=]*= *(?:'([^']*)'|\"([^\"]*)\")", re.MULTILINE)


def lines() -> list[str]:
    """The facts, one a line; the first is the version."""
    package = Path(__file__).parent
    return [
        f"dflash-mp {__version__}",
        f"commit: {commit(package.parent) or 'none (not a checkout)'}",
        f"python: {platform.python_version()} on {platform.system()} {platform.machine()}",
        f"torch: {_version('torch')}, CUDA: {torch_cuda() or 'none'}",
        *(f"{name}: {_version(name)}" for name in ("transformers", "pyzmq", "safetensors", "numpy")),
        f"installed at: {package}",
    ]


def commit(directory: Path) -> str | None:
    """The commit that `directory` is a checkout of, and whether its files were changed; None when it is no checkout or git is missing."""
    if not (directory / ".git").exists():
        return None
    revision = _git(directory, "rev-parse", "--short=12", "HEAD")
    if not revision:
        return None
    return f"{revision}, with changes" if _git(directory, "status", "--porcelain", "-uno") else revision


def torch_cuda() -> str | None:
    """The CUDA version that the installed PyTorch was built with; None for a build without it, or no PyTorch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        match = _CUDA.search((Path(found.origin).parent / "version.py").read_text(encoding="utf-8"))
    except OSError:
        return None
    return (match[1] or match[2]) if match else None


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _git(directory: Path, *arguments: str) -> str:
    """What git prints; empty when it fails, hangs or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
