"""Answers here: what the host does while the device writes, and how far it looks ahead."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.config import TargetConfig
from dflash_mp.decode.sampling import GREEDY
from dflash_mp.regenerate import local
from dflash_mp.regenerate.choice import AnswerOptions
from dflash_mp.regenerate.conversations import Conversation
from dflash_mp.regenerate.local import LocalOptions, answer_here
from dflash_mp.regenerate.slots import SlotOptions, Slots, Text
from dflash_mp.target.load import load_target

SLOTS, NEW, ASKED = 32, 9, 120


def test_the_device_has_its_next_steps_before_the_host_turns_to_what_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_target(tmp_path, layers=2)
    target = load_target(TargetConfig(path=str(tmp_path), device="cpu", taps=1))
    events: list[tuple[str, int]] = []  # what happened, and how many conversations had been read by then, or had ended
    checked: list[int] = []
    filled: list[list[int]] = []
    read = 0

    def conversations() -> Iterator[Conversation]:
        nonlocal read
        for index in range(ASKED):
            read += 1
            text = f"{index}" + "?" * (index % 7)
            yield Conversation(index, f"{index}", (({"role": "user", "content": text},),))

    fill, advance, take, answers = Slots.fill, Slots.advance, Slots.take, local._Reader.answers

    def noted_fill(self: Slots, slots: list[int], prompts: list[list[int]], numbers: list[Any]) -> None:
        filled.append([len(prompt) for prompt in prompts])
        fill(self, slots, prompts, numbers)

    def noted_advance(self: Slots, steps: int) -> None:
        events.append(("advance", read))
        advance(self, steps)

    def noted_take(self: Slots) -> list[Text]:
        found = take(self)
        events.append(("take", len(found)))
        return found

    def noted_answers(self: local._Reader, texts: list[Text]) -> list[str]:
        if texts:
            events.append(("answers", read))
        return answers(self, texts)

    monkeypatch.setattr(Slots, "fill", noted_fill)
    monkeypatch.setattr(Slots, "advance", noted_advance)
    monkeypatch.setattr(Slots, "self_check", lambda self, prompt: checked.append(len(prompt)))
    monkeypatch.setattr(Slots, "take", noted_take)
    monkeypatch.setattr(local._Reader, "answers", noted_answers)
    options = LocalOptions(SlotOptions(SLOTS, NEW, (), GREEDY), AnswerOptions(NEW, GREEDY), 100)
    notices: list[str] = []
    found = [answered for some in answer_here(conversations(), target, options, notices.append) for answered in some]
    assert sorted(answered.conversation.index for answered in found) == list(range(ASKED))
    assert notices == ["attention of new tokens: grouped heads over all places"]
    last = max(place for place, (kind, _) in enumerate(events) if kind == "answers")
    before = [events[place - 1][0] for place, (kind, _) in enumerate(events[:last]) if kind == "answers"]
    assert len(before) > 2
    assert set(before) == {"advance"}  # and not the wait for what ended
    few = SLOTS // 32  # conversations are read in the meantime, not all at the beginning
    assert [count for kind, count in events if kind == "advance"][:3] == [SLOTS, SLOTS + few, SLOTS + 2 * few]
    ended = [count for kind, count in events if kind == "take"]
    seen = [count for kind, count in events if kind == "advance"]
    for at, (earlier, later) in enumerate(
        pairwise(seen)
    ):  # the device is never kept waiting for much more than what ended
        assert later - earlier <= max(few, math.ceil(1.25 * ended[at + 1]))
    assert checked == [max(filled[0])]
    assert checked != [min(filled[0])]
