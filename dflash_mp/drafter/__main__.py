"""`torchrun --nproc-per-node N -m dflash_mp.drafter --config FILE`: one process per drafter GPU.

A rank connects to the feeders, takes the target's embedding and head from them, resumes from the newest checkpoint of the run directory if
there is one, and trains to the last step. SIGTERM or SIGINT to any rank: all finish the step, save, and exit 0; a step for which a row
doesn't come in seconds is dropped, a held-out measurement is cut short. A second signal (three seconds or more later), or one before training begins, ends the
process at once, with 128 + signal. Other exit codes are those of `dflash_mp.errors`.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import click

from dflash_mp import logs
from dflash_mp.config import RunConfig
from dflash_mp.drafter import arithmetic, checkpoint, state
from dflash_mp.drafter.report import Reporter
from dflash_mp.drafter.step_profile import StepProfile
from dflash_mp.drafter.stopping import Stopping
from dflash_mp.drafter.trainer import train
from dflash_mp.drafter.world import World, join, leave, rank_of_process
from dflash_mp.errors import DflashError
from dflash_mp.monitor.samples import rank_endpoint
from dflash_mp.monitor.training import TrainingRecord
from dflash_mp.options import Command, config_options, load, log_options, profile_option, start_logs
from dflash_mp.process import die_with_parent
from dflash_mp.profiling import ProfileRequest, parse_profile
from dflash_mp.run_lock import RunLock
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.plan import StreamPlan

log = logging.getLogger("dflash_mp.drafter")
_LOCK_SECONDS = 10.0  # for the ranks of a run that was just killed to be gone


@click.command(
    cls=Command,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples=(
        "torchrun --nproc-per-node 4 -m dflash_mp.drafter -c run.yaml",
        "python -m dflash_mp.drafter -c run.yaml --set train.steps=100    # a single rank",
        "torchrun --nproc-per-node 4 -m dflash_mp.drafter -c run.yaml --profile steps=10..15 --profile ranks=0,3",
    ),
)
@config_options
@profile_option
@log_options
def main(config_file: Path, overrides: tuple[str, ...], profile: tuple[str, ...]) -> None:
    """Train a drafter as one of the ranks that torchrun starts."""
    try:
        die_with_parent()
        start_logs("drafter", rank_of_process())
        run(load(config_file, overrides).config, parse_profile(profile))
    except DflashError as error:
        log.error("%s", error, extra=logs.facts("failed", exit_code=error.exit_code))
        # Other ranks may sit in a collective that this one will never join; torchrun ends them when this process is gone.
        sys.stderr.flush()
        os._exit(error.exit_code)


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
    found = checkpoint.find(config.run_dir) if world.rank == 0 else None
    resumed_plan = None
    if found is not None:
        resumed = checkpoint.read_state(found)
        resumed_plan = state.plan_of(resumed, found)
        if profile is not None:
            profile.check_resumed(resumed["step"])
    steps = StepProfile(profile, config.run_dir, world.rank, world.device)
    record = TrainingRecord(steps=config.train.steps)
    with (
        Reporter.of(config, world.rank == 0, record) as report,
        _client(config, world, resumed_plan, stop) as client,
        rank_endpoint(config, world.rank, client.counters, world.device, record),
    ):
        plan = client.connect()
        record.tokens_per_step = config.train.rows_per_step * plan.data.row_tokens
        weights = client.fetch_weights()
        trainer = state.build_trainer(config, plan, weights.embedding, weights.head, client, world, found)
        record.follow(lambda: trainer.step)
        report.say(
            f"{trainer.shape.parameter_count() / 1e6:.1f} M parameters, {world.size} drafter process"
            f"{'es' if world.size > 1 else ''} on {world.device.type}, {arithmetic.describe(trainer.model, trainer.objective)}, "
            f"rows in {plan.target.dtype if plan.target.wire_dtype == 'auto' else plan.target.wire_dtype}, "
            + (f"resuming after step {trainer.step}" if trainer.step else "from the start"),
            "training",
            step=trainer.step,
            ranks=world.size,
        )
        stop.training = True
        finished = train(trainer, client, report, state.save, lambda: stop.requested is not None, client.feeding, steps)
        compiled = trainer.compilations.after_warm_up
        if compiled:
            log.warning("%d graphs were compiled after warm-up; shapes should not have changed", compiled)
        if finished:
            report.say("finished", "finished", step=trainer.step)
        else:
            report.say(
                f"stopped after step {trainer.step}; the same command goes on from here", "stopped", step=trainer.step
            )
    leave(world)


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


if __name__ == "__main__":
    main()
