"""`dflash-mp run`: feeders and drafters of one machine as one command.

`plan` says what would be started; `run` checks (`dflash_mp.preflight`), takes the run directory for itself, starts the feeders and one
torchrun group, shows what they do, and ends when the drafters are done. Each part writes to `RUN/logs/`; the resolved configuration lies in
`RUN/config.yaml`. How it fails and stops is `dflash_mp.supervisor`'s promise: after Ctrl-C or SIGTERM the drafters save a checkpoint and
`run` returns; it raises with the first failure's exit code, or with 128 + signal when a stop could not save; and never a process is left behind.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml

from dflash_mp import __version__, logs
from dflash_mp.calibration import choose, kept_split
from dflash_mp.config_file import LoadedConfig, describe_config
from dflash_mp.drafter.steps import steps_of
from dflash_mp.errors import DflashError
from dflash_mp.preflight import check
from dflash_mp.profiling import parse_profile
from dflash_mp.run_lock import RunLock
from dflash_mp.run_view import open_view
from dflash_mp.stream.socket_directory import remove_if_empty
from dflash_mp.supervisor import Part, supervise

log = logging.getLogger(__name__)
_WIDEST = 48  # characters of a value that the others are lined up with


def run(
    loaded: LoadedConfig,
    overrides: tuple[str, ...],
    profile: tuple[str, ...] = (),
    settings: logs.Settings = logs.DEFAULT,
) -> None:
    """Run to the end of the training or to an orderly stop. `profile`: values of --profile; the parts log as `settings` say.

    Raises `DflashError`: a check's, `PartFailed` or `Stopped`.
    """
    config = loaded.config
    request = parse_profile(profile)
    if request is not None:
        request.check(config.train.steps, config.train.drafters if config.gpus is None else config.gpus - 1)
    check(config)
    with RunLock(config.run_dir), open_view(config.run_dir, config.train.steps, settings) as view:
        try:
            loaded, overrides = choose(loaded, overrides, view, environment(settings))
            if request is not None:  # `gpus` says only now how many ranks there are
                request.check(loaded.config.train.steps, loaded.config.train.drafters)
            _write_config(loaded)
            number = supervise(plan(loaded, overrides, profile), view, environment(settings))
        finally:
            remove_if_empty(config)
    if number is not None:
        step = _last_step(config.run_dir)
        log.info(
            "stopped by %s after step %d; the same command goes on from there",
            number.name,
            step,
            extra=logs.facts("stopped", signal=number.name, step=step),
        )


def plan(loaded: LoadedConfig, overrides: tuple[str, ...], profile: tuple[str, ...] = ()) -> list[Part]:
    """The parts that `run` starts, feeders first."""
    config, logs = loaded.config, loaded.config.run_dir / "logs"
    options = ["--config", str(loaded.file), *(word for text in overrides for word in ("--set", text))]
    python = (sys.executable, "-m")
    feeders = [
        Part(
            f"feeder {i}",
            (*python, "dflash_mp.cli", "feed", "--index", str(i), *options),
            logs / f"feeder-{i}.log",
            serves=True,
        )
        for i in range(len(config.feeder_endpoints()))
    ]
    torchrun = ["dflash_mp.torchrun", "--standalone", "--nproc-per-node", str(config.train.drafters)]
    if config.train.device != "cpu" and torch.cuda.device_count() >= config.train.drafters > 1:
        # Each sees its own GPU as number 0: compiled code is kept by the device's number, and so they share it.
        torchrun.append("--virtual-local-rank")
    # Through `child`, so that a rank dies with torchrun while it still imports, too.
    drafters = (*python, *torchrun, "-m", "dflash_mp.child", *python, "dflash_mp.drafter", *options)
    drafters += tuple(word for text in profile for word in ("--profile", text))
    return [*feeders, Part("drafters", drafters, logs / "drafters.log", leads=True)]


def describe_plan(loaded: LoadedConfig, overrides: tuple[str, ...], profile: tuple[str, ...] = ()) -> Iterator[str]:
    """Lines for `--plan`: every option with its value and source, then the commands."""
    rows = list(describe_config(loaded))
    widths = [max(len(row[column]) for row in rows if len(row[column]) <= _WIDEST) for column in (0, 1)]
    yield f"{'option':{widths[0]}}  {'value':{widths[1]}}  source"
    for key, value, source in rows:
        yield f"{key:{widths[0]}}  {value:{widths[1]}}  {source}"
    if loaded.config.gpus is not None:
        kept = kept_split(loaded.config)
        yield ""
        yield f"gpus: {'measured first' if kept is None else '{} feed, {} train'.format(*kept)}; one of each side:"
    for part in plan(loaded, overrides, profile):
        yield ""
        yield f"{part.name}, output to {part.log}:"
        yield f"  {shlex.join(part.command)}"


def environment(settings: logs.Settings = logs.DEFAULT) -> dict[str, str]:
    """That of the parts. Processes that share cores must sleep in barriers, not spin; the rest keeps collectives on this machine and logs prompt."""
    defaults = {"OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
    return {**defaults, **os.environ, **settings.environment(), "PYTHONUNBUFFERED": "1"}


def _last_step(run_dir: Path) -> int:
    return max(steps_of(run_dir), default=0)


def _write_config(loaded: LoadedConfig) -> None:
    head = f"# dflash-mp {__version__}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {shlex.join(sys.argv)}\n"
    text = yaml.safe_dump(loaded.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    file = loaded.config.run_dir / "config.yaml"
    try:
        file.write_text(head + text, encoding="utf-8")
    except OSError as error:
        raise DflashError(f"cannot write {file}: {error.strerror}", "free space or permissions there") from None
