"""Everything that an end-to-end measurement needs on disk, and the commands of its processes.

A target of a named shape without weights, a prepared dataset of random documents whose lengths go from a few tokens to a whole row, and one
configuration file. Feeders and drafters are the real ones but for the target's weights (`random_feeder`), and, for a drafter alone, its rows
(`local_drafter`).
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dflash_mp import run as launcher
from dflash_mp.bench.random_target import SHAPES, write_target_files
from dflash_mp.bench.step import CASES as STEP_CASES
from dflash_mp.bench.tiny import tiny_tokenizer
from dflash_mp.bench.tiny_run import WORDS
from dflash_mp.config import RunConfig
from dflash_mp.config_file import load_config
from dflash_mp.data.prepare import prepare
from dflash_mp.errors import ConfigError
from dflash_mp.supervisor import Part

_ROWS = 128  # of the dataset, which is used over and over, in another order each time
_WINDOW_ROWS = 6  # that a drafter holds or has asked for
_ROWS_OF_A_FEEDER = 4  # that a client which takes those of all feeders holds or has asked for
_FOREVER = 1_000_000_000  # steps: what ends a training here is the measurement


@dataclass(frozen=True)
class Case:
    """A target's shape, and the rows and drafter of a case of `bench step`."""

    target: str
    step: str
    micro_batches: int  # of a rank in an optimizer step


CASES = {"8b": Case("8b", "8b-a", 4), "0.6b": Case("0.6b", "0.6b", 4), "tiny": Case("tiny", "tiny", 1)}


@dataclass(frozen=True)
class Processes:
    """Where the processes of the whole run compute: a device for each, `cpu` or `cuda:N`, which may appear several times."""

    feeders: tuple[str, ...]
    drafters: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.feeders or not self.drafters:
            raise ConfigError("an end-to-end run needs a feeder and a drafter", "--feeders cuda:0 --drafters cuda:1")
        for what, devices in (("--feeders", self.feeders), ("--drafters", self.drafters)):
            wrong = [name for name in devices if not re.fullmatch(r"cpu|cuda:\d+", name)]
            if wrong:
                raise ConfigError(f"{what}: {wrong[0]!r} is no device", "cpu or cuda:N, separated by commas")
        if len({name == "cpu" for name in self.drafters}) > 1:
            raise ConfigError("--drafters are partly on the CPU", "all on CUDA devices, or all on the CPU")


class Place:
    """The files below `directory`, and logs below `logs`, by default there, too. Makes them.

    Raises `ConfigError` for an unknown case or a wrong override.
    """

    def __init__(
        self,
        directory: Path,
        case: str,
        processes: Processes,
        overrides: Sequence[str] = (),
        logs: Path | None = None,
    ) -> None:
        if case not in CASES:
            raise ConfigError(f"there is no case {case!r}", f"one of {', '.join(CASES)}")
        self.case, self.processes = CASES[case], processes
        self.file = directory / "run.yaml"
        self._directory, self._overrides, self._logs = directory, tuple(overrides), logs or directory
        directory.mkdir(exist_ok=True)
        write_target_files(directory / "target", SHAPES[self.case.target])
        self._write(STEP_CASES[self.case.step].row_tokens)
        config = self.config("whole")
        if config.feed.tensor_parallel > 1:
            raise ConfigError(
                f"feed.tensor_parallel is {config.feed.tensor_parallel}, but a target of random weights can't be shared",
                "measure that with dflash-mp bench capture --tensor-parallel",
            )
        self._write(config.data.row_tokens)  # an override changes what memory is needed
        self._rows_of_a_drafter = max(1, config.train.rows_per_step // len(processes.drafters))  # in a step
        _write_documents(directory / "documents.jsonl", config.data.row_tokens)
        prepare(config.data, tiny_tokenizer(), seed=config.seed)

    def config(self, phase: str, drafters: int | None = None) -> RunConfig:
        """Of `drafters` ranks, by default all, in a run directory of their own: the phases have the same run name."""
        return load_config(self.file, self._sets(phase, drafters)).config

    def reader_config(self) -> RunConfig:
        """Of one client that takes the rows of all feeders: its window, which they divide, has at least four of each."""
        config = self.config("feeders", 1)
        rows = _ROWS_OF_A_FEEDER * len(self.processes.feeders)
        window = max(config.stream.window_mib, rows * self._row_mib(config.data.row_tokens) + 1)
        return config.model_copy(update={"stream": config.stream.model_copy(update={"window_mib": window})})

    def feeder_parts(self) -> list[Part]:
        """One for each feeder."""
        command = (sys.executable, "-m", "dflash_mp.bench.random_feeder", *self._options("whole", None))
        return [
            Part(f"feeder {i}", (*command, "--index", str(i)), self._logs / f"feeder-{i}.log", serves=True)
            for i in range(len(self.processes.feeders))
        ]

    def drafter_part(self, phase: str, drafters: int | None = None, *, local: bool) -> Part:
        """torchrun with that many ranks; `local`: they train on rows of their own."""
        count = len(self.processes.drafters) if drafters is None else drafters
        python = (sys.executable, "-m")
        module = "dflash_mp.bench.local_drafter" if local else "dflash_mp.drafter"
        rank = (*python, module, *self._options(phase, drafters))
        if _shared(self.processes.drafters[:count]):
            rank = (*python, "dflash_mp.bench.on_device", ",".join(self._visible(count)), *rank)
        if local and count == 1:
            return Part(f"drafter, {phase}", rank, self._logs / f"{phase}.log")
        torchrun = ["dflash_mp.torchrun", "--standalone", "--nproc-per-node", str(count)]
        if self.processes.drafters[0] != "cpu" and not _shared(self.processes.drafters[:count]):
            torchrun.append("--virtual-local-rank")  # as `dflash-mp run` does
        command = (*python, *torchrun, "-m", "dflash_mp.child", *rank)
        return Part(f"drafters, {phase}", command, self._logs / f"{phase}.log", leads=True)

    def drafter_environment(self, drafters: int | None = None) -> Mapping[str, str]:
        """With the drafters' devices visible, in their order."""
        count = len(self.processes.drafters) if drafters is None else drafters
        environment = launcher.environment()
        if self.processes.drafters[0] != "cpu" and not _shared(self.processes.drafters[:count]):
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._visible(count))
        return environment

    def _visible(self, count: int) -> list[str]:
        """Values of CUDA_VISIBLE_DEVICES for the first drafters, whatever of them this process itself sees."""
        own = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        indices = [int(name.removeprefix("cuda:")) for name in self.processes.drafters[:count]]
        if own and max(indices) >= len(own):
            raise ConfigError(f"there is no cuda:{max(indices)}: CUDA_VISIBLE_DEVICES is {','.join(own)}", "correct it")
        return [own[index] if own else str(index) for index in indices]

    def _options(self, phase: str, drafters: int | None) -> tuple[str, ...]:
        sets = (word for text in self._sets(phase, drafters) for word in ("--set", text))
        return ("--config", str(self.file), *sets)

    def _sets(self, phase: str, drafters: int | None) -> tuple[str, ...]:
        sets = [f"run_dir={self._directory / phase / 'run'}", *self._overrides]
        if drafters is not None:
            sets += [f"train.drafters={drafters}", f"train.rows_per_step={drafters * self._rows_of_a_drafter}"]
        return tuple(sets)

    def _write(self, row_tokens: int) -> None:
        self.file.write_text(yaml.safe_dump(self._tree(row_tokens)), encoding="utf-8")

    def _row_mib(self, row_tokens: int) -> float:
        width = STEP_CASES[self.case.step].taps * SHAPES[self.case.target].hidden_size
        return row_tokens * (width * (4 if "cpu" in self.processes.feeders else 2) + 16) / 2**20

    def _tree(self, row_tokens: int) -> dict[str, Any]:
        step = STEP_CASES[self.case.step]
        feeders, drafters = self.processes.feeders, self.processes.drafters
        on_cpu = drafters[0] == "cpu"
        window = _WINDOW_ROWS * self._row_mib(row_tokens) + 1
        feeder_port, rank_port = _free_ports(len(feeders)), _free_ports(len(drafters))
        return {
            "run_dir": "",
            "target": {"path": str(self._directory / "target"), "taps": step.taps},
            "data": {
                "path": str(self._directory / "data"),
                "sources": [{"path": str(self._directory / "documents.jsonl")}],
                "row_tokens": step.row_tokens,
                "held_out": 0.0,
                "min_supervised_tokens": 2,
            },
            "feed": {
                "endpoints": [f"ipc://{self._directory}/feeder-{i}.sock" for i in range(len(feeders))],
                "devices": list(feeders),
                "memory_mib": math.ceil((len(drafters) + 1) * window),
                **({"threads": 1} if "cpu" in feeders else {}),
            },
            "stream": {"window_mib": window, "connect_seconds": 300, "row_seconds": 300},
            "drafter": {"layers": step.layers, "block_size": step.block_size},
            "train": {
                "device": "cpu" if on_cpu else "cuda",
                "steps": _FOREVER,
                "rows_per_step": len(drafters) * self.case.micro_batches * step.rows,
                "micro_batch_rows": step.rows,
                "anchors_per_row": step.anchors,
                "gradient_checkpointing": step.gradient_checkpointing,
                "log_every": 1,
                "checkpoint_every": _FOREVER,
                "held_out_every": 0,
                "held_out_rows": 0,
                "drafters": len(drafters),
                **({"threads": 1} if on_cpu else {}),
            },
            "metrics": {"feeder_port": feeder_port, "rank_port": rank_port},
        }


def _shared(devices: Sequence[str]) -> bool:
    return devices[0] != "cpu" and len(set(devices)) < len(devices)


def _write_documents(file: Path, row_tokens: int) -> None:
    """Prompts and answers of random words; their lengths are spread evenly on a logarithmic scale. A token is a byte."""
    draw = random.Random(0)
    longest, total = max(48, row_tokens - 64), 0
    with file.open("w", encoding="utf-8") as out:
        while total < _ROWS * row_tokens:
            length = int(math.exp(draw.uniform(math.log(16), math.log(longest))))
            text = " ".join(draw.choices(WORDS, k=1 + length // 4))[:length]
            cut = draw.randint(4, max(5, length // 3))
            out.write(json.dumps({"prompt": text[:cut], "response": text[cut:]}) + "\n")
            total += length + 48


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on now."""
    draw = random.Random()
    for _ in range(200):
        first = draw.randrange(20_000, 60_000)
        taken: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                taken.append(socket.create_server(("127.0.0.1", port)))
            return first
        except OSError:
            continue
        finally:
            for one in taken:
                one.close()
    raise ConfigError("no free ports for the figures of the processes", "end what listens on so many")
