"""A target's layers split over processes: each holds its share of the heads and of the MLPs, and their results are summed twice a layer.

Which matrices are split by rows and which by columns is what the model's own tensor-parallel plan in transformers says; a plan that
asks for more than that (experts, packed matrices) is a `TargetError`, as are heads that don't divide. Embedding, norms and head are whole in
each process. `load_split` proves a share on a short text: its features are those of the unsplit model. All processes of a group must run
the same passes in the same order. Costs the unsplit model in each process's main memory while it loads.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dflash_mp.config import TargetConfig
from dflash_mp.data.row import TokenRow
from dflash_mp.errors import TargetError
from dflash_mp.target.agreement import TOLERANCE, vector_error
from dflash_mp.target.capture import Capture
from dflash_mp.target.families import Anatomy, attention_shape, dissect
from dflash_mp.target.load import Target, load_target
from dflash_mp.target.model import target_dtype

_PROOF_TOKENS = 32
GROUP_SECONDS = 600.0  # longest wait for another process of the group: one may compile or load meanwhile


@dataclass(frozen=True)
class Share:
    """Process `rank` of `ways`, on `device`."""

    rank: int
    ways: int
    device: torch.device


class SummedLinear(nn.Module):
    """A linear layer of which each process has some columns; gives the sum over all processes, and the bias once."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, self.weight)
        dist.all_reduce(out)
        return out if self.bias is None else out + self.bias


def join_group(share: Share, port: int, store: dist.Store | None = None) -> None:
    """Meet the other processes of this machine at `port`; `store`: the first one's, which listens there. Waits `GROUP_SECONDS` at most."""
    patience = timedelta(seconds=GROUP_SECONDS)
    if share.device.type == "cuda":
        torch.cuda.set_device(share.device)
    dist.init_process_group(
        "nccl" if share.device.type == "cuda" else "gloo",
        store=store or dist.TCPStore("127.0.0.1", port, share.ways, timeout=patience),
        rank=share.rank,
        world_size=share.ways,
        timeout=patience,
        device_id=share.device if share.device.type == "cuda" else None,
    )


def load_split(
    config: TargetConfig, share: Share, row: TokenRow, load: Callable[[TargetConfig], Target] = load_target
) -> Target:
    """This process's share of the target that `config` names, on its device. All processes of the group call it with the same `row`.

    Raises `TargetError` if the model can't be split, or if its share doesn't give the unsplit model's features.
    """
    if config.attention == "flash_attention_2":
        raise TargetError(
            "a target that several processes share can't have flash_attention_2: it is loaded, and proved, on the CPU first",
            "set target.attention: auto, or feed.tensor_parallel: 1",
        )
    dtype = str(target_dtype(config.dtype, share.device)).removeprefix("torch.")
    whole = load(config.model_copy(update={"device": "cpu", "dtype": dtype}))
    if whole.anatomy is None:
        raise RuntimeError("a target that was just loaded is whole")
    check_plan(whole.anatomy, share.ways, whole.info.name)
    few = slice(_PROOF_TOKENS)
    short = TokenRow(row.input_ids[few], row.position_ids[few], row.document_ids[few], row.loss_mask[few])
    want = _features(whole, short) if share.rank == 0 else None
    target = split(whole, share)
    got = _features(target, short)
    if want is not None:
        error, tolerance = vector_error(got.cpu(), want), TOLERANCE[want.dtype]
        if not error <= tolerance:
            raise TargetError(
                f"{target.info.name}: split over {share.ways} processes its features differ from the unsplit model's "
                f"by {error:.2g} of a token's vector (allowed {tolerance:g})",
                "set feed.tensor_parallel: 1",
            )
    return target


def split(target: Target, share: Share) -> Target:
    """`target`, whose layers keep this process's share only, moved to its device. What `target` holds is changed."""
    anatomy = target.anatomy
    if anatomy is None or target.model is None:
        raise RuntimeError("this target was cut by a capture")
    check_plan(anatomy, share.ways, target.info.name)
    for name, style in _styles(anatomy).items():
        parent = anatomy.decoder.get_submodule(name.rpartition(".")[0])
        _split_linear(parent, name.rpartition(".")[2], style, share)
    model = target.model.to(share.device)
    anatomy = dissect(model, target.info.name)
    return replace(
        target,
        model=model,
        device=anatomy.embedding.device,
        embedding=anatomy.embedding.detach(),
        head=anatomy.head.detach(),
        anatomy=anatomy,
        ways=share.ways,
    )


def check_plan(anatomy: Anatomy, ways: int, name: str) -> None:
    """Raise `TargetError` if the model can't be split so many ways."""
    remedy = "set feed.tensor_parallel: 1, or use another target"
    plan = _plan(anatomy)
    if not any(style in ("colwise", "rowwise") for style in plan.values()):
        raise TargetError(f"{name}: transformers has no tensor-parallel plan for this model", remedy)
    for pattern, style in plan.items():
        if style not in ("colwise", "rowwise") and not style.startswith("replicated"):
            raise TargetError(f"{name}: its tensor-parallel plan says {style} for {pattern}", remedy)
    heads, kv_heads, _ = attention_shape(anatomy.config)
    for what, count in (("heads", heads), ("key/value heads", kv_heads)):
        if count % ways:
            raise TargetError(f"{name}: its {count} {what} don't divide by {ways}", remedy)
    for module_name, style in _styles(anatomy).items():
        module = anatomy.decoder.get_submodule(module_name)
        if not isinstance(module, nn.Linear):
            raise TargetError(f"{name}: {module_name} is {type(module).__name__}, not a plain linear layer", remedy)
        size = module.out_features if style == "colwise" else module.in_features
        if size % ways:
            raise TargetError(f"{name}: the {size} values of {module_name} don't divide by {ways}", remedy)


def _plan(anatomy: Anatomy) -> dict[str, str]:
    plan: Any = getattr(anatomy.config, "base_model_tp_plan", None)
    return dict(plan or {})


def _styles(anatomy: Anatomy) -> dict[str, str]:
    """Names of the decoder's modules that are split, and how."""
    plan = {pattern: style for pattern, style in _plan(anatomy).items() if style in ("colwise", "rowwise")}
    return {
        name: style
        for name, _ in anatomy.decoder.named_modules()
        for pattern, style in plan.items()
        if fnmatch.fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")
    }


def _split_linear(parent: nn.Module, name: str, style: str, share: Share) -> None:
    linear: Any = getattr(parent, name)
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()

    def part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(share.ways, dim)[share.rank].clone()

    if style == "rowwise":
        setattr(parent, name, SummedLinear(part(weight, 1), bias))
        return
    linear.weight = nn.Parameter(part(weight, 0), requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(part(bias, 0), requires_grad=False)
    linear.out_features = len(linear.weight)


def _features(target: Target, row: TokenRow) -> torch.Tensor:
    shape = (len(row.input_ids), target.info.feature_width)
    out = torch.empty(shape, dtype=target.embedding.dtype, device=target.device)
    Capture(target, keep_target=True).capture(row, out)
    return out
