"""Is the part that a container or a batch system runs well? `dflash-mp health` looks from outside, and changes nothing.

It reads the command lines of a process (that of the container, process 1, unless told otherwise) and of those it started, and asks what they promise. A feeder must
listen on its address and, where it has a metrics endpoint, answer there and not sit on one row for longer than a drafter waits. Of drafters every
rank of this machine must be there and answer. Another command must just run. The first part that fails is an `Unhealthy`, exit code 1. A look takes under a second,
imports no torch, and waits `SECONDS` at most for an answer.

`trained` says whether a run has its last step in a checkpoint: an orderly stop ends with 0, too, and who restarts runs must tell the two apart.
"""

from __future__ import annotations

import itertools
import os
import urllib.request
from pathlib import Path

from dflash_mp.addresses import in_url
from dflash_mp.config import RunConfig
from dflash_mp.config_file import load_config
from dflash_mp.drafter.steps import steps_of
from dflash_mp.errors import DflashError
from dflash_mp.listening import sockets_at
from dflash_mp.process import children_of

SECONDS = 5.0
NOT_TRAINED = 75  # EX_TEMPFAIL: to be started again
_ROW_METRIC = "dflash_mp_feeder_current_row_seconds"
_PROGRAMS = ("dflash-mp", "dflash_mp.cli")


class Unhealthy(DflashError):
    """The part is not well, or not ready yet."""


def look(pid: int) -> str:
    """What is well about all parts that process `pid` runs, seen from the last one's directory: this process moves there.

    Raises `Unhealthy`, or `ConfigError` for a configuration that can't be read.
    """
    first = _command_line(pid)
    return "; ".join(_parts_are_well(pid, first)) or f"process {pid} runs: {' '.join(first)[:200]}"


def trained(config: RunConfig) -> str:
    """The last step, when a checkpoint has it. Raises `Unhealthy` with exit code 75 otherwise."""
    step = max(steps_of(config.run_dir), default=0)
    if step < config.train.steps:
        error = Unhealthy(
            f"{config.run_dir} is at step {step} of {config.train.steps}",
            "start the same command again, it goes on there",
        )
        error.exit_code = NOT_TRAINED
        raise error
    return f"{config.run_dir} is trained to step {step} of {config.train.steps}"


def _parts_are_well(pid: int, words: list[str]) -> list[str]:
    """What is well about each part that process `pid` is, or has started. What a part has started belongs to it."""
    if "dflash_mp.drafter" in words:
        return [_ranks_are_well(pid, _config(words, pid), words)]
    if any(a.endswith(_PROGRAMS) and b == "feed" for a, b in itertools.pairwise(words)):
        return [_feeder_is_well(_config(words, pid), int((_values(words, "--index") or ["0"])[-1]))]
    return [well for child in children_of(pid) for well in _parts_are_well(child, _words(child))]


def _feeder_is_well(config: RunConfig, index: int) -> str:
    endpoints = config.feeder_endpoints()
    endpoint = endpoints[index] if index < len(endpoints) else f"feeder {index} of {len(endpoints)}"
    if not sockets_at(endpoint):  # connecting would be an event in the feeder's log
        raise Unhealthy(f"no feeder listens on {endpoint}", "it may still load the target; see its log")
    if config.metrics.feeder_port is not None:
        for line in _figures(config, config.metrics.feeder_port + index, f"feeder {index}").splitlines():
            if line.startswith(_ROW_METRIC) and float(line.split()[-1]) > config.stream.row_seconds:
                raise Unhealthy(
                    f"feeder {index} has been at one row for {float(line.split()[-1]):.0f} s", "restart it; see its log"
                )
    return f"feeder {index} serves on {endpoint}"


def _ranks_are_well(pid: int, config: RunConfig, words: list[str]) -> str:
    ranks = {}
    for child in _descendants(pid):
        facts = _environment(child)
        if "LOCAL_RANK" in facts and "dflash_mp.drafter" in _words(child):
            ranks[int(facts["RANK"])] = int(facts["LOCAL_WORLD_SIZE"])
    expected = max(ranks.values(), default=0)
    if not ranks or len(ranks) < expected:
        wanted = expected or (_values(words, "--nproc-per-node") or ["?"])[-1]
        raise Unhealthy(f"{len(ranks)} of {wanted} ranks run here", "they may still start; see the log")
    if config.metrics.rank_port is not None:
        for rank in sorted(ranks):
            _figures(config, config.metrics.rank_port + rank, f"rank {rank}")
    return f"ranks {', '.join(map(str, sorted(ranks)))} run" + (" and answer" if config.metrics.rank_port else "")


def _figures(config: RunConfig, port: int, who: str) -> str:
    """The page of figures of a process of this machine."""
    url = f"http://{in_url(config.metrics.address)}:{port}/metrics"
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=SECONDS) as answer:
            text: str = answer.read().decode()
            return text
    except OSError as error:
        raise Unhealthy(f"{who} does not answer at {url}: {error}", "it may still start; see its log") from None


def _config(words: list[str], pid: int) -> RunConfig:
    """The configuration that a command line names, read in that process's directory."""
    files = _values(words, "--config", "-c")
    if not files:
        raise Unhealthy(f"process {pid} names no configuration: {' '.join(words)}", "start it with --config FILE")
    environment = _environment(pid)
    if "XDG_RUNTIME_DIR" in environment:  # where ipc sockets lie
        os.environ["XDG_RUNTIME_DIR"] = environment["XDG_RUNTIME_DIR"]
    os.chdir(Path(f"/proc/{pid}/cwd").resolve())
    return load_config(Path(files[-1]), _values(words, "--set")).config


def _values(words: list[str], *options: str) -> list[str]:
    """What follows any of `options`, as the next word or after =."""
    after = [value for word, value in itertools.pairwise(words) if word in options]
    return after + [word.partition("=")[2] for word in words if word.partition("=")[0] in options and "=" in word]


def _command_line(pid: int) -> list[str]:
    words = _words(pid)
    if words == [""]:
        raise Unhealthy(f"there is no process {pid}, or it has ended", "start it again")
    return words


def _words(pid: int) -> list[str]:
    """The command line of a process; a single empty word when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return [""]


def _descendants(pid: int) -> list[int]:
    found = children_of(pid)
    return found + [below for child in found for below in _descendants(child)]


def _environment(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it ended meanwhile
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
