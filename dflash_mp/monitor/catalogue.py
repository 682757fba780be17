"""Every figure that a process shows to Prometheus: name, kind, labels and meaning, once. The endpoint shows nothing else.

Names follow Prometheus' conventions: base units (seconds, bytes, ratios from 0 to 1), `_total` for what only grows. All carry the labels
`run` (the run directory's name), `role` (feeder or drafter) and `index` (of the feeder, or the rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

COMMON_LABELS = ("run", "role", "index")
ERRORS_OF_A_FEEDER = ("malformed", "refused", "silent", "disconnected", "row_retryable", "row_final")
ERRORS_OF_A_STREAM = ("corrupted", "row_failed", "feeder_lost", "feeder_refused", "malformed")
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Metric:
    """One figure. `on`: which processes have it."""

    name: str
    kind: Literal["counter", "gauge"]
    on: Literal["all", "feeders", "ranks", "rank 0"]
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What the name ends in, or a plain number."""
        stem = self.name.removesuffix("_total")
        units = ("seconds", "bytes", "ratio", "rows", "tokens", "per_second")
        return next((unit for unit in units if stem.endswith(f"_{unit}")), "number")


METRICS = (
    Metric("dflash_mp_build_info", "gauge", "all", "1; the versions are in the labels", ("version", "python", "torch")),
    Metric("dflash_mp_start_time_seconds", "gauge", "all", "when the process began to show figures, since the epoch"),
    Metric("dflash_mp_resident_memory_bytes", "gauge", "all", "host memory of the process"),
    Metric(
        "dflash_mp_gpu_memory_bytes",
        "gauge",
        "all",
        "GPU memory: allocated and reserved by PyTorch, the peak of allocated, the device's total; 0 without a GPU",
        ("kind",),
    ),
    Metric("dflash_mp_log_messages_total", "counter", "all", "warnings and errors logged", ("level",)),
    Metric("dflash_mp_feeder_made_rows_total", "counter", "feeders", "rows that the target computed"),
    Metric("dflash_mp_feeder_made_tokens_total", "counter", "feeders", "tokens of those, padding included"),
    Metric("dflash_mp_feeder_delivered_rows_total", "counter", "feeders", "rows that drafters took over"),
    Metric("dflash_mp_feeder_delivered_bytes_total", "counter", "feeders", "bytes of those"),
    Metric(
        "dflash_mp_feeder_time_seconds_total",
        "counter",
        "feeders",
        "time by what the feeder did: computing, idle (no drafter asked), blocked (rows not taken yet)",
        ("state",),
    ),
    Metric("dflash_mp_feeder_queued_rows", "gauge", "feeders", "rows asked for and not begun"),
    Metric("dflash_mp_feeder_held_rows", "gauge", "feeders", "rows made or being made, and not taken over"),
    Metric("dflash_mp_feeder_slot_memory_bytes", "gauge", "feeders", "memory that rows take up"),
    Metric("dflash_mp_feeder_current_row_seconds", "gauge", "feeders", "how long the row in the making has taken"),
    Metric("dflash_mp_feeder_drafters", "gauge", "feeders", "drafters connected"),
    Metric(
        "dflash_mp_feeder_drafter_rows_total",
        "counter",
        "feeders",
        "rows that this drafter took since it connected",
        ("rank",),
    ),
    Metric(
        "dflash_mp_feeder_drafter_outstanding_rows",
        "gauge",
        "feeders",
        "rows that this drafter asked for and has not got",
        ("rank",),
    ),
    Metric(
        "dflash_mp_feeder_errors_total",
        "counter",
        "feeders",
        "malformed messages, drafters refused, silent or disconnected, rows that could not be made",
        ("kind",),
    ),
    Metric("dflash_mp_stream_rows_total", "counter", "ranks", "rows received, by feeder", ("feeder",)),
    Metric("dflash_mp_stream_received_bytes_total", "counter", "ranks", "bytes of the rows that training took"),
    Metric("dflash_mp_stream_waited_seconds_total", "counter", "ranks", "time that training waited for a row"),
    Metric(
        "dflash_mp_stream_window_rows",
        "gauge",
        "ranks",
        "rows of the window: unasked, asked, ready (come, not taken), held (in use), free",
        ("state",),
    ),
    Metric("dflash_mp_stream_window_bytes", "gauge", "ranks", "what the window holds at most"),
    Metric("dflash_mp_stream_retries_total", "counter", "ranks", "rows that were asked for again"),
    Metric(
        "dflash_mp_stream_duplicate_rows_total", "counter", "ranks", "rows that came twice, the first feeder being late"
    ),
    Metric(
        "dflash_mp_stream_errors_total",
        "counter",
        "ranks",
        "rows corrupted or failed, feeders lost or refusing, malformed messages",
        ("kind",),
    ),
    Metric(
        "dflash_mp_stream_feeder_connected", "gauge", "ranks", "1 while this feeder is connected, else 0", ("feeder",)
    ),
    Metric("dflash_mp_compilations_total", "counter", "ranks", "graphs that torch.compile made"),
    Metric("dflash_mp_recompilations_total", "counter", "rank 0", "of those, after the first step and held-out pass"),
    Metric("dflash_mp_train_step", "gauge", "rank 0", "optimizer steps finished"),
    Metric("dflash_mp_train_last_step", "gauge", "rank 0", "steps to train in all"),
    Metric("dflash_mp_train_tokens_total", "counter", "rank 0", "tokens trained on since this start, by all ranks"),
    Metric("dflash_mp_train_step_seconds", "gauge", "rank 0", "mean time of a step since the last line of metrics"),
    Metric("dflash_mp_train_wait_ratio", "gauge", "rank 0", "share of that spent waiting for rows, mean over ranks"),
    Metric(
        "dflash_mp_feeders_possible_rows_per_second",
        "gauge",
        "rank 0",
        "rows that all feeders could make, never waiting",
    ),
    Metric(
        "dflash_mp_drafters_possible_rows_per_second",
        "gauge",
        "rank 0",
        "rows that all ranks could take, never waiting",
    ),
    Metric("dflash_mp_train_learning_rate", "gauge", "rank 0", "learning rate of the last step"),
    Metric("dflash_mp_train_gradient_norm", "gauge", "rank 0", "norm of the last step's gradient, before clipping"),
    Metric("dflash_mp_loss", "gauge", "rank 0", "loss on training rows or held-out rows", ("split",)),
    Metric(
        "dflash_mp_acceptance_length_tokens",
        "gauge",
        "rank 0",
        "τ: tokens accepted per block, the bonus token included, on training rows or held-out rows",
        ("split",),
    ),
    Metric("dflash_mp_slot_accuracy_ratio", "gauge", "rank 0", "share of right guesses in a slot", ("split", "slot")),
)
BY_NAME = {metric.name: metric for metric in METRICS}


def table() -> str:
    """The metrics as a Markdown table, for the documentation."""
    lines = ["| name | type | unit | labels | on | meaning |", "|---|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.on} | {metric.meaning} |")
    return "\n".join(lines) + "\n"
