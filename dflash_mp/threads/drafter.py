"""One drafter of a comparison, as a thread: the trainer of process mode, its rows from a queue, a guard around its steps.

`build` makes the trainer exactly as a rank of process mode does; the step is `drafter.trainer.train_step`. A step that raises is logged and
tried again on the same rows: how often that helps, and whether the losses are still the same, is what a comparison shows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dflash_mp.data.row import RowKey
from dflash_mp.drafter import schedule, state
from dflash_mp.drafter.batch import BatchLoader, MicroBatch
from dflash_mp.drafter.trainer import Trainer, train_step, warm_up
from dflash_mp.drafter.world import World
from dflash_mp.stream.layout import RowLayout
from dflash_mp.threads.compilations import CountingBackend, on_autograd_thread, settle_dynamo
from dflash_mp.threads.guards import Guard, Turn
from dflash_mp.threads.log import LogWriter
from dflash_mp.threads.queues import RowQueue
from dflash_mp.threads.sources import Rows
from dflash_mp.threads.work import Work, row_lengths

_GIVE_UP = 200
_PAUSE_SECONDS = 0.05  # after an error, so that one that never ends does not fill the log


@dataclass
class Drafter:
    """A drafter that is ready to train."""

    number: int
    work: Work
    trainer: Trainer
    rows: RowQueue
    turn: Turn
    backend: CountingBackend
    stream: torch.cuda.Stream | None  # its own on CUDA, so that threads don't wait for each other's kernels


class GuardedLoader(BatchLoader):
    """A loader whose micro-batches have lengths of their own, and which takes the drafter's turn once a micro-batch is ready."""

    def __init__(self, rows: RowQueue, trainer: Trainer, turn: Turn, layout_of: Callable[[RowKey], RowLayout]) -> None:
        self._whole = RowLayout.of(trainer.plan)
        super().__init__(
            rows,
            self._whole,
            trainer.shape,
            seed=trainer.config.seed,
            anchors_per_row=trainer.config.train.anchors_per_row,
            device=trainer.world.device,
        )
        self._turn, self._layout_of = turn, layout_of

    def load(self, keys: Sequence[RowKey | None]) -> MicroBatch:
        """As in `BatchLoader`; the turn begins when it returns."""
        self._turn.leave(completed=True)
        first = next((key for key in keys if key is not None), None)
        self._layout = self._whole if first is None else self._layout_of(first)
        batch = super().load(keys)
        self._turn.enter(self._layout.row_tokens)
        return batch


def build(work: Work, number: int, rows: Rows, turn: Turn, backend: CountingBackend) -> Drafter:
    """Drafter `number`, at step 0, not yet compiled. Raises `DflashError`."""
    device = torch.device(work.devices[number])
    options = work.config.train.model_copy(update={"compile": False, "device": device.type})
    config = work.config.model_copy(update={"seed": work.config.seed + number, "train": options})
    layout_of = row_lengths(work, rows.plan, number)
    queue = RowQueue(
        rows.sources[number],
        RowLayout.of(rows.plan),
        layout_of,
        number=number,
        rows_per_step=options.rows_per_step,
        row_seconds=config.stream.row_seconds,
        pin=device.type == "cuda",
    )
    world = World(0, 1, 0, 1, device)
    trainer = state.build_trainer(config, rows.plan, rows.embedding, rows.head, queue, world, None)
    trainer.loader = GuardedLoader(queue, trainer, turn, layout_of)
    trainer.model.compile_layers(backend=backend)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    return Drafter(number, work, trainer, queue, turn, backend, stream)


def warm_up_first(drafter: Drafter, guard: Guard, log: LogWriter) -> bool:
    """The first forward and backward pass of this thread, without rows; False when `_GIVE_UP` attempts failed. Errors are logged."""
    guard.in_thread()
    with _stream(drafter):
        return any(_attempt(drafter, log, lambda: warm_up(drafter.trainer)) for _ in range(_GIVE_UP))


def train(drafter: Drafter, log: LogWriter, stop: Callable[[], bool]) -> None:
    """Train to the last step, until `stop()`, until rows stop coming or `_GIVE_UP` attempts have failed in a row. Errors are logged."""
    trainer, failures = drafter.trainer, 0
    drafter.rows.schedule(rows_of(drafter.work))
    with _stream(drafter):
        while trainer.step < drafter.work.config.train.steps and failures < _GIVE_UP and not stop():
            failures = 0 if _attempt(drafter, log, lambda: _step(drafter, log)) else failures + 1
            if drafter.rows.broken:
                return


def rows_of(work: Work) -> Iterator[RowKey]:
    """Every row of a drafter, in order."""
    return schedule.row_sequence(work.config.train, 0, 0, 1, 0)


def prepare_device(device: torch.device) -> None:
    """Before any drafter starts: let the autograd thread of the device compile what comes, and finish what building has begun."""
    on_autograd_thread(device, settle_dynamo)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def prepare_thread(device: torch.device) -> None:
    """What a drafter's thread sets for itself."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    settle_dynamo()


def _attempt(drafter: Drafter, log: LogWriter, action: Callable[[], object]) -> bool:
    completed = False
    try:
        action()
        completed = True
    except Exception as error:
        log.error(error)
        drafter.trainer.loader.release()
        drafter.trainer.optimizer.zero_gradients()
        drafter.rows.rewind()
    else:
        drafter.rows.commit()
    finally:
        drafter.turn.leave(completed)
    if not completed:
        time.sleep(_PAUSE_SECONDS)
    return completed


def _step(drafter: Drafter, log: LogWriter) -> None:
    trainer, started, before = drafter.trainer, time.monotonic(), drafter.backend.calls_here()
    figures, _ = train_step(trainer)
    eager = _compiled_calls(trainer) - (drafter.backend.calls_here() - before)
    log.step(trainer.step, time.monotonic() - started, figures.loss, max(0, eager))


def _compiled_calls(trainer: Trainer) -> int:
    """Compiled layers that a step calls in its own thread. On CUDA, recomputation is the autograd thread's."""
    options = trainer.config.train
    passes = 2 if options.gradient_checkpointing and trainer.world.device.type == "cpu" else 1
    return passes * trainer.shape.layers * -(-options.rows_per_step // options.micro_batch_rows)


def _stream(drafter: Drafter) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if drafter.stream is None else torch.cuda.stream(drafter.stream)
