"""RMS norms by PyTorch's operation: only where it gives what the model's own modules give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from dflash_mp.bench.tiny import Family, write_tiny_target
from dflash_mp.config import TargetConfig
from dflash_mp.regenerate.norms import fusable, fused
from dflash_mp.target.load import load_target


@pytest.mark.parametrize(("family", "count"), [("llama", 9), ("qwen3", 17), ("gemma2", 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_are_replaced_where_they_agree_and_given_back(
    family: Family, count: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_target(tmp_path, family=family, layers=4)
    target = load_target(
        TargetConfig.model_validate({"path": str(tmp_path), "taps": 1, "dtype": dtype, "device": "cpu"})
    )
    assert target.anatomy is not None
    norms = fusable(target.anatomy.decoder)
    assert len(norms) == count  # gemma's adds one to its weight
    calls: list[torch.Size] = []
    plain = functional.rms_norm
    monkeypatch.setattr(functional, "rms_norm", lambda x, *more: (calls.append(x.shape), plain(x, *more))[1])
    ids = torch.arange(40)[None]
    own = target.model(ids).logits
    assert not calls
    with fused(norms):
        mine = target.model(ids).logits
    assert len(calls) == count
    assert float((mine - own).float().norm() / own.float().norm()) < (1e-5 if dtype == "float32" else 3e-2)
    assert torch.equal(target.model(ids).logits, own)
    assert len(calls) == count
