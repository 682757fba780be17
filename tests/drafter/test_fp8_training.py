"""A drafter trained with `precision: fp8`: its gradients, its compilation, its curve, what it is called and where it is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from reference import random_batch, small_shape
from synthetic_rows import SyntheticRows, make_config, make_trainer
from torch._dynamo.utils import counters

from dflash_mp.config import TrainConfig
from dflash_mp.drafter import arithmetic, fp8_head, fp8_products, frozen_head, schedule, world
from dflash_mp.drafter.attention import blockwise_mask
from dflash_mp.drafter.fp8_head import ScaledHead
from dflash_mp.drafter.fp8_products import draws_of
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.loss import block_loss, slot_weights
from dflash_mp.drafter.model import DraftModel
from dflash_mp.drafter.report import Reporter
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.drafter.trainer import Trainer, measure_held_out, train_step, warm_up
from dflash_mp.errors import ConfigError

SHAPE = small_shape(hidden_size=64, intermediate_size=160, head_dim=16, layers=3, vocab_size=325)


def drafter(dtype: torch.dtype, fp8: bool, *, recompute: bool = False) -> DraftModel:
    model = DraftModel(SHAPE, gradient_checkpointing=recompute, fp8=fp8)
    model.init_weights(0)
    return model.to(dtype)


def gradients(model: DraftModel, seed: int = 0, *, supervised: float = 0.7) -> dict[str, torch.Tensor]:
    """Of every parameter, and the loss; the head is in fp8 when the layers are."""
    batch = random_batch(seed, SHAPE, supervised=supervised)
    mask = blockwise_mask(batch.blocks.layout(batch.documents))
    hidden = model(batch.features, batch.noise, batch.positions, batch.blocks.positions.flatten(1), mask)
    head = batch.embedding.to(hidden.dtype) * 0.2
    weights = batch.blocks.scored * slot_weights(SHAPE.block_size)
    fp8 = "Scaled" in type(model.layers[0].mlp.up_proj).__name__
    frozen = FrozenHead(head, scaled=ScaledHead.of(head) if fp8 else None)
    loss = block_loss(hidden, frozen, batch.blocks.labels, weights)
    loss.total.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {**found, "loss": loss.total.detach()}


def test_names_and_shapes_of_the_weights_are_those_of_an_ordinary_drafter() -> None:
    plain, scaled = (DraftModel(SHAPE, fp8=fp8).state_dict() for fp8 in (False, True))
    assert {name: t.shape for name, t in plain.items()} == {name: t.shape for name, t in scaled.items()}


@pytest.mark.usefixtures("as_on_cuda")
def test_gradients_point_where_those_of_float64_do() -> None:
    for seed in range(2):
        found, exact = gradients(drafter(torch.bfloat16, True), seed), gradients(drafter(torch.float64, False), seed)
        for name in exact:
            mine, theirs = found[name].double(), exact[name]
            bound = 0.02 if name == "loss" else 0.25
            assert (mine - theirs).norm() < bound * theirs.norm(), name
        mine, theirs = (
            torch.cat([each[name].double().flatten() for name in exact if name != "loss"]) for each in (found, exact)
        )
        assert torch.cosine_similarity(mine, theirs, 0) > 0.99


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_compile_once_and_give_the_same_gradients(recompute: bool) -> None:
    """But for the order of a few additions in bf16, after which fp8 may round the other way."""
    torch.compiler.reset()
    plain, model = drafter(torch.bfloat16, True), drafter(torch.bfloat16, True, recompute=recompute)
    model.compile_layers(backend="aot_eager")
    before = counters["stats"]["unique_graphs"]
    for seed, supervised in enumerate((0.7, 0.0)):
        expected = gradients(plain, seed, supervised=supervised)
        for name, mine in gradients(model, seed, supervised=supervised).items():
            assert (mine - expected[name]).norm() <= 0.03 * expected[name].norm(), name
    assert counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("objective", ["decay", "dpace"])
def test_a_curve_follows_that_of_fp32(tmp_path: Path, objective: str) -> None:
    curves = {}
    for precision in ("fp32", "fp8"):
        config = make_config(tmp_path, precision=precision, steps=12, objective=objective)
        rows = SyntheticRows()
        trainer = make_trainer(config, rows)
        rows.schedule(schedule.row_sequence(config.train, 0, 0, 1, 0))
        curves[precision] = [train_step(trainer)[0].loss for _ in range(12)]
    fp32, fp8 = curves["fp32"], curves["fp8"]
    assert fp8[-1] < 0.3 * fp8[0], "it learns"
    assert fp8 != fp32
    assert all(abs(mine / theirs - 1) < 0.05 for mine, theirs in zip(fp8, fp32, strict=True)), curves


def test_each_optimizer_step_rounds_weights_its_own_way_and_a_resumed_run_as_it_would_have(tmp_path: Path) -> None:
    def state(trainer: Trainer) -> tuple[int, torch.Tensor]:
        assert trainer.objective.scaled_head is not None
        return int(trainer.model.layers[0].mlp.up_proj.draw), trainer.objective.scaled_head.rows.float().clone()

    config = make_config(tmp_path, precision="fp8", steps=3)
    found = []
    for start in (0, 2):
        rows = SyntheticRows()
        trainer = make_trainer(config, rows)
        trainer.step = start
        rows.schedule(schedule.row_sequence(config.train, start, 0, 1, 0))
        for _ in range(start, 3):
            train_step(trainer)
            found.append(state(trainer))
    scaled = [module for module in trainer.model.layers.modules() if isinstance(module, fp8_products.ScaledLinear)]
    assert len({int(module.draw) for module in scaled}) == len(scaled) > 7, "each matrix in its own way, too"
    draws = [draw for draw, _ in found]
    assert len(set(draws[:3])) == 3
    assert draws[2] == draws[3] in draws_of(config.seed, 2, 100)
    assert torch.equal(found[2][1], found[3][1])
    assert not torch.equal(found[1][1], found[2][1])


@pytest.fixture
def quickly_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are traced as always, but not turned into kernels."""
    kept = (fp8_head._compiled, frozen_head._compiled_terms)
    torch.compiler.reset()
    for function in kept:
        function.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield
    for function in kept:
        function.cache_clear()


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_nothing_is_compiled_after_the_warm_up(tmp_path: Path, precision: str) -> None:
    config = make_config(tmp_path, precision=precision, compile=True, steps=2)
    rows = SyntheticRows()
    trainer = make_trainer(config, rows)
    rows.schedule(schedule.row_sequence(config.train, 0, 0, 1, 0))
    warm_up(trainer)
    compiled = counters["stats"]["unique_graphs"]
    for _ in range(2):
        train_step(trainer)
    assert counters["stats"]["unique_graphs"] == compiled > 0
    assert trainer.compilations.after_warm_up == 0


@pytest.mark.parametrize("objective", ["decay", "dpace"])
def test_held_out_passes_measure_the_drafter_that_is_exported(tmp_path: Path, objective: str) -> None:
    measured, trained = {}, {}
    for precision in ("bf16", "fp8"):
        config = make_config(tmp_path / precision, precision=precision, steps=1, objective=objective)
        rows = SyntheticRows()
        trainer = make_trainer(config, rows)
        rows.schedule(schedule.row_sequence(config.train, 0, 0, 1, 4))
        with Reporter(config.run_dir, True) as report:
            assert measure_held_out(trainer, 4, report, lambda: False)
        measured[precision] = json.loads((config.run_dir / "metrics.jsonl").read_text())["loss"]
        trained[precision] = train_step(trainer)[0].loss
    assert measured["fp8"] == measured["bf16"] > 0
    assert trained["fp8"] != trained["bf16"]


def test_the_log_says_what_runs_in_fp8_and_warns_of_what_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(make_config(tmp_path, precision="fp8"), SyntheticRows())
    assert arithmetic.describe(trainer.model, trainer.objective) == (
        "bfloat16 with the products of layers and head in fp8, blockwise attention, layers not compiled, "
        "loss fused with the head, not compiled"
    )
    assert [record.message.split(",")[0] for record in caplog.records] == ["train.precision is fp8 on a CPU"]
    caplog.clear()
    plain = make_trainer(make_config(tmp_path), SyntheticRows())
    assert arithmetic.describe(plain.model, plain.objective).startswith("float32, blockwise attention")
    assert not caplog.records


def test_a_layer_and_a_head_that_stay_in_bf16_are_named_with_their_cost() -> None:
    def lines(shape: DrafterShape) -> list[str]:
        options, gpu = TrainConfig(steps=1, precision="fp8"), torch.device("cuda")
        head = torch.zeros(shape.vocab_size, shape.hidden_size)
        objective = arithmetic.Objective.of(shape, head, head, options, torch.device("cpu"), torch.bfloat16)
        return list(arithmetic.fallbacks(DraftModel(shape, fp8=True), objective, options, gpu))

    assert lines(SHAPE) == []
    (of_mlp, *others) = lines(small_shape(hidden_size=64, intermediate_size=136, head_dim=16))
    assert of_mlp.startswith("gate_proj (64 → 136) multiplies in bfloat16, since fp8 needs multiples of 16: 23% of")
    assert [line.split()[0] for line in others] == ["up_proj", "down_proj"]
    assert "the hidden size is 24" in lines(small_shape())[-1]


@pytest.mark.parametrize(("capability", "runs"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_without_fp8_is_refused_when_the_ranks_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(world, "_device", lambda name, local_rank: torch.device("cuda", 0))
    fp8_products.check_device(torch.device("cuda"), "bf16")
    config = make_config(tmp_path, precision="fp8")
    if runs:
        assert world.join(config).device.type == "cuda"
        return
    with pytest.raises(ConfigError, match=rf"NVIDIA A100 has compute capability {capability[0]}\.{capability[1]}"):
        world.join(config)
