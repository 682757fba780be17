"""`dflash-mp bench step`: the trainer's forward and backward pass against the matrix rate of the same device, in one run.

The same objects as in training (`DraftModel`, `Objective`, `make_blocks`), on fresh random rows with two documents and padding.
Correctness comes first: the gradients at a small shape are compared with a float64 twin. Passes and plain products are then made by turns, some of
each in a row (`timing.by_turns`). The work counted is that of the matrix products:
3·2·[draft tokens × layer weights + context tokens × (k, v, fc weights)] + 2·2·draft tokens × hidden × vocabulary; attention itself
is not counted, and what gradient checkpointing computes again in a rate of its own only. The count is fixed by definition, so that figures can be compared: it includes slot 0 through the
head and an input gradient of `fc`, which the code does not compute. In fp8 the same passes are made in bf16, too, by turns.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from dflash_mp.bench.fp8_products import Fp8Products, measure_products
from dflash_mp.bench.timing import by_turns, copy_rate, plain_product, queued, timed
from dflash_mp.config import TrainConfig
from dflash_mp.drafter import arithmetic
from dflash_mp.drafter.anchors import make_blocks
from dflash_mp.drafter.batch import MicroBatch
from dflash_mp.drafter.fp8_products import check_device
from dflash_mp.drafter.model import DraftModel
from dflash_mp.drafter.objective import Objective
from dflash_mp.drafter.optimizer import MasterAdamW
from dflash_mp.drafter.shape import DrafterShape
from dflash_mp.errors import ConfigError
from dflash_mp.stream.layout import RowTensors

# Of AdamW, per bf16 parameter: gradient 2, master and two moments read and written 24, parameter 2.
_OPTIMIZER_BYTES = 28

Precision = Literal["auto", "fp32", "bf16", "fp8"]


@dataclass(frozen=True)
class StepCase:
    """A drafter and the rows of one micro-batch."""

    name: str
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    rows: int
    row_tokens: int
    anchors: int
    layers: int = 5
    taps: int = 5
    block_size: int = 16
    gradient_checkpointing: bool = False

    def shape(self) -> DrafterShape:
        return DrafterShape(
            layers=self.layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            layer_ids=tuple(range(self.taps)),
            mask_token_id=self.vocab_size - 1,
            vocab_size=self.vocab_size,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            max_positions=self.row_tokens,
            num_target_layers=self.taps + 3,
        )

    def operations(self) -> float:
        """Floating-point operations of the matrix products of one forward and backward pass, recomputation excluded."""
        of_fc = 2.0 * self._context_tokens * self.taps * self.hidden_size**2
        of_head = 4.0 * self._draft_tokens * self.hidden_size * self.vocab_size
        return 3 * (self._layers_forward() + of_fc) + of_head

    def recomputed(self, whole: bool) -> float:
        """Floating-point operations of the matrix products that gradient checkpointing computes again: those of the layers' forward pass.

        Not `whole`: without each layer's last one, as PyTorch stops once it has what the backward pass needs. A compiled layer runs to its end, and a
        product in fp8 gives what it keeps at its end.
        """
        if not self.gradient_checkpointing:
            return 0.0
        last = 2.0 * self.layers * self._draft_tokens * self.hidden_size * self.intermediate_size
        return self._layers_forward() - (0.0 if whole else last)

    @property
    def _draft_tokens(self) -> int:
        return self.rows * self.anchors * self.block_size

    @property
    def _context_tokens(self) -> int:
        return self.rows * self.row_tokens

    def _layers_forward(self) -> float:
        q, kv, h = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden_size
        of_draft = 2 * h * q + 2 * h * kv + 3 * h * self.intermediate_size
        return 2.0 * self.layers * (self._draft_tokens * of_draft + self._context_tokens * 2 * h * kv)

    def fp8_floor(self, products: Fp8Products, bf16_rate: float) -> float:
        """Seconds of these products in fp8 with full sums, but for `fc`, in bf16."""
        fused = 6.0 * self._context_tokens * self.taps * self.hidden_size**2
        return (self.operations() - fused) / products.full_rate + fused / bf16_rate


CASES = {
    case.name: case
    for case in (
        StepCase("8b-a", 4096, 12288, 32, 8, 128, 151_936, rows=1, row_tokens=2048, anchors=512),
        StepCase("8b-b", 4096, 12288, 32, 8, 128, 151_936, rows=2, row_tokens=768, anchors=256),
        StepCase("8b-a-checkpointing", 4096, 12288, 32, 8, 128, 151_936, 1, 2048, 512, gradient_checkpointing=True),
        StepCase("0.6b", 1024, 3072, 16, 8, 128, 151_936, rows=1, row_tokens=2048, anchors=512),
        StepCase("27b", 5120, 17408, 32, 8, 128, 248_320, 1, 4096, 512, gradient_checkpointing=True),
        StepCase("smollm2", 576, 1536, 9, 3, 64, 49_152, rows=1, row_tokens=512, anchors=64, layers=3, block_size=8),
        StepCase("tiny", 96, 192, 3, 1, 32, 320, rows=2, row_tokens=64, anchors=8, layers=2, block_size=4),
    )
}


@dataclass(frozen=True)
class Bf16Twin:
    """What the same passes take in bf16, measured by turns with those in fp8. Medians."""

    seconds: float
    ratio: float  # of a turn's seconds in bf16 to those in fp8
    gradient_error: float
    products: Fp8Products
    floor: float  # seconds that the products of a step in fp8 take at the rates of this run

    def text(self) -> str:
        return (
            f"; {self.ratio:.2f} × as fast as in bf16 ({self.seconds * 1e3:.1f} ms by turns, "
            f"worst gradient error {self.gradient_error:.1e}); {self.products.text()}; "
            f"a step's products alone would take {self.floor * 1e3:.1f} ms"
        )


@dataclass(frozen=True)
class StepResult:
    """Medians over turns; seconds of one pass, made in a row; rates in operations per second; memory in bytes (CUDA only, else 0)."""

    case: StepCase
    precision: Precision
    first_seconds: float  # the first pass, compilation included
    seconds: float
    host_seconds: float  # to queue a pass (CUDA only, else 0)
    optimizer_seconds: float  # from an idle device
    optimizer_floor: float  # 28 bytes per parameter at the rate of a plain copy in the same run
    rate: float
    matmul_rate: float
    ratio: float  # of a turn's `rate` to its `matmul_rate`
    recomputed: float  # operations of a pass that come on top with gradient checkpointing, not in `rate`
    peak_memory: int
    gradient_error: float  # worst relative error of a gradient against float64, at the small shape
    bf16: Bf16Twin | None = None  # of a step in fp8

    def line(self) -> str:
        peak = f", peak {self.peak_memory / 2**30:.1f} GiB" if self.peak_memory else ""
        host = f", host {self.host_seconds * 1e3:.1f} ms" if self.host_seconds else ""
        plain = "bf16" if self.precision == "fp8" else self.precision
        return (
            f"{self.case.name}, {self.precision}: {self.seconds * 1e3:.1f} ms in a row{host}, "
            f"{self.rate / 1e12:.2f} TFLOP/s = {self.ratio:.0%} of a plain {plain} matrix product's {self.matmul_rate / 1e12:.2f} by turns"
            f"{self._with_recomputation()}; first pass {self.first_seconds:.1f} s{peak}; "
            f"optimizer {self.optimizer_seconds * 1e3:.1f} ms = {self.optimizer_seconds / self.optimizer_floor:.2f} × its memory floor; "
            f"worst gradient error against float64 at a small shape {self.gradient_error:.1e}"
            f"{'' if self.bf16 is None else self.bf16.text()}"
        )

    def _with_recomputation(self) -> str:
        if not self.recomputed:
            return ""
        more = 1 + self.recomputed / self.case.operations()
        return f", {self.rate * more / 1e12:.2f} TFLOP/s = {self.ratio * more:.0%} with what gradient checkpointing computes again"


def bench_cases(names: Iterable[str], device: str, repeats: int, precision: Precision = "auto") -> Iterator[StepResult]:
    """Measure the named cases one after the other. Raises `ConfigError`, before any is measured, for an unknown one, no GPU or one without fp8."""
    names = list(names)
    for name in names:
        if name not in CASES:
            raise ConfigError(f"there is no case {name!r}", f"one of {', '.join(CASES)}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here that PyTorch can use", "--device cpu")
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    check_device(torch.device(device), precision)
    for name in names:
        yield bench_step(CASES[name], torch.device(device), precision, repeats=repeats)


def bench_step(case: StepCase, device: torch.device, precision: Precision, *, repeats: int) -> StepResult:
    """Measure one case on `device`; `precision` is not auto."""
    fp8, dtype = precision == "fp8", torch.float32 if precision == "fp32" else torch.bfloat16
    error = gradient_error(CASES["tiny"], device, dtype, fp8)
    model, objective = build(case, device, dtype, fp8)
    if device.type == "cuda":
        model.compile_layers()
        torch.cuda.reset_peak_memory_stats(device)
    batches = [make_batch(case, device, dtype, seed) for seed in range(4)]
    passes = _passes(model, objective, batches)
    first = timed(passes, device)
    passes()
    peak = (
        torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    )  # before the plain product's operands
    product, operations = plain_product(device, dtype)
    turns = by_turns((passes, product), device, repeats)
    seconds, of_product = _medians(turns)
    host = statistics.median(queued(passes, device) for _ in range(5)) if device.type == "cuda" else 0.0
    rate, matmul = case.operations() / seconds, operations / of_product
    ratio = statistics.median(case.operations() / of_pass / (operations / alone) for of_pass, alone in turns)
    updating = _optimizer_seconds(model, objective, batches, device)
    floor = _OPTIMIZER_BYTES * sum(p.numel() for p in model.parameters()) / copy_rate(device)
    twin = _bf16_twin(case, device, passes, batches, repeats, matmul) if fp8 else None
    return StepResult(
        case=case,
        precision=precision,
        first_seconds=first,
        seconds=seconds,
        host_seconds=host,
        optimizer_seconds=updating,
        optimizer_floor=floor,
        rate=rate,
        matmul_rate=matmul,
        ratio=ratio,
        recomputed=case.recomputed(whole=model.compiled or fp8),
        peak_memory=peak,
        gradient_error=error,
        bf16=twin,
    )


def gradient_error(case: StepCase, device: torch.device, dtype: torch.dtype, fp8: bool = False) -> float:
    """The worst relative error (norm over norm) of a parameter's gradient in `dtype`, or with products in fp8, against the same weights in float64
    on the CPU.
    """
    model, objective = build(case, device, dtype, fp8)
    exact = DraftModel(case.shape()).double()
    exact.load_state_dict({name: tensor.double().cpu() for name, tensor in model.state_dict().items()})
    cpu = torch.device("cpu")
    embedding, head = objective.embedding.double().cpu(), objective.head.double().cpu()
    twin = Objective.of(case.shape(), embedding, head, TrainConfig(steps=1), cpu, torch.float64)
    batch = make_batch(case, device, dtype, seed=99)
    on_cpu = MicroBatch(
        batch.features.double().cpu(), batch.positions.cpu(), batch.documents.cpu(), batch.blocks.to(cpu), batch.tokens
    )
    arithmetic.round_anew(model, objective, 0, 0)
    objective.loss(model, batch).total.backward()
    twin.loss(exact, on_cpu).total.backward()
    errors = []
    for name, parameter in exact.named_parameters():
        found = model.get_parameter(name).grad
        if found is None or parameter.grad is None:
            raise RuntimeError(f"{name} has no gradient")
        errors.append(float((found.double().cpu() - parameter.grad).norm() / parameter.grad.norm()))
    return max(errors)


def build(case: StepCase, device: torch.device, dtype: torch.dtype, fp8: bool = False) -> tuple[DraftModel, Objective]:
    """A drafter with random weights and the frozen side, on `device`."""
    generator = torch.Generator(device).manual_seed(1)
    with device:
        model = DraftModel(case.shape(), gradient_checkpointing=case.gradient_checkpointing, fp8=fp8).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.02, generator=generator)
    size = (case.vocab_size, case.hidden_size)
    embedding = torch.empty(size, device=device, dtype=dtype).normal_(generator=generator)
    head = torch.empty(size, device=device, dtype=dtype).normal_(std=0.02, generator=generator)
    options = TrainConfig(steps=1, precision="fp8" if fp8 else "auto")
    return model, Objective.of(case.shape(), embedding, head, options, device, dtype)


def make_batch(case: StepCase, device: torch.device, dtype: torch.dtype, seed: int) -> MicroBatch:
    """Fresh random rows: two documents each, the last tokens padding, everything else supervised."""
    random = torch.Generator().manual_seed(seed)
    rows = [_random_row(case, random) for _ in range(case.rows)]
    blocks = make_blocks(
        rows,
        [seed * case.rows + i for i in range(case.rows)],
        seed=0,
        anchors_per_row=case.anchors,
        block_size=case.block_size,
        mask_token_id=case.vocab_size - 1,
    )
    on_device = torch.Generator(device).manual_seed(seed)
    features = torch.empty(
        (case.rows, case.row_tokens, case.taps * case.hidden_size), device=device, dtype=dtype
    ).normal_(generator=on_device)
    positions, documents = (
        torch.stack([getattr(row, name) for row in rows]).to(device) for name in ("position_ids", "document_ids")
    )
    return MicroBatch(features, positions, documents, blocks.to(device), case.rows * case.row_tokens)


def _passes(model: DraftModel, objective: Objective, batches: list[MicroBatch]) -> Callable[[], None]:
    """What makes one pass, over the next of `batches`."""
    following, steps = itertools.cycle(batches), itertools.count()

    def one() -> None:
        model.zero_grad(set_to_none=True)
        arithmetic.round_anew(model, objective, 0, next(steps))
        objective.loss(model, next(following)).total.backward()

    return one


def _medians(turns: list[tuple[float, ...]]) -> tuple[float, float]:
    first, second = (statistics.median(each) for each in zip(*turns, strict=True))
    return first, second


def _bf16_twin(
    case: StepCase,
    device: torch.device,
    in_fp8: Callable[[], None],
    batches: list[MicroBatch],
    repeats: int,
    bf16_rate: float,
) -> Bf16Twin:
    """The passes `in_fp8` and the same in bf16, by turns."""
    model, objective = build(case, device, torch.bfloat16)
    if device.type == "cuda":
        model.compile_layers()
    in_bf16 = _passes(model, objective, batches)
    for _ in range(2):
        in_fp8()
        in_bf16()
    turns = by_turns((in_bf16, in_fp8), device, repeats)
    ratio = statistics.median(bf16 / fp8 for bf16, fp8 in turns)
    error = gradient_error(CASES["tiny"], device, torch.bfloat16)
    products = measure_products(device)
    return Bf16Twin(_medians(turns)[0], ratio, error, products, case.fp8_floor(products, bf16_rate))


def _random_row(case: StepCase, random: torch.Generator) -> RowTensors:
    tokens = case.row_tokens
    padding = int(torch.randint(0, tokens // 16 + 1, (), generator=random))
    cut = int(torch.randint(tokens // 4, tokens // 2, (), generator=random))
    lengths = (cut, tokens - padding - cut, padding)
    positions = torch.cat([torch.arange(length) for length in lengths]).int()
    documents = torch.repeat_interleave(torch.tensor([1, 2, 0]), torch.tensor(lengths)).int()
    ids = torch.randint(0, case.vocab_size - 1, (tokens,), generator=random).int()
    return RowTensors(torch.empty(0), ids, positions, documents, (documents > 0).to(torch.uint8))


def _optimizer_seconds(
    model: DraftModel, objective: Objective, batches: list[MicroBatch], device: torch.device
) -> float:
    """Of an update from an idle device. Gradients stay where they are, as in training."""
    optimizer = MasterAdamW(model.named_parameters(), TrainConfig(steps=1))
    times = []
    for number in range(8):
        objective.loss(model, batches[number % len(batches)]).total.backward()
        times.append(timed(lambda: optimizer.step(1e-4, 1.0), device))
    return statistics.median(times[2:])
