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
Shape = tuple[str, str]  # role, and one of:
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
    """An assistant's turn in a skeleton: its slots, and where it begins and ends inside the fixed texts around them."""

    first: int  # its first slot
    last: int  # its last slot
    lead: int  # offset in the text before `first` where the target starts to generate
    tail: int  # offset in the text after `last` where the end-of-turn token begins
    end_of_turn: str


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
        spans = []
        for turn in self.turns:
            start = found[turn.first][0] - len(self.texts[turn.first]) + turn.lead
            spans.append(Span(start, found[turn.last][1] + turn.tail, turn.end_of_turn))
        return spans

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


def stand_in(number: int, shape: Shape) -> Message:
    """Message `number` of a conversation with stand-ins for its parts."""
    role, form = shape
    first, second = (f"{_OPEN}{number}.{part}{_CLOSE}" for part in (0, 1))
    if form == FIELD:
        return {"role": role, REASONING_KEYS[0]: first, "content": second}
    if form == TAGGED:
        return {"role": role, "content": f"{_THINK}\n{first}\n{_THINK_END}\n\n{second}"}
    if form == CLOSED:
        return {"role": role, "content": f"{first}\n{_THINK_END}\n\n{second}"}
    return {"role": role, "content": first}


def readings(messages: Sequence[Message]) -> list[tuple[list[Shape], list[list[str]]]]:
    """The ways to take a conversation apart: contents as a whole, and, where they hold reasoning, that apart from the answer.

    Empty when a message has tool calls, which no stand-in can replace.
    """
    if any(message.get("tool_calls") for message in messages):
        return []
    whole = [_take_apart(message, False) for message in messages]
    apart = [_take_apart(message, True) for message in messages]
    ways = [whole] if whole == apart else [whole, apart]
    return [([shape for shape, _ in way], [parts for _, parts in way]) for way in ways]


def _take_apart(message: Message, split_thinking: bool) -> tuple[Shape, list[str]]:
    role, content = message["role"], message.get("content", "")
    if role == "assistant":
        reasoning = next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), None)
        if reasoning is not None:
            return (role, FIELD), [reasoning, content]
        if split_thinking and _THINK_END in content:
            thought, _, answer = content.partition(_THINK_END)
            opened = thought.lstrip().startswith(_THINK)
            return (role, TAGGED if opened else CLOSED), [
                thought.lstrip()[len(_THINK) :] if opened else thought,
                answer,
            ]
    return (role, PLAIN), [content]


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
