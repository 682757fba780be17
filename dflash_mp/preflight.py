"""What `dflash-mp run` checks before it starts a process, so that a mistake costs a second and not the loading of a target.

Checks never load a model or touch the network. What only a part can find out (a wrong tokenizer, too little GPU memory) that part reports.
"""

from __future__ import annotations

import re
from pathlib import Path

from dflash_mp.config import RunConfig, TargetConfig
from dflash_mp.data.store import open_dataset
from dflash_mp.errors import ConfigError, TargetError
from dflash_mp.stream.endpoints import check_available
from dflash_mp.stream.keys import DrafterKeys, FeederKeys

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check(config: RunConfig) -> None:
    """Raise a `DflashError` for whatever keeps this run from starting."""
    check_target(config.target)
    open_dataset(config)
    check_endpoints(config)


def check_target(target: TargetConfig) -> None:
    """A local target must exist; what looks like a hub id is left to the feeder."""
    path = Path(target.path)
    if path.exists():
        return
    if target.path.endswith(".gguf") or not _HUB_ID.fullmatch(target.path) or path.parent.is_dir():
        raise TargetError(f"there is no target at {target.path}", "check target.path")


def check_endpoints(config: RunConfig) -> None:
    """Addresses must be distinct, well formed, of this machine, and free; keys, if any, must be readable by this user alone."""
    endpoints = config.feeder_endpoints()
    twice = sorted({endpoint for endpoint in endpoints if endpoints.count(endpoint) > 1})
    if twice:
        raise ConfigError(f"feed.endpoints names {', '.join(twice)} twice", "give each feeder its own address")
    if config.stream.keys is not None:
        FeederKeys.load(config.stream.keys)
        DrafterKeys.load(config.stream.keys)
    for endpoint in endpoints:
        if endpoint.startswith("tcp://") and endpoint.endswith((":*", ":0")):
            raise ConfigError(f"{endpoint} leaves the port open, so drafters cannot find it", "name a port")
        check_available(endpoint, config.feed.insecure_no_auth, config.stream.keys is not None)
