"""`dflash-mp doctor`: everything that can be found out before a run, in one list.

Nothing is loaded and nothing is left behind. It takes some ten seconds, most of them for the probe of the stream's path and for
importing. A check that can't be made says so as a finding; only a wrong configuration raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from dflash_mp.addresses import only_from_here
from dflash_mp.config import RunConfig
from dflash_mp.data.store import open_dataset
from dflash_mp.doctor.bandwidth import check_bandwidth, measured_rate
from dflash_mp.doctor.devices import Gpu, ReadGpus, check_fp8, check_gpus, read_gpus
from dflash_mp.doctor.feeders import Asked, check_feeders, roles_here
from dflash_mp.doctor.files import check_clock, check_directory, check_keys
from dflash_mp.doctor.finding import Finding, gib, green, of_error, red, yellow
from dflash_mp.doctor.fit import Plans, check_fit
from dflash_mp.doctor.limits import Needs, check_limits
from dflash_mp.doctor.ports import check_rendezvous
from dflash_mp.doctor.probe import probe_stream
from dflash_mp.doctor.target_size import TargetSize, read_target_size
from dflash_mp.doctor.versions import check_versions
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.drafter.steps import bytes_of
from dflash_mp.errors import DflashError, TargetError
from dflash_mp.stream.endpoints import ipc_path

_LITTLE = 1 << 30  # free space that a run can't do without, where more isn't known
_ANSWER_SECONDS = 3.0
_TRANSFER_SECONDS = 1.5


def examine(
    config: RunConfig | None,
    rows_per_second: float | None = None,
    probe: bool = True,
    role: str = "auto",
    gpus_of: ReadGpus = read_gpus,
) -> Iterator[Finding]:
    """All findings, in the order of the report. `probe`: also measure the path; `role`: what runs on this host, "feeders", "drafters", "both", or
    "auto", which asks the feeders' addresses; `gpus_of` reads the devices.
    """
    gpus = list(gpus_of())
    if config is None:
        yield from check_versions(False, 1)
        yield from check_gpus(gpus, _architectures())
        yield from check_limits(Needs(gpu_ranks=len(gpus)))
        yield check_rendezvous()
        yield check_directory("disk", Path.cwd(), _LITTLE, "a run")
        yield check_clock(Path.cwd())
        return
    feeds, trains = (role != "drafters", role != "feeders") if role != "auto" else roles_here(config.feeder_endpoints())
    does = " and ".join(what for what, here in (("feeds", feeds), ("trains", trains)) if here)
    yield green("this host", f"{does}" + ("" if role != "auto" else ", as feed.endpoints say (--role says otherwise)"))
    on_gpu = config.train.device == "cuda" or (config.train.device == "auto" and bool(gpus))
    named = (config.train.device, config.target.device, *config.feed.devices)
    ranks = (config.gpus or config.train.drafters) if trains else 0
    yield from check_versions(any(device.startswith("cuda") for device in named), ranks)
    yield from check_gpus(gpus, _architectures())
    if config.train.precision == "fp8" and on_gpu:
        yield from check_fp8(gpus, ranks)
    plans, asked = _plans(config, on_gpu, gpus, feeds, trains), None
    transfer = _TRANSFER_SECONDS if probe else 0.0
    if isinstance(plans, Finding) and not feeds:
        asked = check_feeders(config, _ANSWER_SECONDS, transfer, trains)
        plans = _plans_of_feeder(config, on_gpu, asked)
    yield from check_limits(_needs(config, on_gpu, ranks, plans))
    yield check_rendezvous()
    yield from _check_files(config, plans, feeds, trains)
    if isinstance(plans, Finding):
        yield plans
    else:
        yield from check_fit(plans, gpus)
    asked = check_feeders(config, _ANSWER_SECONDS, transfer, trains) if asked is None else asked
    for one in asked:
        yield from one.findings
    if probe and not isinstance(plans, Finding):
        rate = rows_per_second or measured_rate(config.run_dir)
        try:
            endpoints = [one.endpoint for one in asked if one.endpoint]
            yield from check_bandwidth(plans, rate, _paths(endpoints, asked), max(plans.feeders, len(endpoints)))
        except DflashError as error:
            yield of_error("path", error)


def _plans(config: RunConfig, on_gpu: bool, gpus: Sequence[Gpu], feeds: bool, trains: bool) -> Plans | Finding:
    """Sizes, or why they can't be known."""
    dtype = config.target.dtype
    if dtype == "auto":
        on_cpu = config.target.device == "cpu" or (
            config.target.device == "auto" and not gpus and not config.feed.devices
        )
        dtype = "float32" if on_cpu else "bfloat16"
    try:
        size = read_target_size(config.target, dtype)
        DrafterShape.from_config(config.drafter, size.info)
    except TargetError as error:
        if "the hub" in error.what:
            return yellow(
                "target", error.what, "fetch it first, or look from the feeder's host; sizes are not checked here"
            )
        return of_error("target", error)
    except DflashError as error:
        return of_error("drafter", error)
    return Plans(config, size, on_gpu, feeds, trains)


def _plans_of_feeder(config: RunConfig, on_gpu: bool, asked: Sequence[Asked]) -> Plans | Finding:
    """On a host that only trains, and so needs no target: sizes as a running feeder tells them."""
    welcome = next((one.answer.welcome for one in asked if one.answer.welcome is not None), None)
    if welcome is None:
        text = "it isn't on this host, which only trains, and no feeder answers: sizes are not checked"
        return yellow("target", text, "look again when a feeder runs")
    try:
        DrafterShape.from_config(config.drafter, welcome.plan.target)
    except DflashError as error:
        return of_error("drafter", error)
    return Plans(config, TargetSize(welcome.plan.target, 0), on_gpu, feeds=False)


def _needs(config: RunConfig, on_gpu: bool, ranks: int, plans: Plans | Finding) -> Needs:
    feeders = len(config.feeder_endpoints()) if config.gpus is None else config.gpus
    window = int(config.stream.window_mib * 2**20)
    ring = window if isinstance(plans, Finding) else max(1, window // plans.row_bytes()) * plans.row_bytes()
    return Needs(feeders + ranks, ranks if on_gpu else 0, ring, window if on_gpu else 0)


def _check_files(config: RunConfig, plans: Plans | Finding, feeds: bool, trains: bool) -> Iterator[Finding]:
    needed, why = _LITTLE, "a run"
    if trains and not isinstance(plans, Finding):
        checkpoints = config.train.keep_checkpoints + 1  # the next one is written before the oldest goes
        one, there = 12 * plans.shape.parameter_count(), bytes_of(config.run_dir)
        needed = max(one, one * checkpoints - there)
        why = f"{checkpoints} checkpoints of 12 bytes per parameter" + (f", less {gib(there)} there," if there else "")
    yield check_directory("disk, run_dir", config.run_dir, needed, why)
    if feeds:
        yield _check_data(config)
    yield check_clock(config.run_dir)
    if config.stream.keys is not None:
        yield from check_keys(config.stream.keys)


def _check_data(config: RunConfig) -> Finding:
    """The prepared dataset where there is one (feeders need it, drafters don't), else room for it."""
    if not config.data.path.exists():
        room = check_directory("disk, data", config.data.path, 0, "")
        if room.level == "red":
            return room
        return yellow("data", f"nothing is prepared at {config.data.path}", "dflash-mp prepare makes it")
    try:
        dataset = open_dataset(config)
    except DflashError as error:
        return of_error("data", error)
    if dataset.rows("train") == 0:
        return red(
            "data",
            f"{config.data.path} holds no row to train",
            "add documents to data.sources, or lower data.row_tokens",
            3,
        )
    return green(
        "data", f"{config.data.path}: {dataset.rows('train')} rows to train, {dataset.rows('held_out')} held out"
    )


def _paths(endpoints: Sequence[str], asked: Sequence[Asked]) -> dict[str, float]:
    """Bytes/s of each kind of path that the run's feeders are reached by."""
    paths: dict[str, float] = {}
    for one in asked:
        if one.answer.bytes_per_second is not None:
            paths[f"the path to {one.endpoint}"] = one.answer.bytes_per_second
    for kind in ("ipc", "tcp"):
        here = [e for e in endpoints if (ipc_path(e) is not None) == (kind == "ipc") and only_from_here(e)]
        if here:
            paths["ipc on this machine" if kind == "ipc" else "tcp on this machine, without keys"] = probe_stream(kind)
    return paths


def _architectures() -> list[str]:
    return torch.cuda.get_arch_list() if torch.cuda.is_available() else []
