"""What a rank prepares while it waits for the feeders: PyTorch's compiler is imported, Triton's part of its cache's keys computed, and the
drafter's initial weights made.

All take seconds, and none needs what comes from the feeders. Nothing is compiled, and nobody uses what is
being made. An error is raised where the result is asked for; whatever is under way when something else fails is waited for, some seconds.
"""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from dflash_mp.config import RunConfig
from dflash_mp.drafter.rows import RowSource
from dflash_mp.drafter.world import World
from dflash_mp.stream.plan import StreamPlan
from dflash_mp.stream.weights import FrozenWeights

if TYPE_CHECKING:
    from dflash_mp.drafter.model import DraftModel
    from dflash_mp.drafter.trainer import Trainer

_SWITCH_SECONDS = 0.0005  # for how long importing keeps the interpreter from the thread that receives: each chunk needs it several times


class Preparation:
    """Of one rank, which has joined the others: make it then, as imports must not meet those that joining may cause. Use it with `with`.

    `begin_model` once the plan is known, then `trainer`.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        self._config, self._world = config, world
        self._usual_interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._threads = ThreadPoolExecutor(3, "prepare")
        self._state = self._threads.submit(importlib.import_module, "dflash_mp.drafter.state")
        self._compiler = self._threads.submit(self._import_compiler)
        self._key = self._threads.submit(self._compute_key)
        self._model: Future[DraftModel] | None = None

    def state(self) -> Any:
        """The module `dflash_mp.drafter.state`, imported."""
        return self._state.result()

    def begin_model(self, plan: StreamPlan, resumed: bool) -> None:
        """Make the drafter of `plan`; its initial weights only if it isn't `resumed`."""
        self._plan = plan
        self._model = self._threads.submit(self._make_model, plan, resumed)

    def trainer(self, weights: FrozenWeights, source: RowSource, resume: Path | None) -> Trainer:
        """As `state.build_trainer`, around the drafter begun. Raises what it raises."""
        if self._model is None:
            raise RuntimeError("begin_model first")
        frozen = self.state().frozen_on_device(weights, self._config.train, self._world.device)
        model = self._model.result()
        self._compiler.result()
        self._key.result()
        self._end()
        trainer: Trainer = self.state().build_trainer(
            self._config, self._plan, frozen.embedding, frozen.head, source, self._world, resume, model
        )
        return trainer

    def __enter__(self) -> Preparation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        """Once all is done, or isn't needed; later calls do nothing."""
        self._threads.shutdown(cancel_futures=True)
        sys.setswitchinterval(self._usual_interval)

    def _import_compiler(self) -> ModuleType | None:
        """After all else, which takes less time and is needed first."""
        if not self.state().compiles(self._config.train, self._world.device):
            return None
        return importlib.import_module("torch._inductor.compile_fx")

    def _compute_key(self) -> None:
        """Part of what names a compiled kernel in the cache: Triton sums up its own libraries, a second in which other threads run, and keeps that.

        Where a release of Triton has it elsewhere, the first compilation computes it.
        """
        if self._world.device.type != "cuda" or not self.state().compiles(self._config.train, self._world.device):
            return
        try:
            key = importlib.import_module("triton.runtime.cache").triton_key
        except (ImportError, AttributeError):
            return
        key()

    def _make_model(self, plan: StreamPlan, resumed: bool) -> DraftModel:
        model: DraftModel = self.state().make_model(self._config, plan, self._world.device, resumed)
        return model
