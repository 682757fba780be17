"""Many texts side by side: each is written as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slot_runs import LENGTHS, NEW, prompts, write
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.config import TargetConfig
from dflash_mp.decode.sampling import GREEDY, Sampling
from dflash_mp.errors import TargetError
from dflash_mp.regenerate.choice import choose, uniforms
from dflash_mp.regenerate.slot_cache import SlotMasks
from dflash_mp.regenerate.slots import SlotOptions, Slots
from dflash_mp.target.load import Target, load_target


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    """Loads tiny targets by family, each once."""
    loaded: dict[str, Target] = {}

    def get(family: str) -> Target:
        if family not in loaded:
            path = tmp_path_factory.mktemp(family)
            write_tiny_target(path, family=family)  # type: ignore[arg-type]
            loaded[family] = load_target(TargetConfig(path=str(path), device="cpu", taps=1))
        return loaded[family]

    return get


@pytest.mark.parametrize(
    ("family", "own_forward"),
    [(family, False) for family in ("qwen3", "qwen2", "llama", "mistral", "gemma2")]
    + [("llama", True), ("mistral", True)],
)
def test_greedy_answers_are_those_of_the_librarys_own_generation(
    family: str, own_forward: bool, load: Callable[[str], Target]
) -> None:
    target = load(family)
    for prompt, (tokens, stopped) in zip(prompts(), write(target, 3, own_forward=own_forward), strict=True):
        ids = torch.tensor([prompt])
        own = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        assert tokens == own[0, len(prompt) :].tolist()
        assert not stopped


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, top_p=0.9), Sampling(1.0, top_k=20)])
def test_an_answer_does_not_depend_on_its_neighbours(sampling: Sampling, load: Callable[[str], Target]) -> None:
    alone = write(load("qwen3"), 1, sampling)
    assert write(load("qwen3"), 3, sampling) == alone
    assert write(load("qwen3"), 3, sampling, own_forward=True) == alone
    assert write(load("qwen3"), len(LENGTHS) + 2, sampling) == alone


def test_an_answer_ends_with_the_first_stop_token(load: Callable[[str], Target]) -> None:
    whole = [tokens for tokens, _ in write(load("qwen3"), 4)]
    stop = whole[2][6]
    for tokens, (cut, stopped) in zip(whole, write(load("qwen3"), 4, stops=(stop, 255)), strict=True):
        places = [place for place, token in enumerate(tokens) if token in (stop, 255)]
        assert cut == (tokens[: places[0] + 1] if places else tokens)
        assert stopped == bool(places)


class _NoWaiting(TorchDispatchMode):
    """Fails at what would make the host wait for a GPU, and could not be recorded in a CUDA graph."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket._qualified_op_name not in (
            "aten::_local_scalar_dense",
            "aten::nonzero",
            "aten::masked_select",
            "aten::equal",
            "aten::unique_dim",
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_step_never_waits_for_the_device(family: str, load: Callable[[str], Target]) -> None:
    engine = Slots(load(family), SlotOptions(2, NEW, (7,), Sampling(0.7, top_p=0.9)), print)
    engine.fill([0, 1], [[1, 2, 3], [4]], [uniforms(0, n, 0, NEW) for n in (0, 1)])
    with _NoWaiting():
        engine.advance(3)


def test_the_self_check_passes_and_sees_a_wrong_mask(
    load: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SlotOptions(3, NEW, (), GREEDY)
    for family in ("qwen3", "gemma2"):
        Slots(load(family), options, print).self_check(prompts()[3])
        Slots(load(family), options, print).self_check([5])
    right = SlotMasks.of_tokens
    far = lambda self, positions, width: right(self, positions - (positions > 100).long(), width)  # noqa: E731
    monkeypatch.setattr(SlotMasks, "of_tokens", far)
    with pytest.raises(TargetError, match="failed its self-check"):  # what is wrong for later places only
        Slots(load("qwen3"), options, print).self_check(prompts()[6])
    monkeypatch.setattr(SlotMasks, "of_tokens", lambda self, positions, width: right(self, positions - 1, width))
    with pytest.raises(TargetError, match="failed its self-check"):
        Slots(load("qwen3"), options, print).self_check(prompts()[3])


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_bfloat16_target_passes_its_self_check_as_it_is(family: str, tmp_path: Path) -> None:
    write_tiny_target(tmp_path, family=family)  # type: ignore[arg-type]
    config = {"path": str(tmp_path), "device": "cpu", "dtype": "bfloat16", "taps": 1}
    engine = Slots(load_target(TargetConfig.model_validate(config)), SlotOptions(3, NEW, (), GREEDY), pytest.fail)
    engine.self_check(prompts()[3])
    assert engine.attention == "grouped heads over all places"


def test_attention_that_fails_the_self_check_gives_way_to_the_models_own(
    load: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    engine = Slots(load("llama"), SlotOptions(3, NEW, (), GREEDY), notices.append)
    engine.self_check(prompts()[3])
    assert (engine.attention, notices) == ("grouped heads over all places", [])
    plainly = ALL_ATTENTION_FUNCTIONS["dflash_plain"]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping,
        "dflash_plain",
        lambda module, query, *rest, **more: plainly(module, query + 1, *rest, **more),
    )
    engine.self_check(prompts()[3])
    assert engine.attention == "the model's own, sdpa"
    assert len(notices) == 1
    assert "its logits differed by" in notices[0]


@pytest.mark.parametrize("at", ["prompts", "tokens"])
def test_attention_that_cannot_run_gives_way_and_leaves_nothing_behind(
    at: str, load: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    plainly = ALL_ATTENTION_FUNCTIONS["dflash_plain"]

    def broken(module: Any, query: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if (query.shape[2] == 1) == (at == "tokens"):
            raise KeyError("out of resource: shared memory")
        return plainly(module, query, *rest, **more)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "dflash_plain", broken)
    notices: list[str] = []
    engine = Slots(load("llama"), SlotOptions(3, NEW, (), GREEDY), notices.append)
    engine.self_check(prompts()[3])
    assert engine.attention == "the model's own, sdpa"
    assert len(notices) == 1
    assert "KeyError: 'out of resource: shared memory'" in notices[0]
    assert not engine._live.any()
    engine.fill([2], [prompts()[3]], [])
    engine.advance(NEW)
    assert [text.tokens for text in engine.take()] == [write(load("llama"), 1, own_forward=True)[3][0]]


def test_norms_that_fail_the_self_check_give_way_to_the_models_own(
    load: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    engine = Slots(load("llama"), SlotOptions(3, NEW, (), GREEDY), notices.append)
    plain = functional.rms_norm
    monkeypatch.setattr(functional, "rms_norm", lambda x, *more: plain(x, *more) + 1)
    engine.self_check(prompts()[3])
    assert len(notices) == 1
    assert "and fused norms its logits differed by" in notices[0]


def test_the_self_check_reads_a_few_hundred_tokens_at_most(
    load: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Slots(load("llama"), SlotOptions(1, NEW, (), GREEDY), print)
    lengths: list[int] = []
    model = engine._target.model.forward
    monkeypatch.setattr(
        engine._target.model,
        "forward",
        lambda input_ids, **more: (lengths.append(input_ids.shape[1]), model(input_ids=input_ids, **more))[1],
    )
    engine.self_check([n % 200 for n in range(1000)])
    assert lengths == [640, 640, 1, 1, 1, 1]


def test_a_model_that_keeps_its_own_attention_says_what_that_costs(load: Callable[[str], Target]) -> None:
    notices: list[str] = []
    engine = Slots(load("gemma2"), SlotOptions(3, NEW, (), GREEDY), notices.append)
    assert engine.attention == "the model's own, eager"
    assert len(notices) == 1
    assert "its attention is eager" in notices[0]
    assert "all places up to the longest one's are read, and perhaps copied 3 times" in notices[0]
    Slots(load("gemma2"), SlotOptions(3, NEW, (), GREEDY, own_forward=True), pytest.fail)


def test_the_models_attention_is_its_own_again_after_each_step(load: Callable[[str], Target]) -> None:
    target = load("llama")
    assert target.anatomy is not None
    ids = torch.arange(20)[None]
    before = target.model(ids).logits
    write(target, 3)
    assert target.anatomy.config._attn_implementation == "sdpa"
    assert torch.equal(target.model(ids).logits, before)


def test_flash_attention_is_refused_with_a_way_out(
    load: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load("qwen3")
    assert target.anatomy is not None
    monkeypatch.setattr(target.anatomy.config, "_attn_implementation", "flash_attention_2")
    with pytest.raises(TargetError, match="--server"):
        Slots(target, SlotOptions(1, NEW, (), GREEDY), print)


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.6, top_p=0.8), Sampling(1.3, top_k=5), Sampling(0.9, top_p=0.7, top_k=9)]
)
def test_tokens_are_chosen_as_often_as_their_probability_says(sampling: Sampling) -> None:
    count = 4000
    logits = 2 * torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    chosen = choose(logits.expand(count, -1), sampling, numbers)
    frequency = torch.bincount(chosen, minlength=50) / count
    torch.testing.assert_close(frequency, sampling.probabilities(logits)[0], atol=1.5 / count, rtol=0)


def test_random_numbers_belong_to_one_answer() -> None:
    one = uniforms(5, 17, 0, 8)
    assert (uniforms(5, 17, 0, 8) == one).all()
    assert (uniforms(5, 17, 0, 12)[:8] == one).all()
    for other in (uniforms(6, 17, 0, 8), uniforms(5, 18, 0, 8), uniforms(5, 17, 1, 8)):
        assert not (other == one).any()


def test_longer_prompts_later_find_room(tmp_path: Path, load: Callable[[str], Target]) -> None:
    engine = Slots(load("llama"), SlotOptions(2, 150, (), GREEDY), print)
    engine.fill([0], [[1, 2, 3]], [uniforms(0, 0, 0, 150)])
    engine.advance(20)
    engine.fill([1], [list(range(200)) * 2], [uniforms(0, 1, 0, 150)])
    engine.advance(130)
    first = engine.take()
    assert [text.slot for text in first] == [0]
    alone = Slots(load("llama"), SlotOptions(1, 150, (), GREEDY), print)
    alone.fill([0], [[1, 2, 3]], [uniforms(0, 0, 0, 150)])
    alone.advance(150)
    assert alone.take()[0].tokens == first[0].tokens


def test_a_larger_cache_has_recordings_of_its_own(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[str], Target]
) -> None:
    engine = Slots(load("llama"), SlotOptions(2, 8, (), GREEDY), print)
    forgotten: list[int] = []
    monkeypatch.setattr(engine, "_steps", SimpleNamespace(forget=lambda: forgotten.append(engine._cache.capacity)))
    engine.fill([0], [list(range(200))], [uniforms(0, 0, 0, 8)])
    assert forgotten == [128]
    engine.fill([1], [[1, 2, 3]], [uniforms(0, 0, 0, 8)])
    assert forgotten == [128]


def test_steps_that_write_nothing_are_an_error_not_a_wait(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[str], Target]
) -> None:
    engine = Slots(load("llama"), SlotOptions(2, 8, (), GREEDY), print)
    engine.fill([1], [[1, 2, 3]], [])
    monkeypatch.setattr(engine, "_write", lambda width: None)
    engine.advance(7)
    assert engine.take() == []
    engine.advance(1)
    with pytest.raises(TargetError, match="--no-cuda-graphs"):
        engine.take()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_ordered_as_it_is(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 600, generator=draw).to(dtype)  # with many ties
    numbers = torch.rand(300, generator=draw, dtype=torch.float64)
    for sampling in (Sampling(0.9), Sampling(0.9, top_p=0.8)):
        assert torch.equal(choose(logits, sampling, numbers), choose(logits.float(), sampling, numbers))
