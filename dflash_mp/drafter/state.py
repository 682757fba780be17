"""Building a trainer, fresh or from the last checkpoint, and saving it.

Rank 0 reads the checkpoint and sends it to the others, so that only its machine needs the run directory. A checkpoint of other data, another
target, shape or global batch is refused with the difference spelled out: going on would silently train something else.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import torch

from dflash_mp import __version__, logs
from dflash_mp.config import RunConfig, TrainConfig
from dflash_mp.drafter import arithmetic, checkpoint, fp8_products
from dflash_mp.drafter.batch import BatchLoader
from dflash_mp.drafter.checkpoint import Checkpoint
from dflash_mp.drafter.model import DraftModel
from dflash_mp.drafter.objective import Objective, compiles, on_device
from dflash_mp.drafter.optimizer import MasterAdamW
from dflash_mp.drafter.rows import RowSource
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.drafter.trainer import CompilationCount, Trainer
from dflash_mp.drafter.world import World, data_parallel
from dflash_mp.errors import CheckpointError
from dflash_mp.stream.codec import ProtocolError, plain, reader
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.plan import StreamPlan
from dflash_mp.stream.weights import FrozenWeights

log = logging.getLogger(__name__)

# Options that decide what is learnt, and the choice of `train` that each of them is for, if it isn't for all.
_STEERING: dict[str, tuple[str, tuple[str, ...]] | None] = {
    "steps": None,
    "anchors_per_row": None,
    "objective": None,
    "dpace_alpha": ("objective", ("dpace",)),
    "loss_gamma": ("objective", ("decay", "distill")),
    "learning_rate": None,
    "min_learning_rate_ratio": None,
    "schedule": None,
    "warmup_ratio": None,
    "decay_ratio": ("schedule", ("wsd",)),
    "weight_decay": None,
    "betas": None,
    "eps": None,
    "clip": None,
    "precision": None,
}
_FRESH_START = "use another run_dir to start afresh, or restore the configuration that this run began with"


def build_trainer(
    config: RunConfig,
    plan: StreamPlan,
    embedding: torch.Tensor,
    head: torch.Tensor,
    source: RowSource,
    world: World,
    resume: Path | None,
    model: DraftModel | None = None,
) -> Trainer:
    """The trainer of this rank, at the step of the checkpoint `resume` (rank 0's counts) or at 0.

    `embedding` and `head` [V, H] are the target's; `model` is what `make_model` made, if it was called before. Raises `ConfigError` or
    `CheckpointError`.
    """
    options, device = config.train, world.device
    fp8_products.check_device(device, options.precision)
    torch.manual_seed(
        config.seed
    )  # training draws nothing from it; what a checkpoint keeps of it is the same in every run
    model = model or make_model(config, plan, device, resume is not None)
    shape, dtype = model.shape, arithmetic.compute_dtype(options, device)
    objective = Objective.of(shape, embedding, head, options, device, dtype)
    if world.rank == 0:
        for fallback in arithmetic.fallbacks(model, objective, options, device):
            log.warning("%s", fallback)
        if options.anchors_per_row >= plan.data.row_tokens:
            log.warning(
                "train.anchors_per_row is %d, but a row of %d tokens has %d anchors at most: the other blocks are empty, and take the "
                "time and the memory of full ones",
                options.anchors_per_row,
                plan.data.row_tokens,
                plan.data.row_tokens - 1,
            )
    optimizer = MasterAdamW(model.named_parameters(), options)
    step = _restore(optimizer, shape, config, plan, world, resume)
    if compiles(options, device):
        model.compile_layers()
    return Trainer(
        config=config,
        plan=plan,
        shape=shape,
        world=world,
        model=model,
        parallel=data_parallel(model, world),
        optimizer=optimizer,
        objective=objective,
        loader=BatchLoader(
            source,
            RowLayout.of(plan),
            shape,
            seed=config.seed,
            anchors_per_row=options.anchors_per_row,
            device=device,
            ahead=device.type == "cuda",
        ),
        compilations=CompilationCount(),
        step=step,
    )


def make_model(config: RunConfig, plan: StreamPlan, device: torch.device, resumed: bool) -> DraftModel:
    """The drafter on `device`, in the dtype that it computes in, with its initial weights, or with none if it is `resumed`. Any thread may
    call. Raises `ConfigError`.
    """
    options = config.train
    shape = DrafterShape.from_config(config.drafter, plan.target)
    with torch.device("meta"):  # PyTorch's own initial values would take seconds
        model = DraftModel(shape, gradient_checkpointing=options.gradient_checkpointing, fp8=options.precision == "fp8")
    model.to(arithmetic.compute_dtype(options, device)).to_empty(device=device)
    if not resumed:
        model.init_weights(config.seed)
    return model


def frozen_on_device(weights: FrozenWeights, options: TrainConfig, device: torch.device) -> FrozenWeights:
    """The target's embedding and head on `device`, in the dtype of the drafter's computation. It doesn't use PyTorch's compiler."""
    dtype = arithmetic.compute_dtype(options, device)
    return FrozenWeights(*on_device(weights.embedding, weights.head, device, dtype))


def save(trainer: Trainer) -> None:
    """Write a checkpoint from rank 0; the others wait for it."""
    if trainer.world.rank == 0:
        tensors = trainer.optimizer.tensors()
        weights = {name.removeprefix("master."): t for name, t in tensors.items() if name.startswith("master.")}
        moments = {name: t for name, t in tensors.items() if not name.startswith("master.")}
        moments["random.cpu"] = torch.get_rng_state()
        state = {
            "version": __version__,
            "torch": torch.__version__,
            "plan": plain(trainer.plan),
            "shape": json.loads(trainer.shape.to_json()),
            "config": trainer.config.model_dump(mode="json"),
        }
        started = time.monotonic()
        directory = checkpoint.save(
            trainer.config.run_dir,
            Checkpoint(trainer.step, weights, moments, state),
            trainer.config.train.keep_checkpoints,
        )
        seconds = time.monotonic() - started
        saved = logs.facts("checkpoint", step=trainer.step, seconds=seconds, directory=str(directory))
        log.info("checkpoint of step %d written in %.1f s", trainer.step, seconds, extra=saved)
    trainer.world.barrier()


def plan_of(state: dict[str, Any], directory: Path) -> StreamPlan:
    """The plan that a checkpoint was trained on. Raises `CheckpointError`."""
    try:
        plan: StreamPlan = reader(StreamPlan)(_tuples(state["plan"]), "plan")
    except ProtocolError as error:
        raise CheckpointError(f"{directory / 'state.json'}: {error.what}", f"remove {directory}") from None
    return plan


def _restore(
    optimizer: MasterAdamW, shape: DrafterShape, config: RunConfig, plan: StreamPlan, world: World, resume: Path | None
) -> int:
    """Load `resume` on rank 0 and send it to every rank; the number of steps done."""
    tensors = optimizer.tensors()
    steps = torch.zeros(1, dtype=torch.int64, device=world.device)
    if world.rank == 0 and resume is not None:
        loaded = checkpoint.load(resume)
        _refuse_other_run(loaded, resume, shape, config, plan)
        _say_what_changed(loaded, resume, config)
        stored = {**{f"master.{name}": tensor for name, tensor in loaded.weights.items()}, **loaded.optimizer}
        for name, tensor in tensors.items():
            if name not in stored or stored[name].shape != tensor.shape:
                raise CheckpointError(f"{resume} has no {name} of shape {tuple(tensor.shape)}", f"remove {resume}")
            with torch.no_grad():
                tensor.copy_(stored[name])
        torch.set_rng_state(loaded.optimizer["random.cpu"])
        steps.fill_(loaded.step)
    world.broadcast([steps])
    if int(steps) > 0:
        world.broadcast(tensors.values())
    if int(steps) > 0 or resume is not None:
        optimizer.restore(int(steps))
    return int(steps)


def _refuse_other_run(
    loaded: Checkpoint, directory: Path, shape: DrafterShape, config: RunConfig, plan: StreamPlan
) -> None:
    differences = plan.differences(plan_of(loaded.state, directory))
    if differences:
        raise CheckpointError(f"{directory} was trained on another stream: {'; '.join(differences)}", _FRESH_START)
    there, here = loaded.state["shape"], json.loads(shape.to_json())
    differences = [f"{key}: {here[key]} here, {there.get(key)} there" for key in here if here[key] != there.get(key)]
    if differences:
        raise CheckpointError(f"{directory} is a drafter of another shape: {'; '.join(differences)}", _FRESH_START)
    rows = loaded.state["config"]["train"]["rows_per_step"]
    if rows != config.train.rows_per_step:
        raise CheckpointError(
            f"{directory} was trained with train.rows_per_step {rows}, not {config.train.rows_per_step}: "
            "the rows of its next step would not be known",
            _FRESH_START,
        )
    if loaded.step > config.train.steps:
        raise CheckpointError(
            f"{directory} is beyond train.steps {config.train.steps}", "raise train.steps, or use another run_dir"
        )


def _say_what_changed(loaded: Checkpoint, directory: Path, config: RunConfig) -> None:
    """Warn of options that lead to other weights than the run would have had. An option that the checkpoint doesn't know is not among them."""
    there, here = loaded.state["config"], config.model_dump(mode="json")
    lines = []
    for name, only_for in _STEERING.items():
        old, new = there["train"].get(name, here["train"][name]), here["train"][name]
        if old != new and (only_for is None or here["train"][only_for[0]] in only_for[1]):
            lines.append(f"train.{name} {json.dumps(new)}, not {json.dumps(old)}")
    if lines:
        log.warning("goes on from %s with other options: %s", directory, "; ".join(lines))


def _tuples(tree: Any) -> Any:
    if isinstance(tree, list):
        return tuple(_tuples(item) for item in tree)
    if isinstance(tree, dict):
        return {key: _tuples(value) for key, value in tree.items()}
    return tree
