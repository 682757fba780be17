"""What is left of a CUDA graph whose recording fails, and which models are not recorded at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflash_mp.target.recorded import end_failed_recording, waiting_rotary


@pytest.mark.parametrize("under_way", [True, False])
def test_memory_of_a_recording_is_given_up_once_by_whoever_ends_it(
    monkeypatch: pytest.MonkeyPatch, under_way: bool
) -> None:
    calls: list[Any] = []

    def end(*arguments: Any) -> None:
        calls.append(("end", *arguments))
        if not under_way:
            raise RuntimeError("not currently recording")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *given: calls.append(("release", *given)), raising=False)
    end_failed_recording((0, 7), torch.device("cuda", 1))
    assert calls == [("end", 1, (0, 7)), *([("release", 1, (0, 7))] if under_way else [])]


@pytest.mark.parametrize(("kind", "waits"), [("dynamic", True), ("linear", False)])
def test_rotary_embeddings_that_ask_for_the_highest_position_are_known(kind: str, waits: bool) -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=64)
    config.rope_parameters = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    holder = torch.nn.ModuleList([torch.nn.Identity(), LlamaRotaryEmbedding(config)])
    assert waiting_rotary(holder) == (kind if waits else None)


def test_rotary_embeddings_of_several_kinds_of_layers_are_looked_through() -> None:
    module = torch.nn.Identity()
    module.rope_type = {"full_attention": "longrope", "sliding_attention": "default"}  # type: ignore[assignment]
    assert waiting_rotary(module) == "longrope"
