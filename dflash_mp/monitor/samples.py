"""From the counters of a feeder or a rank to samples of the catalogue's metrics. Every label value is there from the start, as 0."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import torch

from dflash_mp import __version__
from dflash_mp.config import RunConfig
from dflash_mp.monitor.catalogue import ERRORS_OF_A_FEEDER, ERRORS_OF_A_STREAM, SPLITS
from dflash_mp.monitor.endpoint import MetricsEndpoint, Sample
from dflash_mp.monitor.events import EventLog
from dflash_mp.monitor.training import TrainingRecord
from dflash_mp.stream.counters import ClientCounters, FeederCounters

_STARTED = time.time()
_WINDOW_STATES = ("unasked", "asked", "ready", "held", "free")


def feeder_endpoint(
    config: RunConfig, index: int, counters: Callable[[], FeederCounters], device: torch.device
) -> AbstractContextManager[MetricsEndpoint | None]:
    """The endpoint of feeder `index`, whose target is on `device`."""

    def read(events: EventLog) -> Iterator[Sample]:
        yield from process_samples(events, device)
        yield from feeder_samples(counters())

    return MetricsEndpoint.of(config, "feeder", index, read)


def rank_endpoint(
    config: RunConfig, rank: int, counters: Callable[[], ClientCounters], device: torch.device, record: TrainingRecord
) -> AbstractContextManager[MetricsEndpoint | None]:
    """The endpoint of a rank; rank 0's has the training's figures, too."""

    def read(events: EventLog) -> Iterator[Sample]:
        yield from process_samples(events, device)
        yield from rank_samples(counters())
        if rank == 0:
            yield from training_samples(record)

    return MetricsEndpoint.of(config, "drafter", rank, read)


def process_samples(events: EventLog, device: torch.device) -> Iterator[Sample]:
    """Of any process that uses `device`. Asks PyTorch's allocator, not the device: nothing is synchronised."""
    versions = {"version": __version__, "python": platform.python_version(), "torch": torch.__version__}
    yield Sample("dflash_mp_build_info", 1, versions)
    yield Sample("dflash_mp_start_time_seconds", _STARTED)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    yield Sample("dflash_mp_resident_memory_bytes", pages * os.sysconf("SC_PAGE_SIZE"))
    memory = {"allocated": 0, "reserved": 0, "peak": 0, "total": 0}
    if device.type == "cuda":
        memory = {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak": torch.cuda.max_memory_allocated(device),
            "total": torch.cuda.get_device_properties(device).total_memory,
        }
    for kind, size in memory.items():
        yield Sample("dflash_mp_gpu_memory_bytes", size, {"kind": kind})
    for level, count in events.counts.items():
        yield Sample("dflash_mp_log_messages_total", count, {"level": level})


def feeder_samples(counters: FeederCounters) -> Iterator[Sample]:
    """Of a feeder."""
    yield Sample("dflash_mp_feeder_made_rows_total", counters.made_rows)
    yield Sample("dflash_mp_feeder_made_tokens_total", counters.made_tokens)
    yield Sample("dflash_mp_feeder_delivered_rows_total", counters.delivered_rows)
    yield Sample("dflash_mp_feeder_delivered_bytes_total", counters.delivered_bytes)
    for state, seconds in asdict(counters.time_spent).items():
        yield Sample("dflash_mp_feeder_time_seconds_total", seconds, {"state": state})
    yield Sample("dflash_mp_feeder_queued_rows", counters.queued_rows)
    yield Sample("dflash_mp_feeder_held_rows", counters.held_rows)
    yield Sample("dflash_mp_feeder_slot_memory_bytes", counters.slot_bytes)
    yield Sample("dflash_mp_feeder_current_row_seconds", counters.current_row_seconds)
    yield Sample("dflash_mp_feeder_drafters", len(counters.drafters))
    for drafter in counters.drafters:
        rank = {"rank": str(drafter.rank)}
        yield Sample("dflash_mp_feeder_drafter_rows_total", drafter.rows, rank)
        yield Sample("dflash_mp_feeder_drafter_outstanding_rows", drafter.outstanding, rank)
    for kind in ERRORS_OF_A_FEEDER:
        yield Sample("dflash_mp_feeder_errors_total", counters.errors[kind], {"kind": kind})


def rank_samples(counters: ClientCounters) -> Iterator[Sample]:
    """Of a rank's end of the stream, and what was compiled in its process."""
    for feeder, rows in counters.rows_by_feeder.items():
        yield Sample("dflash_mp_stream_rows_total", rows, {"feeder": feeder})
        yield Sample("dflash_mp_stream_feeder_connected", counters.connected[feeder], {"feeder": feeder})
    yield Sample("dflash_mp_stream_received_bytes_total", counters.bytes)
    yield Sample("dflash_mp_stream_waited_seconds_total", counters.seconds_waited)
    for state in _WINDOW_STATES:
        yield Sample("dflash_mp_stream_window_rows", counters.window.get(state, 0), {"state": state})
    yield Sample("dflash_mp_stream_window_bytes", counters.window_bytes)
    yield Sample("dflash_mp_stream_retries_total", counters.reasked)
    yield Sample("dflash_mp_stream_duplicate_rows_total", counters.duplicates)
    for kind in ERRORS_OF_A_STREAM:
        yield Sample("dflash_mp_stream_errors_total", counters.errors[kind], {"kind": kind})
    yield Sample("dflash_mp_compilations_total", _graphs_compiled())


def training_samples(record: TrainingRecord) -> Iterator[Sample]:
    """Of the training, from rank 0. Figures that have not been measured yet are left out."""
    step, tokens, figures = record.read()
    yield Sample("dflash_mp_train_step", step)
    yield Sample("dflash_mp_train_last_step", record.steps)
    yield Sample("dflash_mp_train_tokens_total", tokens)
    train = figures.get("train", {})
    for name, figure in (
        ("dflash_mp_train_step_seconds", "step_seconds"),
        ("dflash_mp_train_wait_ratio", "wait_share"),
        ("dflash_mp_feeders_possible_rows_per_second", "feeders_rows_per_second"),
        ("dflash_mp_drafters_possible_rows_per_second", "drafters_rows_per_second"),
        ("dflash_mp_train_learning_rate", "learning_rate"),
        ("dflash_mp_train_gradient_norm", "gradient_norm"),
        ("dflash_mp_recompilations_total", "recompilations"),
    ):
        if figure in train:
            yield Sample(name, train[figure])
    for split in SPLITS:
        if split in figures:
            of = figures[split]
            yield Sample("dflash_mp_loss", of["loss"], {"split": split})
            yield Sample("dflash_mp_acceptance_length_tokens", of["tau"], {"split": split})
            for slot, share in enumerate(of["accuracy_per_slot"], start=1):
                yield Sample("dflash_mp_slot_accuracy_ratio", share, {"split": split, "slot": str(slot)})


def _graphs_compiled() -> int:
    from torch._dynamo.utils import counters  # slow to import; the trainer has done so already

    return int(counters["stats"]["unique_graphs"])
