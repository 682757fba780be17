"""A rank of a training run, from joining the others to leaving them. `dflash_mp.drafter` is its command.

What training needs but connecting doesn't is imported and made meanwhile (`preparation`); no module imported here may import PyTorch's compiler.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from dflash_mp.config import RunConfig
from dflash_mp.drafter import checkpoint
from dflash_mp.drafter.preparation import Preparation
from dflash_mp.drafter.report import Reporter
from dflash_mp.drafter.step_profile import StepProfile
from dflash_mp.drafter.stopping import Stopping
from dflash_mp.drafter.world import World, join, leave, rank_of_process
from dflash_mp.monitor.samples import rank_endpoint
from dflash_mp.monitor.training import TrainingRecord
from dflash_mp.profiling import ProfileRequest
from dflash_mp.run_lock import RunLock
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.plan import StreamPlan

if TYPE_CHECKING:
    from dflash_mp.drafter.trainer import Trainer

log = logging.getLogger("dflash_mp.drafter")
_LOCK_SECONDS = 10.0  # for the ranks of a run that was just killed to be gone


def run(config: RunConfig, profile: ProfileRequest | None = None) -> None:
    """Join the ranks, connect, train, leave. Raises `DflashError`."""
    stop = Stopping()
    # Before the others get past `join`: a second run's ranks would take the first one's places at the feeders.
    lock = RunLock(config.run_dir, drafters=True, patience=_LOCK_SECONDS) if rank_of_process() == 0 else nullcontext()
    with lock:
        _train(config, stop, profile)
    stop.finished()


def _train(config: RunConfig, stop: Stopping, profile: ProfileRequest | None) -> None:
    world = join(config)
    stop.share(world.store)
    if profile is not None:
        profile.check(config.train.steps, world.size)
    steps = StepProfile(profile, config.run_dir, world.rank, world.device)
    record = TrainingRecord(steps=config.train.steps)
    with Preparation(config, world) as preparation:
        found = checkpoint.find(config.run_dir) if world.rank == 0 else None
        resumed_plan = None
        if found is not None:
            resumed = checkpoint.read_state(found)
            resumed_plan = preparation.state().plan_of(resumed, found)
            if profile is not None:
                profile.check_resumed(resumed["step"])
        with (
            Reporter.of(config, world.rank == 0, record) as report,
            _client(config, world, resumed_plan, stop) as client,
            rank_endpoint(config, world.rank, client.counters, world.device, record),
        ):
            plan = client.connect()
            record.tokens_per_step = config.train.rows_per_step * plan.data.row_tokens
            preparation.begin_model(plan, resumed=found is not None)
            weights = client.fetch_weights()
            trainer = preparation.trainer(weights, client, found)
            del weights
            gc.freeze()  # what was imported stays: no look for garbage goes through it again
            gc.enable()
            record.follow(lambda: trainer.step)
            _train_to_the_end(trainer, client, report, stop, steps, preparation.state().save)
    leave(world)


def _train_to_the_end(
    trainer: Trainer,
    client: RowClient,
    report: Reporter,
    stop: Stopping,
    steps: StepProfile,
    save: Callable[[Trainer], None],
) -> None:
    """Or to an orderly stop."""
    from dflash_mp.drafter import arithmetic
    from dflash_mp.drafter.trainer import train

    world, target = trainer.world, trainer.plan.target
    report.say(
        f"{trainer.shape.parameter_count() / 1e6:.1f} M parameters, {world.size} drafter process"
        f"{'es' if world.size > 1 else ''} on {world.device.type}, {arithmetic.describe(trainer.model, trainer.objective)}, "
        f"rows in {target.dtype if target.wire_dtype == 'auto' else target.wire_dtype}, "
        + (f"resuming after step {trainer.step}" if trainer.step else "from the start"),
        "training",
        step=trainer.step,
        ranks=world.size,
    )
    stop.training = True
    finished = train(trainer, client, report, save, lambda: stop.requested is not None, client.feeding, steps)
    compiled = trainer.compilations.after_warm_up
    if compiled:
        log.warning("%d graphs were compiled after warm-up; shapes should not have changed", compiled)
    if finished:
        report.say("finished", "finished", step=trainer.step)
    else:
        report.say(
            f"stopped after step {trainer.step}; the same command goes on from here", "stopped", step=trainer.step
        )


def _client(config: RunConfig, world: World, resumed: StreamPlan | None, stop: Stopping) -> RowClient:
    return RowClient.of(
        config,
        world.rank,
        world.size,
        plan=resumed,
        held=config.train.micro_batch_rows,
        pin=world.device.type == "cuda",
        stop=stop.anywhere,
    )
