"""Training a drafter: `train` is the loop, `train_step` one optimizer step, from rows to updated weights.

A step's result is a function of (seed, step, the rows' content): rows and anchors are found by ordinal, losses and gradients are sums over
the rows of all ranks, divided once by the global sum of weights. Which rank computed a row, when it arrived and how often the run was
interrupted leave no trace. A rank that lacks a row when a stop is asked for goes on with empty rows, since others wait for it in a collective; then all
ranks drop the step, and the last finished one is what is saved.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from dflash_mp.config import RunConfig
from dflash_mp.data.row import RowKey
from dflash_mp.drafter import arithmetic, schedule
from dflash_mp.drafter.balance import Balance, RowWaits
from dflash_mp.drafter.batch import BatchLoader, MicroBatch
from dflash_mp.drafter.compile_order import one_first
from dflash_mp.drafter.loss import BlockLoss
from dflash_mp.drafter.metrics import Figures, StepSums
from dflash_mp.drafter.model import DraftModel
from dflash_mp.drafter.objective import Objective
from dflash_mp.drafter.optimizer import MasterAdamW
from dflash_mp.drafter.report import Reporter
from dflash_mp.drafter.rows import RowSource
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.drafter.step_profile import StepProfile, span
from dflash_mp.drafter.world import World
from dflash_mp.process import seconds_since_start
from dflash_mp.stream.client_patience import StoppedWaiting
from dflash_mp.stream.pace import FeedersPace
from dflash_mp.stream.plan import StreamPlan

log = logging.getLogger(__name__)


@dataclass
class Trainer:
    """Everything that a step needs. `step` counts finished optimizer steps."""

    config: RunConfig
    plan: StreamPlan
    shape: DrafterShape
    world: World
    model: DraftModel
    parallel: nn.Module  # the model, wrapped so that backward adds gradients over ranks
    optimizer: MasterAdamW
    objective: Objective
    loader: BatchLoader
    compilations: CompilationCount
    step: int = 0


def train(
    trainer: Trainer,
    source: RowSource,
    report: Reporter,
    save: Callable[[Trainer], None],
    stop_requested: Callable[[], bool],
    feeding: Callable[[], FeedersPace | None] = lambda: None,
    profile: StepProfile | None = None,
) -> bool:
    """Train to the last step, or until some rank was asked to stop; False in that case. Saves at the end either way.

    `feeding` says what the feeders could make: with it, `report` hears which side waits for which.
    """
    options, world = trainer.config.train, trainer.world
    if trainer.step == options.steps:
        return True
    held_out = min(options.held_out_rows, trainer.plan.data.held_out_rows)
    source.schedule(schedule.row_sequence(options, trainer.step, world.rank, world.size, held_out))
    began = time.perf_counter()
    warm_up(trainer)
    warm_seconds: float | None = time.perf_counter() - began
    stopping, saved = False, trainer.step
    if trainer.step == 0:
        stopping = not measure_held_out(trainer, held_out, report, stop_requested)
    meter, balance = _Meter(), Balance(options, world.size, feeding)
    profile = profile or StepProfile(None, trainer.config.run_dir, world.rank, world.device)
    while trainer.step < options.steps and not stopping:
        started = time.perf_counter()
        with trainer.compilations.during("step"), profile.around(trainer.step + 1):
            figures, norm = train_step(trainer, stop_requested())
        stopping = figures.stop
        last = trainer.step == options.steps
        if not figures.abandoned:
            if warm_seconds is not None:
                _say_started(report, trainer.step, warm_seconds)
                warm_seconds = None
            meter.add(figures)
            seconds, waited = time.perf_counter() - started, figures.longest_wait
            balance.add(seconds, waited)
            log.debug("step %d took %.3f s, %.3f s of it waiting for rows", trainer.step, seconds, waited)
            if trainer.step % options.log_every == 0 or last:
                rate = schedule.learning_rate(trainer.step - 1, options)
                more = {"learning_rate": rate, "gradient_norm": norm, **meter.take(world.size), **balance.take()}
                more["recompilations"] = float(trainer.compilations.after_warm_up)
                report.step(trainer.step, options.steps, figures, more)
        if schedule.held_out_due(trainer.step, options) and not stopping:
            stopping = not measure_held_out(trainer, held_out, report, stop_requested)
        if trainer.step > saved and (trainer.step % options.checkpoint_every == 0 or last or stopping):
            save(trainer)
            saved = trainer.step
            if (advice := balance.advice(last or figures.stop)) is not None:
                report.say(advice, "balance")
    trainer.loader.drop_ahead()
    if stopping:
        profile.close(trainer.step)
    return trainer.step == options.steps


def _say_started(report: Reporter, step: int, warm_seconds: float) -> None:
    age = seconds_since_start()
    text = f"step {step}, the first here, ended {age:.1f} s after this process began; the pass without rows before it took {warm_seconds:.1f} s"
    report.say(text, "first_step", step=step, seconds=age, first_pass_seconds=warm_seconds)


def warm_up(trainer: Trainer) -> None:
    """One forward and backward pass without rows: compiles the step while the feeders start, and settles DDP's buckets."""
    batch = trainer.loader.load([None] * trainer.config.train.micro_batch_rows)

    def both_ways() -> None:
        _round_anew(trainer)
        trainer.objective.loss(trainer.parallel, batch).total.backward()
        trainer.optimizer.zero_gradients()

    def alone() -> None:
        with _no_sync(trainer):
            both_ways()

    with trainer.compilations.during("step"):
        if trainer.model.compiled:
            one_first(trainer.world, alone)
        both_ways()


def _round_anew(trainer: Trainer) -> None:
    if trainer.config.train.precision == "fp8":
        arithmetic.round_anew(trainer.model, trainer.objective, trainer.config.seed, trainer.step)


def train_step(trainer: Trainer, stop: bool = False) -> tuple[Figures, float]:
    """One optimizer step: its figures over all ranks and the gradient's norm. `stop`: this rank was asked to stop.

    When `figures.abandoned`, nothing has changed.
    """
    options, world, step = trainer.config.train, trainer.world, trainer.step
    sums, waits = StepSums(trainer.shape.block_size, world.device, world.size), RowWaits(world.device)
    batches = schedule.rows_of_step(step, world.rank, world.size, options.rows_per_step, options.micro_batch_rows)
    _round_anew(trainer)
    abandoned = False
    for number, keys in enumerate(batches):
        with waits.waiting(), span("data wait"):
            batch, abandoned = _load(trainer, keys, abandoned)
        with _adding_over_ranks(trainer, number + 1 == len(batches)):
            with span("forward"):
                loss = trainer.objective.loss(trainer.parallel, batch)
            with span("backward"):
                loss.total.backward()
        _measure(sums, batch, loss)
    trainer.loader.release()
    if not (stop or abandoned):
        _load_ahead(trainer, waits)
    sums.add("stop", float(stop or abandoned))
    sums.add("abandoned", float(abandoned))
    sums.add_wait(world.rank, waits.seconds())
    with span("reduce"):
        world.sum(sums.values)
        figures = sums.figures()
    if figures.abandoned:
        trainer.optimizer.zero_gradients()
        return figures, 0.0
    with span("optimizer"):
        norm = trainer.optimizer.step(schedule.learning_rate(step, options), figures.weight)
    trainer.step += 1
    return figures, norm


@torch.no_grad()
def measure_held_out(trainer: Trainer, rows: int, report: Reporter, stop_requested: Callable[[], bool]) -> bool:
    """Report loss and acceptance on the first `rows` held-out rows, shared out over the ranks. False when some rank was asked to stop:
    the measurement is then cut short, and not reported.
    """
    if rows == 0:
        return True
    world = trainer.world
    sums = StepSums(trainer.shape.block_size, world.device)
    abandoned = False
    with trainer.compilations.during("held-out"):
        for keys in schedule.held_out_rows(world.rank, world.size, rows, trainer.config.train.micro_batch_rows):
            abandoned = abandoned or stop_requested()
            batch, abandoned = _load(trainer, keys, abandoned)
            if abandoned:
                break
            _measure(sums, batch, trainer.objective.loss(trainer.model, batch))
    trainer.loader.release()
    sums.add("stop", float(abandoned))
    world.sum(sums.values)
    figures = sums.figures()
    if not figures.stop:
        report.held_out(trainer.step, figures)
    return not figures.stop


def _load(trainer: Trainer, keys: Sequence[RowKey | None], abandoned: bool) -> tuple[MicroBatch, bool]:
    """The micro-batch of `keys`, and whether the step is abandoned; then it is empty."""
    if not abandoned:
        try:
            return trainer.loader.load(keys), False
        except StoppedWaiting as stopped:
            log.warning("%s", stopped.what)
    return trainer.loader.load([None] * len(keys)), True


def _load_ahead(trainer: Trainer, waits: RowWaits) -> None:
    """The next step's first micro-batch, if rows of training are what this rank takes next."""
    options, world, following = trainer.config.train, trainer.world, trainer.step + 1
    if trainer.loader.goes_ahead and following < options.steps and not schedule.held_out_due(following, options):
        batches = schedule.rows_of_step(
            following, world.rank, world.size, options.rows_per_step, options.micro_batch_rows
        )
        with waits.waiting(), span("data wait"):
            trainer.loader.load_ahead(batches[0])


def _measure(sums: StepSums, batch: MicroBatch, loss: BlockLoss) -> None:
    sums.add("loss", loss.total.detach())
    sums.add("weight", loss.weight)
    sums.add("supervised", batch.blocks.supervised)
    sums.add("covered", batch.blocks.covered)
    sums.add("tokens", batch.tokens)
    sums.add_blocks(loss.correct.flatten(0, 1), batch.blocks.scored.flatten(0, 1))


def _adding_over_ranks(trainer: Trainer, last: bool) -> contextlib.AbstractContextManager[None]:
    """Only the last backward pass of a step adds gradients over ranks; the ones before accumulate locally."""
    if last or trainer.world.size == 1:
        return contextlib.nullcontext()
    return _no_sync(trainer)


def _no_sync(trainer: Trainer) -> contextlib.AbstractContextManager[None]:
    no_sync: Callable[[], contextlib.AbstractContextManager[None]] = trainer.parallel.no_sync  # type: ignore[assignment]
    return no_sync()


class CompilationCount:
    """Counts what Dynamo compiles after the first step and the first held-out pass: with static shapes, nothing."""

    def __init__(self) -> None:
        self.after_warm_up = 0
        self._warm: set[str] = set()

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        before = _graphs_compiled()
        yield
        if what in self._warm:
            self.after_warm_up += _graphs_compiled() - before
        self._warm.add(what)


class _Meter:
    """Rates since the last log line."""

    def __init__(self) -> None:
        self._waits: list[float] = []
        self._restart()

    def add(self, figures: Figures) -> None:
        self._tokens += figures.tokens
        self._waits = [sum(both) for both in itertools.zip_longest(self._waits, figures.waits, fillvalue=0.0)]
        self._steps += 1

    def take(self, ranks: int) -> dict[str, Any]:
        seconds, waited = max(time.perf_counter() - self._started, 1e-9), sum(self._waits) / ranks
        rates = {
            "tokens_per_second": self._tokens / seconds,
            "step_seconds": seconds / max(1, self._steps),
            "wait_seconds": waited,
            "wait_share": waited / seconds,
            "wait_seconds_of_ranks": self._waits,
        }
        self._restart()
        return rates

    def _restart(self) -> None:
        self._started, self._tokens, self._steps = time.perf_counter(), 0, 0
        self._waits = []


def _graphs_compiled() -> int:
    return int(counters["stats"]["unique_graphs"])
