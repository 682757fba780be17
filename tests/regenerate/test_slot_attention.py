"""Attention of one token per slot: the kernel and its twin, on places that are poisoned wherever a slot must not look."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from slot_runs import write

from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.config import TargetConfig
from dflash_mp.regenerate import slot_attention, slots
from dflash_mp.regenerate.slot_attention import Way, attend, attend_plainly, head_sizes, seen_in, way_of
from dflash_mp.regenerate.slot_cache import SlotMasks
from dflash_mp.target.load import load_target


@dataclass(frozen=True)
class Case:
    slots: int
    heads: int
    kv_heads: int
    size: int
    value_size: int
    places: int


CASES = (
    Case(5, 9, 3, 64, 64, 200),  # a group of three
    Case(3, 4, 4, 32, 32, 64),  # no groups
    Case(2, 20, 1, 48, 80, 130),  # more heads than a tile has rows; sizes that are no powers of two
    Case(2, 4, 2, 192, 128, 65),
)


@dataclass(frozen=True)
class Material:
    """As the model hands it over: the query a transposed view, keys and values the beginning of a longer cache."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    spans: torch.Tensor

    @staticmethod
    def of(case: Case, device: str, dtype: torch.dtype, seed: int) -> Material:
        draw = torch.Generator().manual_seed(seed)
        query = torch.randn(case.slots, 1, case.heads, case.size, generator=draw).to(device, dtype).transpose(1, 2)
        shape = (case.slots, case.kv_heads, case.places + 60)
        keys, values = (
            torch.randn(*shape, size, generator=draw).to(device, dtype) for size in (case.size, case.value_size)
        )
        last = torch.randint(0, case.places, (case.slots,), generator=draw)
        first = (last * torch.rand(case.slots, generator=draw)).long()
        last[0], first[0] = case.places - 1, 0
        last[1], first[1] = 0, 0
        spans = torch.stack((first, last), -1)[:, None, None].contiguous().to(device)
        return Material(query, keys[:, :, : case.places], values[:, :, : case.places], spans)

    def poisoned(self) -> Material:
        """With NaN at each place outside a slot's span."""
        keys, values = self.keys.clone(), self.values.clone()
        for slot, (first, last) in enumerate(self.spans.flatten(1).tolist()):
            for places in (keys[slot], values[slot]):
                places[:, :first], places[:, last + 1 :] = float("nan"), float("nan")
        return Material(self.query, keys, values, self.spans)

    def slow(self) -> torch.Tensor:
        """One head of one slot after the other, in float64."""
        slots, heads, _, size = self.query.shape
        rows = []
        for slot, (first, last) in enumerate(self.spans.flatten(1).tolist()):
            for head in range(heads):
                of = head // (heads // self.keys.shape[1])
                keys, values = (t[slot, of, first : last + 1].double() for t in (self.keys, self.values))
                rows.append((keys @ self.query[slot, head, 0].double() / size**0.5).softmax(0) @ values)
        return torch.stack(rows).view(slots, 1, heads, -1)


def compare(device: str) -> None:
    """The kernel against the slow twin. The interpreter multiplies no bfloat16."""
    half, coarse = (torch.bfloat16, 3e-2) if device == "cuda" else (torch.float16, 4e-3)
    for seed, case in enumerate(CASES):
        for dtype, tolerance in ((torch.float32, 1e-5), (half, coarse)):
            material = Material.of(case, device, dtype, seed)
            found = attend(*vars(material.poisoned()).values(), tile=64)
            torch.testing.assert_close(found.double(), material.slow(), atol=tolerance, rtol=tolerance)


def write_with_the_kernel(directory: Path) -> None:
    """A target whose layers see a window only: its answers with the kernel on the CPU, and with the twin."""
    write_tiny_target(directory, family="mistral", layers=2)
    target = load_target(TargetConfig(path=str(directory), device="cpu", taps=1))
    expected = write(target, 3)
    slots.way_of = lambda *_: Way("dflash_kernel")
    assert write(target, 3) == expected


@pytest.mark.parametrize("case", CASES)
def test_the_plain_way_looks_at_the_span_only(case: Case) -> None:
    material = Material.of(case, "cpu", torch.float32, 7)
    seen = seen_in(material.spans, case.places)
    found = attend_plainly(material.query, material.keys, material.values, seen)
    torch.testing.assert_close(found.double(), material.slow(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kinds", [None, ["full_attention", "sliding_attention"], ["full_attention"]])
@pytest.mark.parametrize("window", [None, 24])
def test_spans_say_what_masks_say(kinds: list[str] | None, window: int | None) -> None:
    config = SimpleNamespace(layer_types=kinds, sliding_window=window, _attn_implementation="sdpa")
    by_span, by_mask = (SlotMasks(config, "it", torch.float32, way) for way in ("dflash_kernel", "dflash_plain"))
    positions = torch.tensor([0, 1, 22, 23, 24, 25, 99])
    spans, masks = by_span.of_tokens(positions, 100), by_mask.of_tokens(positions, 100)
    assert isinstance(masks, dict) == (kinds is not None and len(kinds) == 2)
    for kind in masks if isinstance(masks, dict) else [None]:
        one, other = (of[kind] if kind else of for of in (spans, masks))
        assert one.is_contiguous()
        assert torch.equal(seen_in(one, 100), other)


def test_the_kernel_looks_at_the_span_only(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        compare("cuda")
        return
    pytest.importorskip("triton")  # then its interpreter runs the kernel here, in a process of its own
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def test_a_cpu_has_the_plain_way_and_says_so() -> None:
    assert way_of(torch.device("cpu"), torch.float32, 4, 2, 32, 32) == ("dflash_plain", "the device is cpu")


def test_keys_and_values_of_latent_attention_differ_in_size() -> None:
    assert head_sizes(SimpleNamespace(head_dim=48), 48) == (48, 48)
    latent = SimpleNamespace(head_dim=64, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert head_sizes(latent, 64) == (192, 128)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 192, 256])
def test_a_gpu_has_the_kernel_for_every_usual_head(dtype: torch.dtype, size: int) -> None:
    assert way_of(torch.device("cuda"), dtype, 8, 2, size, size) == ("dflash_kernel", "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_the_kernel_for_latent_attention_and_its_twin_is_not_cudnns(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[bool] = []

    def noted(*given: torch.Tensor) -> torch.Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend_plainly(*given)

    monkeypatch.setattr(slot_attention, "attend_plainly", noted)
    assert way_of(torch.device("cuda"), torch.bfloat16, 16, 16, 192, 128) == ("dflash_kernel", "")
    assert allowed == [False]


def _scalars_convert() -> None:
    """The interpreter of Triton 3.6 can't turn its scalars into numbers with numpy 2.4."""
    from triton.runtime import interpreter

    before = interpreter._patch_lang_tensor

    def patch(tensor: object, scope: interpreter._LangPatchScope) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


if __name__ == "__main__":
    _scalars_convert()
    compare("cpu")
    write_with_the_kernel(Path(sys.argv[1]))
