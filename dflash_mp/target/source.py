"""Where a target lies: a Hugging Face directory, a GGUF file, or a hub id.

`locate` decides which, once, for tokenizer and model alike. What is missing is a `TargetError` that says what was looked for;
nothing is guessed from a path that almost exists.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dflash_mp.config import TargetConfig
from dflash_mp.errors import TargetError

# What transformers raises for files that are missing, unreadable, malformed or of an unknown model.
LOADING_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)


@dataclass(frozen=True)
class TargetSource:
    """`location` is a directory or a hub id; `gguf_file` is a file name within it; `name` is the target's name for people."""

    location: str
    name: str
    gguf_file: str | None = None
    local: bool = True

    @property
    def gguf_path(self) -> Path | None:
        return Path(self.location, self.gguf_file) if self.gguf_file else None

    def load_arguments(self, config: TargetConfig) -> dict[str, Any]:
        """Keyword arguments of transformers' `from_pretrained` that name the files and what may be run."""
        arguments: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
        if self.gguf_file:
            arguments["gguf_file"] = self.gguf_file
        if not self.local and config.revision is not None:
            arguments["revision"] = config.revision
        return arguments


def locate(config: TargetConfig) -> TargetSource:
    """Find what `config.path` names. Raises `TargetError` if it is a path on this machine and nothing is there."""
    path = Path(config.path).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise TargetError(f"there is no GGUF file {config.path}", "check target.path")
        require_gguf()
        return TargetSource(str(path.absolute().parent), path.stem, gguf_file=path.name)
    if path.is_dir():
        if not any(path.glob("*.json")):
            found = sorted(p.name for p in path.glob("*.gguf"))
            remedy = f"give the file itself: target.path: {path / found[0]}" if found else "check target.path"
            raise TargetError(f"{config.path} holds no Hugging Face checkpoint (no config.json)", remedy)
        return TargetSource(str(path), path.absolute().name)
    if path.exists():
        raise TargetError(
            f"target.path {config.path} is a file, but not a .gguf file",
            "give a Hugging Face directory, a hub id or a .gguf file",
        )
    if not _could_be_hub_id(config.path):
        raise TargetError(f"there is no directory {config.path}", "check target.path")
    return TargetSource(config.path, config.path, local=False)


def require_gguf() -> None:
    """Raise `TargetError` naming the extra if a package that GGUF files need is missing."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise TargetError(f"a GGUF target needs the package {' and '.join(missing)}", "pip install 'dflash-mp[gguf]'")


def unloadable(what: str, source: TargetSource, config: TargetConfig, error: BaseException) -> TargetError:
    """The error for `what` (tokenizer, model) that transformers could not load from `source`."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in text and not config.trust_remote_code:
        return TargetError(
            f"the {what} of {source.name} needs Python code from its own repository",
            "read that code; if you trust it, set target.trust_remote_code: true",
        )
    if what == "model" and "model.safetensors" in text:
        return TargetError(
            f"cannot load the model of {config.path}: it has no safetensors, and pickled weights are not loaded: {text[:600]}",
            "convert them: load the model with transformers where you trust it, and save_pretrained() it",
        )
    if config.attention == "flash_attention_2" and re.search(r"flash.?att", text, re.IGNORECASE):
        return TargetError(
            f"cannot load the {what} of {config.path}: {text[:600]}",
            "install flash-attn, where a GPU can run it, or set target.attention to something else, e.g. auto",
        )
    if source.local:
        return TargetError(f"cannot load the {what} of {config.path}: {text[:600]}", "check the files in it")
    return TargetError(
        f"there is no directory {config.path} here, and its {what} can't be loaded from the hub: {text[:600]}",
        "check the name, the network and your access to the hub",
    )


def _could_be_hub_id(path: str) -> bool:
    return path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not path.endswith("/")
