"""Render a conversation and say exactly which characters of it the target would generate: the assistant's, end of turn included.

A span begins after the generation prompt and ends with the end-of-turn token. The full rendering of the conversation is the truth;
spans are located in it in one of three ways, each exact or refused:

1. inside the template's own `{% generation %}` markers;
2. by a skeleton per sequence of roles (`data/skeleton.py`): costs one rendering per conversation;
3. where contents are not printed as they are (tool calls, rewriting templates): by rendering the conversation again with one turn
   replaced, and its prefixes: two renderings per turn.

A conversation that the template refuses, or a turn that cannot be located, raises `DataError` with its place; a wrong mask is never made.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dflash_mp.data.chat_template import ChatTemplate, TemplateProblem
from dflash_mp.data.documents import Document, Message
from dflash_mp.data.skeleton import (
    PLAIN,
    REASONING_KEYS,
    Shape,
    Skeleton,
    Span,
    Turn,
    has_stand_ins,
    readings,
    split_stand_ins,
    stand_in,
)
from dflash_mp.errors import DataError

_KEPT_SKELETONS = 4096
Tools = list[dict[str, Any]] | None


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation and the assistant's spans in it, in order."""

    text: str
    spans: list[Span]


class SpanFinder:
    """Annotates conversations for one chat template; remembers the skeletons it has met."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._skeletons: dict[tuple[Any, ...], Skeleton | None] = {}

    def annotate(self, document: Document) -> Rendered:
        """Render the conversation of `document` and locate its assistant turns. Raises `DataError`."""
        messages, tools = document.messages or [], document.tools
        try:
            rendered = self._annotate(messages, tools)
            _check_tool_calls(rendered, messages)
            _check_reasoning(rendered, messages)
            return rendered
        except TemplateProblem as problem:
            raise DataError(
                f"{document.place}: {problem}",
                "fix or remove the record, or mark the assistant's turns in the target's chat template with {% generation %}",
            ) from None

    def _annotate(self, messages: list[Message], tools: Tools) -> Rendered:
        if self._template.has_markers(tools):
            return self._by_markers(messages, tools)
        text = self._template.render(messages, tools)
        if not any(message["role"] == "assistant" for message in messages):
            return Rendered(text, [])
        self._template.check()
        spans = self._by_skeleton(text, messages, tools)
        return Rendered(text, self._by_replacement(text, messages, tools) if spans is None else spans)

    # 1. Markers

    def _by_markers(self, messages: list[Message], tools: Tools) -> Rendered:
        text, blocks = self._template.render_marked(messages, tools)
        joined: list[tuple[int, int]] = []
        for start, end in blocks:
            if joined and joined[-1][1] == start:
                start, _ = joined.pop()
            joined.append((start, end))
        return Rendered(text, [self._inside(text, start, end) for start, end in joined])

    def _inside(self, text: str, start: int, end: int) -> Span:
        """The span of a marked block: without a generation prompt that it may hold, and with the end of turn that may follow it."""
        block = text[start:end]
        header = self._header(block)
        spoken = block.rstrip()
        while token := next((token for token in self._template.ends if spoken.endswith(token)), ""):
            spoken = spoken[: -len(token)].rstrip()
        found = self._template.find_end(text, start + max(len(spoken), len(header)))
        if found is None:
            raise TemplateProblem(f"no end-of-turn token follows the template's generation block at character {start}")
        return Span(start + len(header), *found)

    def _header(self, block: str) -> str:
        """The generation prompt that a marked block begins with, without thinking that the prompt opens and the block does not."""
        prompts, opening = self._template.generation_prompts, self._template.begins_with(block)
        if opening and any(prompt.startswith(opening) for prompt in prompts):
            for prompt in prompts:
                for header in (prompt, prompt.partition("<think>")[0]):
                    if header and block.startswith(header):
                        return header
            raise TemplateProblem(
                "the template's generation block begins with a header that is not its generation prompt"
            )
        return ""

    # 2. Skeleton

    def _by_skeleton(self, text: str, messages: list[Message], tools: Tools) -> list[Span] | None:
        for shapes, parts in readings(messages):
            skeleton = self._skeleton(shapes, tools)
            spans = skeleton.spans(text, parts) if skeleton else None
            if spans is not None:
                return spans
        return None

    def _skeleton(self, shapes: list[Shape], tools: Tools) -> Skeleton | None:
        key = (*shapes, json.dumps(tools, sort_keys=True) if tools else "")
        if key not in self._skeletons:
            if len(self._skeletons) >= _KEPT_SKELETONS:
                self._skeletons.clear()
            self._skeletons[key] = self._make_skeleton(shapes, tools)
        return self._skeletons[key]

    def _make_skeleton(self, shapes: list[Shape], tools: Tools) -> Skeleton | None:
        stand_ins = [stand_in(shape) for shape in shapes]
        try:
            texts, slots = split_stand_ins(self._template.render(stand_ins, tools))
        except TemplateProblem:
            return None  # it renders the real conversation, but not stand-ins
        turns = []
        for number, (_, role, _) in enumerate(shapes):
            mine = [place for place, (message, _) in enumerate(slots) if message == number]
            if role != "assistant":
                continue
            if not mine or not len({slots[place] for place in mine}) == len(mine) == mine[-1] - mine[0] + 1:
                return None  # not printed, or printed twice or in pieces
            given = self._given(stand_ins[:number], tools, texts[mine[0]])
            end = self._template.find_end(texts[mine[-1] + 1], 0)
            if given is None or end is None:
                return None
            (tail, token), (base, prompts, bare) = end, given
            turns.append(Turn(mine[0], mine[-1], tail, token, base, prompts, bare))
        return Skeleton(texts, slots, tuple(turns))

    def _given(self, earlier: list[Message], tools: Tools, text: str) -> tuple[int, tuple[str, ...], bool] | None:
        """What the target is given of `text`, the fixed text before an assistant's first slot (see `Turn`)."""
        if not earlier:
            found = [(text.rfind(p), p) for p in self._template.generation_prompts if p and p in text]
            return (found[0][0], (found[0][1],), False) if found else None
        prompts: list[str] = []
        for mode in range(len(self._template.modes)):
            try:
                texts, _ = split_stand_ins(self._template.render(earlier, tools, prompt=True, mode=mode))
                silent, _ = split_stand_ins(self._template.render(earlier, tools, mode=mode))
            except TemplateProblem:
                return None  # the template does not speak after these messages
            if texts == silent and text.startswith(texts[-1]) and text[len(texts[-1]) :].strip():
                return 0, (), True  # no generation prompt, but a header before the answer
            prompts.append(texts[-1])
        return 0, tuple(dict.fromkeys(prompts)), prompts[0].startswith(text)

    # 3. Replacement

    def _by_replacement(self, text: str, messages: list[Message], tools: Tools) -> list[Span]:
        if has_stand_ins(text):
            raise TemplateProblem("the conversation uses the private characters U+E0F0 and U+E0F1")
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                span = self._replace(text, messages, tools, number)
                if span is None:
                    raise TemplateProblem(
                        f"the chat template prints message {number + 1} (assistant) in a way that does not show exactly where it "
                        "begins and ends"
                    )
                spans.append(span)
        return spans

    def _replace(self, text: str, messages: list[Message], tools: Tools, number: int) -> Span | None:
        """The span of message `number`: what changes in `text` when it is replaced, after the prompt that its beginning gives."""
        mark = stand_in((number, "assistant", PLAIN))
        other = self._template.render([*messages[:number], mark, *messages[number + 1 :]], tools)
        unchanged = _common_suffix(text, other)
        if other.count(mark["content"]) != 1 or not other.endswith(mark["content"], 0, len(other) - unchanged):
            return None
        end = len(text) - unchanged
        found = self._template.find_end(text, end)
        start = self._prompt_end(text, messages[:number], tools, min(end, _common_prefix(text, other)))
        return None if found is None or start is None else Span(start, *found)

    def _prompt_end(self, text: str, earlier: list[Message], tools: Tools, limit: int) -> int | None:
        for mode in range(len(self._template.modes)):
            given = self._template.render(earlier, tools, prompt=True, mode=mode)
            if len(given) <= limit and text.startswith(given):
                return len(given)
        return None


def _check_tool_calls(rendered: Rendered, messages: list[Message]) -> None:
    spoken = [rendered.text[span.start : span.stop] for span in rendered.spans]
    for number, message in enumerate(messages, start=1):
        for call in message.get("tool_calls") or []:
            function = call.get("function", call) if isinstance(call, dict) else {}
            name = function.get("name") if isinstance(function, dict) else None
            if not isinstance(name, str) or not any(name in text for text in spoken):
                raise TemplateProblem(f"the chat template leaves out a tool call of message {number}")


def _check_reasoning(rendered: Rendered, messages: list[Message]) -> None:
    """Templates may leave out the reasoning of earlier answers; without the last one's the target would be taught not to think."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
    thought = next((last[key].strip() for key in REASONING_KEYS if isinstance(last.get(key), str)), "")
    if thought and not (
        rendered.spans and thought in rendered.text[rendered.spans[-1].start : rendered.spans[-1].stop]
    ):
        raise TemplateProblem(
            f"the chat template leaves out the reasoning of message {len(messages)} (the last answer)"
        )


def _common_prefix(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.startswith(other[:middle]) else (low, middle - 1)
    return low


def _common_suffix(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.endswith(other[len(other) - middle :]) else (low, middle - 1)
    return low
