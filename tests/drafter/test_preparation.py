"""What a rank prepares beside its connection: order, errors, and what it doesn't import too early."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from synthetic_rows import EMBEDDING, PLAN, SyntheticRows, make_config

from dflash_mp.config import RunConfig, TrainConfig
from dflash_mp.drafter import state
from dflash_mp.drafter.preparation import Preparation
from dflash_mp.drafter.world import World
from dflash_mp.errors import ConfigError
from dflash_mp.stream.weights import FrozenWeights

WORLD = World(0, 1, 0, 1, torch.device("cpu"))
FROZEN = FrozenWeights(EMBEDDING, EMBEDDING)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return make_config(tmp_path)


def test_the_trainer_is_what_it_is_without_preparation(config: RunConfig) -> None:
    rows = SyntheticRows()
    with Preparation(config, WORLD) as preparation:
        preparation.begin_model(PLAN, resumed=False)
        prepared = preparation.trainer(FROZEN, rows, None)
    plain = state.build_trainer(config, PLAN, EMBEDDING, EMBEDDING, rows, WORLD, None)
    tensors = plain.optimizer.tensors()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in prepared.optimizer.tensors().items())
    assert _threads() == []


def test_a_head_of_its_own_stays_one_on_the_device_and_a_tied_one_the_same_tensor() -> None:
    options, cpu, head = TrainConfig(steps=1, precision="bf16"), torch.device("cpu"), EMBEDDING + 1
    apart = state.frozen_on_device(FrozenWeights(EMBEDDING, head), options, cpu)
    assert torch.equal(apart.embedding, EMBEDDING.bfloat16())
    assert torch.equal(apart.head, head.bfloat16())
    tied = state.frozen_on_device(FROZEN, options, cpu)
    assert tied.head is tied.embedding


def test_a_drafter_that_cannot_be_made_is_the_trainers_error(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("no such shape", "another one")

    monkeypatch.setattr(state, "make_model", refuse)
    with Preparation(config, WORLD) as preparation:
        preparation.begin_model(PLAN, resumed=False)
        with pytest.raises(ConfigError, match="no such shape"):
            preparation.trainer(FROZEN, SyntheticRows(), None)


def test_after_an_error_elsewhere_no_thread_is_left(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "make_model", lambda *_: time.sleep(0.3))

    def fail() -> None:
        with Preparation(config, WORLD) as preparation:
            preparation.begin_model(PLAN, resumed=False)
            raise ConfigError("elsewhere", "")

    with pytest.raises(ConfigError, match="elsewhere"):
        fail()
    assert _threads() == []


def test_threads_take_turns_as_usual_once_the_trainer_is_there(config: RunConfig) -> None:
    usual = sys.getswitchinterval()
    with Preparation(config, WORLD) as preparation:
        assert sys.getswitchinterval() < usual / 2
        preparation.begin_model(PLAN, resumed=False)
        preparation.trainer(FROZEN, SyntheticRows(), None)
        assert sys.getswitchinterval() == usual


@pytest.mark.parametrize("place", ["known", "elsewhere", "no Triton"])
def test_tritons_key_is_computed_meanwhile_where_it_is_known(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    computed = threading.Event()
    cache = {"known": SimpleNamespace(triton_key=computed.set), "elsewhere": SimpleNamespace(), "no Triton": None}
    for name in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", cache[place])  # None: importing it raises
    monkeypatch.setattr(Preparation, "_import_compiler", lambda self: None)  # it would find that Triton
    with Preparation(config, replace(WORLD, device=torch.device("cuda"))) as preparation:
        preparation._key.result()
    assert computed.is_set() == (place == "known")


def test_a_rank_connects_before_the_compiler_is_imported() -> None:
    code = "import sys, dflash_mp.drafter.rank; print({'torch', 'torch._dynamo', 'sympy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "{'torch'}\n"


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prepare")]
