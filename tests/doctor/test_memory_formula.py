"""The formulas against what is counted, and against what was measured on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from header_only_target import DRAFTER_PARAMETERS, PARAMETERS, write_qwen3_8b

from dflash_mp.bench.step import CASES, StepCase, build, make_batch
from dflash_mp.bench.synthetic import synthetic_plan
from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.config import DrafterConfig, TargetConfig, TrainConfig
from dflash_mp.doctor.memory import Memory, drafter_memory, feeder_memory
from dflash_mp.doctor.target_size import read_target_size
from dflash_mp.drafter.model import DraftModel
from dflash_mp.drafter.optimizer import MasterAdamW
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.errors import TargetError
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.plan import DataPlan, StreamPlan
from dflash_mp.target.load import load_target

TOLERANCE = 0.15  # of the peak that was measured on a GPU, in either direction


def test_a_targets_size_is_that_of_the_loaded_target(tmp_path: Path) -> None:
    config = TargetConfig(path=str(write_tiny_target(tmp_path / "target")), device="cpu", taps=2)
    size, loaded = read_target_size(config, "float32"), load_target(config)
    assert size.parameters == loaded.model.num_parameters()
    for fact in ("num_layers", "hidden_size", "vocab_size", "layer_ids", "tied_head", "heads", "kv_heads", "head_dim"):
        assert getattr(size.info, fact) == getattr(loaded.info, fact), fact
    assert size.info.intermediate_size == loaded.info.intermediate_size
    memory = feeder_memory(size.info, size.parameters, 64)
    assert memory.resident[0].nbytes == 4 * loaded.model.num_parameters()
    assert memory.resident[1].nbytes == 3 * 4 * 64 * loaded.info.feature_width


def test_a_large_targets_size_and_its_drafters_are_the_published_ones(tmp_path: Path) -> None:
    size = read_target_size(TargetConfig(path=str(write_qwen3_8b(tmp_path / "Qwen3-8B"))), "bfloat16")
    assert size.parameters == PARAMETERS
    assert size.info.layer_ids == (1, 9, 17, 25, 33)
    shape = DrafterShape.from_config(DrafterConfig(), size.info)
    with torch.device("meta"):
        model = DraftModel(shape)
    assert shape.parameter_count() == sum(p.numel() for p in model.parameters()) == DRAFTER_PARAMETERS


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    directory = write_qwen3_8b(tmp_path / "target")
    (directory / "model-00002-of-00002.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(TargetError, match=r"model-00002-of-00002.safetensors is no safetensors file"):
        read_target_size(TargetConfig(path=str(directory)), "bfloat16")


def of_case(case: StepCase, precision: str) -> Memory:
    train = TrainConfig(
        steps=1,
        precision=precision,
        micro_batch_rows=case.rows,
        anchors_per_row=case.anchors,
        gradient_checkpointing=case.gradient_checkpointing,
    )
    plan = synthetic_plan(case.row_tokens, case.hidden_size)  # in bfloat16
    row = RowLayout.of(replace(plan, target=replace(plan.target, layer_ids=case.shape().layer_ids)))
    return drafter_memory(case.shape(), train, row, width=2, tied=False, compiled=True)


def test_terms_follow_their_numbers(tmp_path: Path) -> None:
    """16 bytes per parameter in bf16 and in fp32; a row's bytes are the stream's; checkpointing keeps less; more tokens take more."""
    size = read_target_size(TargetConfig(path=str(write_qwen3_8b(tmp_path / "t"))), "bfloat16")
    shape = DrafterShape.from_config(DrafterConfig(), size.info)

    def row(tokens: int, wire: str) -> RowLayout:
        info = replace(size.info, wire_dtype=wire)
        return RowLayout.of(StreamPlan(DataPlan("", 0, tokens, 0, 0, "", "", "default"), info))

    def of(tokens: int = 4096, width: int = 2, wire: str = "auto", **train: object) -> Memory:
        options = TrainConfig.model_validate({"steps": 1, **train})
        return drafter_memory(shape, options, row(tokens, wire), width=width, tied=False, compiled=True)

    for width in (2, 4):
        of_weights = [t.nbytes for t in of(width=width).resident if t.name not in ("embedding and head", "rows")]
        assert sum(of_weights) == 16 * DRAFTER_PARAMETERS
    assert of().nbytes > of(gradient_checkpointing=True).nbytes
    assert of(8192).nbytes > of().nbytes > of(anchors_per_row=128).nbytes
    assert of(micro_batch_rows=2).nbytes > of().nbytes
    in_bf16, in_fp8 = (
        next(term.nbytes for term in of(wire=wire).resident if term.name == "rows") for wire in ("auto", "fp8")
    )
    assert in_bf16 == 2 * row(4096, "auto").nbytes
    scaled = of(precision="fp8")
    head = 2 * shape.vocab_size * shape.hidden_size
    assert [t.nbytes for t in scaled.resident if t.name == "head in fp8"] == [head]
    assert scaled.nbytes - head < of().nbytes, "inputs of products and slopes take a byte a value"
    assert in_fp8 == 2 * (row(4096, "fp8").nbytes + 2 * 4096 * shape.feature_width), "as it came, and in bf16"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ["0.6b", "8b-b", "8b-a", "8b-a-checkpointing"])
def test_the_predicted_peak_of_a_step_is_what_the_allocator_saw(name: str, precision: str) -> None:
    """Forward, backward and AdamW on fp32 masters, twice, with two batches alive as in training."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    case, device = CASES[name], torch.device("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    model, objective = build(case, device, torch.bfloat16, fp8=precision == "fp8")
    model.compile_layers()
    optimizer = MasterAdamW(model.named_parameters(), TrainConfig(steps=1))
    optimizer.tensors()
    batches = [make_batch(case, device, torch.bfloat16, seed) for seed in range(2)]
    for number in range(3):
        if number == 1:  # the first pass compiles
            torch.cuda.reset_peak_memory_stats(device)
        loss = objective.loss(model, batches[number % 2])
        loss.total.backward()
        optimizer.step(1e-4, 1.0)
    measured, predicted = torch.cuda.max_memory_allocated(device) - before, of_case(case, precision).nbytes
    print(f"{name}, {precision}: predicted {predicted / 2**30:.2f} GiB, measured {measured / 2**30:.2f} GiB")
    assert predicted == pytest.approx(measured, rel=TOLERANCE)
