"""Which characters of a rendered conversation are the assistant's: found in the template's output for stand-ins, proved on the real text.

A chat template renders a conversation as fixed text around the contents of its messages. Rendering stand-ins (texts that occur
nowhere else) instead of the contents shows that fixed text and where each content goes: the *skeleton*, which depends on the roles
only and so is made once per sequence of roles. Every real rendering is then matched against it from the first character to the
last: contents may lose blanks at their ends, as templates trim them; anything else is no match, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"  # private-use characters: no template prints them
_STAND_IN = re.compile(f"{_OPEN}(\\d+)\\.(\\d+){_CLOSE}")
_THINK, _THINK_END = "<think>", "</think>"

Slot = tuple[int, int]  # number of the message, number of its part
Shape = tuple[int, str, str]  # number of the first message equal to it (assistants: its own), role, and one of:
PLAIN = "plain"  # the content as a whole
TAGGED = "tagged"  # content of the form <think>…</think>…: two parts
CLOSED = "closed"  # content of the form …</think>…, opened by the generation prompt: two parts
FIELD = "field"  # the reasoning in a key of its own: two parts


@dataclass(frozen=True)
class Span:
    """Characters that the target itself generates: `start` to `stop`, then the token `end_of_turn`, which begins at `stop`."""

    start: int
    stop: int
    end_of_turn: str


@dataclass(frozen=True)
class Turn:
    """An assistant's turn in a skeleton: its slots, and the fixed texts around them."""

    first: int  # its first slot
    last: int  # its last slot
    tail: int  # offset in the text after `last` where the end-of-turn token begins
    end_of_turn: str
    base: int  # offset in the text before `first` from which the prompts are compared
    prompts: tuple[str, ...]  # what the target is given there before it generates: one of these, the likeliest first
    bare: bool  # whether the answer may stand without the thinking that the first prompt begins, right after the fixed text


@dataclass(frozen=True)
class Skeleton:
    """`texts[0] slot[0] texts[1] slot[1] … texts[n]`, and the assistant's turns in it."""

    texts: tuple[str, ...]
    slots: tuple[Slot, ...]
    turns: tuple[Turn, ...]

    def spans(self, rendered: str, parts: Sequence[Sequence[str]]) -> list[Span] | None:
        """The assistant's spans of `rendered`, or None unless it is this skeleton filled with `parts` (by message and part)."""
        found = self._fill(rendered, parts)
        if found is None:
            return None
        spans = [self._span(turn, rendered, found) for turn in self.turns]
        return None if None in spans else [span for span in spans if span]

    def _span(self, turn: Turn, rendered: str, found: list[tuple[int, int]]) -> Span | None:
        begin, stop = found[turn.first][0], found[turn.last][1] + turn.tail
        base = begin - len(self.texts[turn.first]) + turn.base
        for prompt in turn.prompts:
            if rendered.startswith(prompt, base):
                return Span(base + len(prompt), stop, turn.end_of_turn)
        return Span(begin, stop, turn.end_of_turn) if turn.bare else None

    def _fill(self, rendered: str, parts: Sequence[Sequence[str]]) -> list[tuple[int, int]] | None:
        if not rendered.startswith(self.texts[0]):
            return None
        place, found = len(self.texts[0]), []
        for (message, part), following in zip(self.slots, self.texts[1:], strict=True):
            for content in _trimmings(parts[message][part]):
                end = place + len(content)
                if rendered.startswith(content, place) and rendered.startswith(following, end):
                    break
            else:
                return None
            found.append((place, end))
            place = end + len(following)
        return found if place == len(rendered) else None


def split_stand_ins(text: str) -> tuple[tuple[str, ...], tuple[Slot, ...]]:
    """The fixed texts (one more than slots) and the slots of a rendering of stand-ins."""
    pieces = _STAND_IN.split(text)
    slots = tuple((int(m), int(p)) for m, p in zip(pieces[1::3], pieces[2::3], strict=True))
    return tuple(pieces[0::3]), slots


def has_stand_ins(text: str) -> bool:
    """Whether `text` holds a character that marks a stand-in."""
    return _OPEN in text or _CLOSE in text


def stand_in(shape: Shape) -> Message:
    """A message with stand-ins for its parts."""
    number, role, form = shape
    first, second = (f"{_OPEN}{number}.{part}{_CLOSE}" for part in (0, 1))
    if form == FIELD:
        return {"role": role, REASONING_KEYS[0]: first, "content": second}
    if form == TAGGED:
        return {"role": role, "content": f"{_THINK}{first}{_THINK_END}{second}"}
    if form == CLOSED:
        return {"role": role, "content": f"{first}{_THINK_END}{second}"}
    return {"role": role, "content": first}


def readings(messages: Sequence[Message]) -> list[tuple[list[Shape], list[list[str]]]]:
    """The ways to take a conversation apart: contents as a whole, and, where they hold reasoning, that apart from the answer.

    Empty when a message has tool calls, which no stand-in can replace.
    """
    if any(message.get("tool_calls") for message in messages):
        return []
    numbers = _first_equal(messages)
    whole = [_take_apart(number, message, False) for number, message in zip(numbers, messages, strict=True)]
    apart = [_take_apart(number, message, True) for number, message in zip(numbers, messages, strict=True)]
    ways = [whole] if whole == apart else [whole, apart]
    return [([shape for shape, _ in way], [parts for _, parts in way]) for way in ways]


def _first_equal(messages: Sequence[Message]) -> list[int]:
    """Some templates look for a message by comparing it: equal messages need equal stand-ins."""
    first: dict[tuple[str, str], int] = {}
    return [
        number if message["role"] == "assistant" else first.setdefault((message["role"], message["content"]), number)
        for number, message in enumerate(messages)
    ]


def _take_apart(number: int, message: Message, split_thinking: bool) -> tuple[Shape, list[str]]:
    role, content = message["role"], message.get("content", "")
    if role == "assistant":
        reasoning = next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), None)
        if reasoning is not None:
            return (number, role, FIELD), [reasoning, content]
        if split_thinking and _THINK_END in content:
            thought, _, answer = content.partition(_THINK_END)
            opened = thought.lstrip().startswith(_THINK)
            return (number, role, TAGGED if opened else CLOSED), [
                thought.lstrip()[len(_THINK) :] if opened else thought,
                answer,
            ]
    return (number, role, PLAIN), [content]


def _trimmings(content: str) -> Sequence[str]:
    """`content` as templates print it: as it is, or without blanks or line ends at either end."""
    if not content or not (content[0].isspace() or content[-1].isspace()):
        return (content,)
    return (
        content,
        content.strip(),
        content.strip("\n"),
        content.lstrip("\n"),
        content.rstrip("\n"),
        content.lstrip(),
        content.rstrip(),
    )
