"""Training a drafter: `train` is the loop, `train_step` one optimizer step, from rows to updated weights.

A step's result is a function of (seed, step, the rows' content): rows and anchors are found by ordinal, losses and gradients are sums over
the rows of all ranks, divided once by the global sum of weights. Which rank computed a row, when it arrived and how often the run was
interrupted leave no trace.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch._dynamo.utils import counters

from dflash_mp.config import RunConfig
from dflash_mp.drafter import schedule
from dflash_mp.drafter.balance import Balance, RowWaits
from dflash_mp.drafter.batch import BatchLoader, MicroBatch
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
from dflash_mp.stream.pace import FeedersPace
from dflash_mp.stream.plan import StreamPlan


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
    warm_up(trainer)
    if trainer.step == 0:
        with trainer.compilations.during("held-out"):
            measure_held_out(trainer, held_out, report)
    meter, balance = _Meter(), Balance(options, world.size, feeding)
    profile = profile or StepProfile(None, trainer.config.run_dir, world.rank, world.device)
    while trainer.step < options.steps:
        started = time.perf_counter()
        with trainer.compilations.during("step"), profile.around(trainer.step + 1):
            figures, norm = train_step(trainer, stop_requested())
        meter.add(figures)
        balance.add(time.perf_counter() - started, figures.longest_wait)
        last = trainer.step == options.steps
        if trainer.step % options.log_every == 0 or last:
            rate = schedule.learning_rate(trainer.step - 1, options)
            more = {"learning_rate": rate, "gradient_norm": norm, **meter.take(world.size), **balance.take()}
            more["recompilations"] = float(trainer.compilations.after_warm_up)
            report.step(trainer.step, options.steps, figures, more)
        if schedule.held_out_due(trainer.step, options):
            with trainer.compilations.during("held-out"):
                measure_held_out(trainer, held_out, report)
        if trainer.step % options.checkpoint_every == 0 or last or figures.stop:
            save(trainer)
            if (advice := balance.advice()) is not None:
                report.say(advice)
        if figures.stop:
            profile.close(trainer.step)
            return False
    return True


def warm_up(trainer: Trainer) -> None:
    """One forward and backward pass without rows: compiles the step while the feeders start, and settles DDP's buckets."""
    batch = trainer.loader.load([None] * trainer.config.train.micro_batch_rows)
    with trainer.compilations.during("step"):
        trainer.objective.loss(trainer.parallel, batch).total.backward()
    trainer.optimizer.zero_gradients()


def train_step(trainer: Trainer, stop: bool = False) -> tuple[Figures, float]:
    """One optimizer step: its figures over all ranks and the gradient's norm. `stop`: this rank was asked to stop."""
    options, world, step = trainer.config.train, trainer.world, trainer.step
    sums, waits = StepSums(trainer.shape.block_size, world.device, world.size), RowWaits(world.device)
    batches = schedule.rows_of_step(step, world.rank, world.size, options.rows_per_step, options.micro_batch_rows)
    for number, keys in enumerate(batches):
        with waits.waiting(), span("data wait"):
            batch = trainer.loader.load(keys)
        with _adding_over_ranks(trainer, number + 1 == len(batches)):
            with span("forward"):
                loss = trainer.objective.loss(trainer.parallel, batch)
            with span("backward"):
                loss.total.backward()
        _measure(sums, batch, loss)
    trainer.loader.release()
    sums.add("stop", float(stop))
    sums.add_wait(world.rank, waits.seconds())
    with span("reduce"):
        world.sum(sums.values)
        figures = sums.figures()
    with span("optimizer"):
        norm = trainer.optimizer.step(schedule.learning_rate(step, options), figures.weight)
    trainer.step += 1
    return figures, norm


@torch.no_grad()
def measure_held_out(trainer: Trainer, rows: int, report: Reporter) -> Figures | None:
    """Loss and acceptance on the first `rows` held-out rows, shared out over the ranks; None when there are none."""
    if rows == 0:
        return None
    world = trainer.world
    sums = StepSums(trainer.shape.block_size, world.device)
    for keys in schedule.held_out_rows(world.rank, world.size, rows, trainer.config.train.micro_batch_rows):
        batch = trainer.loader.load(keys)
        _measure(sums, batch, trainer.objective.loss(trainer.model, batch))
    trainer.loader.release()
    world.sum(sums.values)
    figures = sums.figures()
    report.held_out(trainer.step, figures)
    return figures


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
        self._restart()

    def add(self, figures: Figures) -> None:
        self._tokens += figures.tokens
        self._waited += figures.waited
        self._steps += 1

    def take(self, ranks: int) -> dict[str, float]:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        rates = {
            "tokens_per_second": self._tokens / seconds,
            "step_seconds": seconds / max(1, self._steps),
            "wait_seconds": self._waited / ranks,
            "wait_share": self._waited / ranks / seconds,
        }
        self._restart()
        return rates

    def _restart(self) -> None:
        self._started, self._tokens, self._waited, self._steps = time.perf_counter(), 0, 0.0, 0


def _graphs_compiled() -> int:
    return int(counters["stats"]["unique_graphs"])
