"""`gpus: N`: which of them feed and which train, chosen by measuring both sides before the run begins.

`choose` starts one real feeder and one process that trains on its rows (`dflash_mp.drafter.calibrate`), reckons the pace of every split
(`dflash_mp.split`), says why it takes the one it takes, and returns the configuration with that split written out. It costs one start of a
feeder and some twenty micro-batches. The choice lies in `RUN/split.json`: a resumed run keeps it, because other numbers of ranks add up in
another order. Fails like a run: with what the failed part said.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_mp import logs
from dflash_mp.config import RunConfig
from dflash_mp.config_file import LoadedConfig, load_config
from dflash_mp.errors import ConfigError, DflashError
from dflash_mp.split import Batch, Pace, Split, best_split, splits
from dflash_mp.supervisor import Part, Running, Stopped, supervise

log = logging.getLogger(__name__)
_FILE = "split.json"


def choose(
    loaded: LoadedConfig,
    overrides: tuple[str, ...],
    watch: Callable[[Sequence[Running]], None],
    environment: Mapping[str, str],
) -> tuple[LoadedConfig, tuple[str, ...]]:
    """The configuration and overrides of the run, with the split in place of `gpus`. Call it with the run directory locked.

    Raises `ConfigError` for more GPUs than there are, and what `supervise` raises.
    """
    config = loaded.config
    if config.gpus is None:
        return loaded, overrides
    on_gpus = _check_gpus(config, config.gpus)
    sizes = kept_split(config)
    if sizes is None:
        sizes = _measured(loaded, overrides, config.gpus, on_gpus, watch, environment)
    feeders, drafters = sizes
    written_out = (*overrides, *_as_overrides(feeders, drafters, on_gpus))
    return load_config(loaded.file, written_out), written_out


def parts(loaded: LoadedConfig, overrides: tuple[str, ...], on_gpus: bool) -> list[Part]:
    """The processes that measure: a feeder on the second GPU, a drafter on the first."""
    run_dir = loaded.config.run_dir
    sets = [word for text in (*overrides, *_as_overrides(1, 1, on_gpus)) for word in ("--set", text)]
    options = ["--config", str(loaded.file), *sets]
    python = (sys.executable, "-m")
    drafter = (*python, "dflash_mp.drafter.calibrate", "--out", str(_paces_file(run_dir)), *options)
    return [
        Part(
            "calibration feeder",
            (*python, "dflash_mp.cli", "feed", "--index", "0", *options),
            run_dir / "logs" / "calibration-feeder.log",
            serves=True,
        ),
        Part("calibration drafter", drafter, run_dir / "logs" / "calibration-drafter.log"),
    ]


def reasons(pace: Pace, gpus: int, batch: Batch, chosen: Split) -> list[str]:
    """Why `chosen`: what was measured, and what every split would give."""
    return [
        f"one feeder makes {pace.feeder_rows_per_second:.3g} rows/s; a drafter takes {1e3 * pace.micro_batch_seconds:.3g} ms for "
        f"{batch.micro_batch_rows} row{'' if batch.micro_batch_rows == 1 else 's'} and {1e3 * pace.step_seconds:.3g} ms more for a step",
        *(f"{'→' if split == chosen else ' '} {split.line()}" for split in splits(pace, gpus, batch)),
    ]


def _check_gpus(config: RunConfig, gpus: int) -> bool:
    """Whether the split is one of GPUs; otherwise, as said in the configuration, one of processes on the CPU."""
    if config.target.device == "cpu" and config.train.device == "cpu":
        return False
    if config.train.device == "cpu":
        raise ConfigError("gpus is set, but train.device is cpu", "set it to auto, or target.device to cpu, too")
    if config.target.device not in ("auto", "cuda"):
        raise ConfigError(
            f"gpus leaves the devices to `run`, but target.device is {config.target.device}",
            "set it to auto, or drop gpus",
        )
    import torch

    visible = torch.cuda.device_count()
    if gpus > visible:
        raise ConfigError(
            f"gpus is {gpus}, but PyTorch sees {visible} here",
            "lower gpus, check CUDA_VISIBLE_DEVICES, or set target.device and train.device to cpu to share out processes",
        )
    return True


def _measured(
    loaded: LoadedConfig,
    overrides: tuple[str, ...],
    gpus: int,
    on_gpus: bool,
    watch: Callable[[Sequence[Running]], None],
    environment: Mapping[str, str],
) -> tuple[int, int]:
    config = loaded.config
    kind = "GPUs" if on_gpus else "processes on the CPU, which share its cores"
    log.info("measuring one feeder and one drafter, to share out %d %s", gpus, kind, extra=logs.facts("calibration"))
    file = _paces_file(config.run_dir)
    file.unlink(missing_ok=True)
    number = supervise(parts(loaded, overrides, on_gpus), watch, environment)
    if number is not None:
        raise Stopped(f"stopped by {number.name} while the split was measured", "the same command starts again", number)
    pace = Pace(**_read(file))
    file.unlink()
    batch = Batch(config.train.rows_per_step, config.train.micro_batch_rows)
    chosen = best_split(pace, gpus, batch)
    for line in reasons(pace, gpus, batch, chosen):
        log.info("%s", line)
    log.info(
        "%d of the %d feed, %d train: no other split is faster",
        chosen.feeders,
        gpus,
        chosen.drafters,
        extra=logs.facts("split", feeders=chosen.feeders, drafters=chosen.drafters),
    )
    _keep(config, chosen)
    return chosen.feeders, chosen.drafters


def _as_overrides(feeders: int, drafters: int, on_gpus: bool) -> tuple[str, ...]:
    devices = [f"cuda:{drafters + i}" if on_gpus else "cpu" for i in range(feeders)]
    sizes = (f"feed.count={feeders}", f"feed.devices={json.dumps(devices)}", f"train.drafters={drafters}")
    return ("gpus=null", *sizes)


def _basis(config: RunConfig) -> str:
    """A hash of what the paces depend on."""
    train = config.train.model_dump(mode="json")
    about = {
        "gpus": config.gpus,
        "target": config.target.model_dump(mode="json"),
        "row_tokens": config.data.row_tokens,
        "drafter": config.drafter.model_dump(mode="json"),
        "train": {key: train[key] for key in _OF_TRAIN},
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


_OF_TRAIN = (
    "rows_per_step",
    "micro_batch_rows",
    "anchors_per_row",
    "precision",
    "attention",
    "compile",
    "gradient_checkpointing",
    "deterministic",
    "device",
)


def kept_split(config: RunConfig) -> tuple[int, int] | None:
    """(feeders, drafters) that an earlier start of this run chose for the same work, or the only one; None if it must be measured."""
    if config.gpus == 2:
        return 1, 1
    file = config.run_dir / _FILE
    if not file.exists():
        return None
    found = _read(file)
    if found.get("basis") != _basis(config):
        return None
    return int(found["feeders"]), int(found["drafters"])


def with_kept_split(config: RunConfig) -> RunConfig:
    """`config` with the numbers of its kept split in place of `gpus`; the same without `gpus`. Raises `ConfigError` before a split is chosen."""
    if config.gpus is None:
        return config
    sizes = kept_split(config)
    if sizes is None:
        raise ConfigError(
            f"how the {config.gpus} of gpus are shared out is not known yet: {config.run_dir / _FILE} has no split for this configuration",
            "try again when `run` has measured it",
        )
    feed = config.feed.model_copy(update={"count": sizes[0]})
    train = config.train.model_copy(update={"drafters": sizes[1]})
    return config.model_copy(update={"gpus": None, "feed": feed, "train": train})


def _keep(config: RunConfig, chosen: Split) -> None:
    file = config.run_dir / _FILE
    text = json.dumps({"basis": _basis(config), "feeders": chosen.feeders, "drafters": chosen.drafters})
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise DflashError(f"cannot write {file}: {error.strerror}", "free space or permissions there") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DflashError(f"cannot read {file}: {error}", "remove it; the split is then measured again") from None
    if not isinstance(found, dict):
        raise DflashError(f"{file} holds no split", "remove it; the split is then measured again")
    return found


def _paces_file(run_dir: Path) -> Path:
    return run_dir / "calibration.json"
