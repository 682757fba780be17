"""What is asked: a conversation from each record of the sources, with its answers left out.

A record asks with a conversation as `prepare` reads it, `turns` (texts of the user), `prompt` (a text, or a list of messages) or a pair as
`prepare` reads it, the first that is present; a `system` prompt and `tools` beside them are kept. Answers are written anew, one after the
other, each after the new ones before it. Where tools speak, only the last answer is written anew: what a tool returned belongs to the call
that is there. A record that asks nothing raises `DataError` with its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mp.config import SourceConfig
from dflash_mp.data.documents import Message, Record, is_conversation, system_message, to_document, tools_of
from dflash_mp.data.sources import read_source
from dflash_mp.errors import DataError


@dataclass(frozen=True)
class Conversation:
    """Number `index` of all, in the order of the sources. `parts`: the messages before the first answer, between answers, …; none is empty."""

    index: int
    place: str
    parts: tuple[tuple[Message, ...], ...]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Answered:
    """A conversation with its new answers. `tokens`: of the answers.

    `finish_reason`: "stop"; "length": the last answer was cut at the longest allowed, and what would have followed is left out; "prompt_too_long":
    there was no room for an(other) answer, which is therefore missing; "refused": an(other) answer could not be had, `refusal` says why.
    """

    conversation: Conversation
    messages: list[Message]
    finish_reason: str
    tokens: int
    refusal: str = ""

    def record(self) -> dict[str, Any]:
        """As `prepare` reads it; `index` is the conversation's number."""
        fields: dict[str, Any] = {"index": self.conversation.index, "messages": self.messages}
        if self.conversation.tools:
            fields["tools"] = self.conversation.tools
        fields |= {"finish_reason": self.finish_reason, "answer_tokens": self.tokens}
        return {**fields, "refusal": self.refusal} if self.refusal else fields


def without_torn_character(text: str) -> str:
    """A cut answer without the character, of several tokens, that the cut may have torn."""
    return text.rstrip("\ufffd")


def read_conversations(sources: Sequence[SourceConfig]) -> Iterator[Conversation]:
    """The conversations of all sources in turn. Raises `DataError`."""
    index = 0
    for source in sources:
        for record in read_source(source):
            yield to_conversation(record, source.format, index)
            index += 1


def to_conversation(record: Record, shape: str, index: int) -> Conversation:
    """What `record` asks. Raises `DataError`."""
    place = record.place
    messages, tools = _messages(record, shape)
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError(f"{place}: nothing is asked", "remove the record")
    if any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        return Conversation(index, place, (tuple(messages),), tools)
    parts: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            parts[-1].append(message)
        elif not any(said["role"] != "system" for said in parts[0]):
            raise DataError(
                f"{place}: the assistant speaks first, so nothing is asked", "remove the record, or its first answer"
            )
        elif parts[-1]:
            parts.append([])
    return Conversation(index, place, tuple(map(tuple, parts)), tools)


def _messages(record: Record, shape: str) -> tuple[list[Message], list[dict[str, Any]] | None]:
    place, fields = record
    asking = None if is_conversation(record, shape) else _asking(record)
    if asking is not None:
        return [*system_message(record), *asking], tools_of(record)
    asked = fields.get("prompt")
    if isinstance(asked, list) and not _is_pair(record):
        record, shape = Record(place, {"messages": asked, "tools": fields.get("tools")}), "messages"
    document = to_document(record, shape)
    if document.messages is None:
        raise DataError(f"{place}: a plain text asks nothing", "give conversations, pairs or prompts")
    return document.messages, document.tools


def _asking(record: Record) -> list[Message] | None:
    """The questions of a record that asks with texts of the user; None for another."""
    place, fields = record
    asked, turns = fields.get("prompt"), fields.get("turns")
    if isinstance(turns, Sequence) and not isinstance(turns, str) and turns:
        if not all(isinstance(turn, str) for turn in turns):
            raise DataError(f"{place}: turns must be a list of texts", "fix the record")
        questions: list[Message] = [{"role": "user", "content": turn} for turn in turns]
        # An empty answer between two questions marks where one belongs.
        return [message for turn in questions for message in (turn, {"role": "assistant", "content": ""})]
    if isinstance(asked, str) and not _is_pair(record):
        return [{"role": "user", "content": asked}]
    return None


def _is_pair(record: Record) -> bool:
    return any(record.fields.get(key) is not None for key in ("response", "completion"))
