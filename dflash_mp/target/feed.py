"""The feeder process: a prepared dataset and a target, served to drafters.

`feed` runs until SIGTERM or SIGINT, then takes leave of the drafters and returns; a second signal, three seconds or more later, ends the process at once. It refuses to
start, before the target is loaded where that is possible, if the address is taken, the dataset isn't whole or was prepared with
another tokenizer or chat template, or the capture differs from the model's own forward.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from dflash_mp.config import RunConfig, TargetConfig
from dflash_mp.control_groups import usable_cores
from dflash_mp.data.chat_template import chat_template_fingerprint
from dflash_mp.data.encoding import tokenizer_fingerprint
from dflash_mp.data.row import RowKey
from dflash_mp.data.store import PreparedDataset, open_dataset
from dflash_mp.errors import ConfigError, DataError
from dflash_mp.monitor.samples import feeder_endpoint
from dflash_mp.process import SAME_SIGNAL_SECONDS, die_with_parent, watch_signals
from dflash_mp.stream.arrival import Arrival
from dflash_mp.stream.endpoints import check_available
from dflash_mp.stream.feeder import Compute, FeederService
from dflash_mp.stream.handshake import expectations
from dflash_mp.stream.keys import FeederKeys
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.plan import DataPlan, StreamPlan
from dflash_mp.stream.socket_directory import remove_if_empty
from dflash_mp.stream.weights import FrozenWeights
from dflash_mp.target.capture import Capture
from dflash_mp.target.load import Target, load_target
from dflash_mp.target.model import target_device
from dflash_mp.target.quantised import QuantisedCapture
from dflash_mp.target.split import load_split
from dflash_mp.target.split_group import SplitGroup

log = logging.getLogger("dflash_mp.feed")


def feed(config: RunConfig, index: int, load: Callable[[TargetConfig], Target] = load_target) -> None:
    """Be feeder number `index` of the run, with the target that `load` gives. Raises `DflashError` for what the user can cure."""
    die_with_parent()
    endpoint, config = _placed(config, index)
    if config.feed.insecure_no_auth:
        log.warning("feed.insecure_no_auth is set: whoever can reach %s can take rows and weights", endpoint)
    keys = None if config.stream.keys is None else FeederKeys.load(config.stream.keys)
    check_available(endpoint, config.feed.insecure_no_auth, keys is not None)
    torch.set_num_threads(config.feed.threads or min(torch.get_num_threads(), usable_cores()))
    dataset = open_dataset(config)
    stop = _StopRequest()
    with _split_group(config, index) as group:
        if group is None:
            target = load(config.target)
        else:
            target = load_split(config.target, group.share, dataset.row("train", 0), load)
        if target.device.type == "cuda":
            torch.cuda.set_device(target.device)  # for which the service pins its memory
        plan = make_plan(config, dataset, target)
        capture = Capture(
            target, last_hidden=plan.target.last_hidden, row_tokens=plan.data.row_tokens, compiled=config.feed.compile
        )
        capture.self_check(dataset.row("train", 0))
        log.info("the target's rows: %s", capture.forward.describe())
        if group is not None:
            group.lead(capture)
        _serve(config, index, endpoint, keys, plan, capture, dataset, stop)
    remove_if_empty(config)


def _serve(
    config: RunConfig,
    index: int,
    endpoint: str,
    keys: FeederKeys | None,
    plan: StreamPlan,
    capture: Capture,
    dataset: PreparedDataset,
    stop: _StopRequest,
) -> None:
    with (
        FeederService(
            endpoint,
            plan,
            FrozenWeights(capture.target.embedding, capture.target.head),
            run=expectations(config).run,
            silent_seconds=config.stream.silent_seconds,
            memory_mib=config.feed.memory_mib,
            insecure_no_auth=config.feed.insecure_no_auth,
            keys=keys,
            pin=capture.target.device.type == "cuda",
        ) as service,
        feeder_endpoint(config, index, service.counters, capture.target.device),
    ):
        log.info(
            "serving %s on %s: %d rows of %d tokens, layers %s of %s, %s on %s%s",
            plan.target.name,
            service.endpoint,
            plan.data.rows,
            plan.data.row_tokens,
            ", ".join(map(str, plan.target.layer_ids)),
            plan.target.num_layers,
            plan.target.dtype,
            capture.target.device,
            ", sent in fp8" if plan.target.wire_dtype == "fp8" else "",
        )
        stop.serving()
        service.serve(row_maker(dataset, capture, plan), stop.event, config.feed.stats_seconds)
        log.info("stopped after %d rows", service.status().rows)


def make_plan(config: RunConfig, dataset: PreparedDataset, target: Target) -> StreamPlan:
    """What this run's feeders serve. Raises `DataError` if the dataset was prepared for another target."""
    manifest = dataset.manifest
    data = DataPlan(
        dataset=manifest.fingerprint,
        seed=config.seed,
        row_tokens=manifest.row_tokens,
        rows=dataset.rows("train"),
        held_out_rows=dataset.rows("held_out"),
        tokenizer=tokenizer_fingerprint(target.tokenizer),
        chat_template=chat_template_fingerprint(target.tokenizer),
        thinking=manifest.thinking,
    )
    for what, prepared, present in (
        ("tokenizer", manifest.tokenizer, data.tokenizer),
        ("chat template", manifest.chat_template, data.chat_template),
    ):
        if prepared != present:
            raise DataError(
                f"{dataset.path} was prepared with the {what} {prepared}, but that of the target {target.info.name} is {present}",
                "run dflash-mp prepare --force with this target, or set target.path to the one that it was prepared for",
            )
    info = replace(target.info, last_hidden=config.train.objective == "distill", wire_dtype=config.stream.wire_dtype)
    return StreamPlan(data, info)


def row_maker(dataset: PreparedDataset, capture: Capture, plan: StreamPlan) -> Compute:
    """The function that fills a row's buffer: the taps straight from the model (or in fp8), the token facts from the dataset.

    On a CUDA target it returns while the device computes; the row is there when the result says so.
    """
    layout = RowLayout.of(plan)
    quantised = QuantisedCapture(capture, plan.data.row_tokens) if plan.target.wire_dtype == "fp8" else None

    def make(key: RowKey, buffer: torch.Tensor) -> Arrival:
        row, views = dataset.run_row(key, plan.data.seed), layout.views(buffer)
        views.input_ids.copy_(torch.from_numpy(row.input_ids))
        views.position_ids.copy_(torch.from_numpy(row.position_ids))
        views.document_ids.copy_(torch.from_numpy(row.document_ids))
        views.loss_mask.copy_(torch.from_numpy(row.loss_mask))
        if quantised is not None:
            return quantised.start(key, row, views)
        return capture.start(row, views.features, views.last_hidden)

    return make


def _placed(config: RunConfig, index: int) -> tuple[str, RunConfig]:
    """The address of feeder `index`, and the configuration with that feeder's device."""
    endpoints = config.feeder_endpoints()
    if index >= len(endpoints):
        raise ConfigError(
            f"--index {index}, but the run has {len(endpoints)} feeder{'s' if len(endpoints) > 1 else ''}, counted from 0",
            "raise feed.count, or add an address to feed.endpoints",
        )
    device = config.feeder_devices(index)[0]
    return endpoints[index], config.model_copy(update={"target": config.target.model_copy(update={"device": device})})


def _split_group(config: RunConfig, index: int) -> AbstractContextManager[SplitGroup | None]:
    """The processes that share the target of feeder `index`, or None if it has it alone."""
    devices = [target_device(name) for name in config.feeder_devices(index)]
    if len(devices) == 1:
        return nullcontext()
    facts = {"index": index, "config": config.model_dump(mode="json")}
    return SplitGroup("dflash_mp.target.follower", devices, facts)


class _StopRequest:
    """SIGTERM and SIGINT: the first ends the loading or asks the service to stop, a second, later than any copy of the first, ends the process, a target that hangs included."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._serving = False
        self._at = 0.0
        watch_signals((signal.SIGTERM, signal.SIGINT), self._on_signal)

    def serving(self) -> None:
        """From now on the service looks at `event`."""
        self._serving = True

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self.event.is_set():
            if now - self._at > SAME_SIGNAL_SECONDS:
                os._exit(128 + number)
            return
        self._at = now
        self.event.set()
        if not self._serving:
            os._exit(0)
