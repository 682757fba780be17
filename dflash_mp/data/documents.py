"""Documents from records: a conversation or a plain text, whatever the shape of the record.

| shape    | keys, the first that is present |
|----------|---------------------------------|
| messages | `messages`, `conversation` or `conversations`: a list of `{"role", "content"}`; further keys of a message reach the template |
| sharegpt | the same keys: a list of `{"from", "value"}`, spoken by human, gpt, system, … |
| pairs    | prompt/response, instruction (+ input)/output, question/answer, …; a `system` prompt beside them |
| text     | `text` |

`tools` beside a conversation reach the template too; `finish_reason: length` says that its last answer was cut when it was generated, `refused` that one is missing. A record that fits no shape, or is wrong inside, raises `DataError` with its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dflash_mp.data.skeleton import REASONING_KEYS
from dflash_mp.errors import DataError

Message = dict[str, Any]

_CONVERSATION_KEYS = ("messages", "conversations", "conversation")
_PAIR_KEYS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("problem", "solution"),
    ("input", "output"),
)
_SYSTEM_KEYS = ("system", "system_prompt")
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
KNOWN_KEYS = frozenset(
    {
        *_CONVERSATION_KEYS,
        *(key for pair in _PAIR_KEYS for key in pair),
        *_SYSTEM_KEYS,
        "text",
        "turns",
        "tools",
        "finish_reason",
    }
)


class Record(NamedTuple):
    """The fields of one record, and the place to name when they are wrong: "file:line" or "file, row n"."""

    place: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Document:
    """A conversation (`messages`, perhaps with `tools`) or a plain `text`; the other one is None.

    `unfinished`: the conversation's last answer was cut when it was generated, so the target did not end its turn there.
    `refused`: an answer could not be had.
    """

    place: str
    messages: list[Message] | None = None
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    unfinished: bool = False
    refused: bool = False

    def identity(self) -> bytes:
        """Equal for equal documents, whatever file or shape of record they came from; blanks around a text do not count."""
        if self.messages is None:
            return (self.text or "").strip().encode("utf-8", "surrogatepass")
        said = [[m["role"], _stripped(m.get("content")), m.get("tool_calls")] for m in self.messages]
        return json.dumps(said, sort_keys=True, default=str).encode()

    def cut_inside_thought(self, opened: bool) -> bool:
        """Whether the last answer was cut before its thought ended; `opened`: a thought may begin without its mark."""
        if not self.unfinished or not self.messages:
            return False
        last = self.messages[-1]
        content = last["content"]
        if any(last.get(key) for key in REASONING_KEYS):
            return not content.strip() and not last.get("tool_calls")
        begun, ended = content.rfind("<think>"), content.rfind("</think>")
        return begun > ended or (opened and ended < 0)

    def characters(self) -> int:
        """About how long the document is; for batching."""
        return sum(len(m["content"]) for m in self.messages) if self.messages is not None else len(self.text or "")


def to_document(record: Record, shape: str = "auto") -> Document:
    """The document of `record`, read as `shape` (see `SourceConfig.format`). Raises `DataError`."""
    place, fields = record
    if shape in ("auto", "messages", "sharegpt"):
        for key in _CONVERSATION_KEYS:
            if fields.get(key) is not None:
                messages = _conversation(fields[key], key, shape, place)
                return _talk(record, messages)
    if shape in ("auto", "pairs"):
        for prompt, response in _PAIR_KEYS:
            if fields.get(prompt) is not None and fields.get(response) is not None:
                messages = _pair(record, prompt, response)
                return _talk(record, messages)
    if shape in ("auto", "text") and fields.get("text") is not None:
        return Document(place, text=_string(fields["text"], "text", place))
    wanted = "messages, conversations, a pair such as prompt/response, or text" if shape == "auto" else f"shape {shape}"
    raise DataError(
        f"{place}: no {wanted} in a record with the keys {', '.join(sorted(map(str, fields))) or '(none)'}",
        "rename the keys, or set the source's format to the shape it has",
    )


def is_conversation(record: Record, shape: str = "auto") -> bool:
    """Whether `record`, read as `shape`, holds a list of messages."""
    return shape in ("auto", "messages", "sharegpt") and any(
        record.fields.get(key) is not None for key in _CONVERSATION_KEYS
    )


def _conversation(value: Any, key: str, shape: str, place: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: {key} must be a list of at least one message", "fix the record")
    messages = []
    for number, item in enumerate(value, start=1):
        where = f"{place}: message {number} of {key}"
        if not isinstance(item, dict):
            raise DataError(f"{where} is {type(item).__name__}, not an object", "fix the record")
        if shape != "sharegpt" and "role" in item:
            messages.append(_message(item, where))
        elif shape != "messages" and "from" in item:
            messages.append(_spoken(item, where))
        else:
            wanted = {"messages": "role/content", "sharegpt": "from/value"}.get(shape, "role/content or from/value")
            raise DataError(f"{where} has the keys {', '.join(sorted(item))}, not {wanted}", "fix the record")
    return messages


def _message(item: dict[str, Any], where: str) -> Message:
    message = {key: value for key, value in item.items() if value is not None}
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise DataError(f"{where}: role must be a text", "fix the record")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(_text_parts(content, where))
    elif content is None and (message.get("tool_calls") or any(message.get(key) for key in REASONING_KEYS)):
        message["content"] = ""
    else:
        _string(content, "content", where)
    if message["role"] == "assistant" and isinstance(message.get("reasoning"), str):
        message.setdefault("reasoning_content", message["reasoning"])  # the name that most templates read
    if message.get("tool_calls"):
        try:
            message["tool_calls"] = with_objects(message["tool_calls"])
        except ValueError as error:
            raise DataError(f"{where}: {error}", "fix the record") from None
    return message


def with_objects(calls: Any) -> Any:
    """Tool calls whose arguments are objects, as chat templates want them, not JSON text. Raises `ValueError` where they can't be."""
    return [_with_object(call) for call in calls] if isinstance(calls, list) else calls


def _with_object(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_object(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"the arguments of the tool call {call.get('name')} are not a JSON object: {arguments[:80]}")
    return {**call, "arguments": value}


def _text_parts(parts: list[Any], where: str) -> Iterator[str]:
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{where}: content has a part that is not text", "only text can be used; remove the record")
        yield part["text"]


def _spoken(item: dict[str, Any], where: str) -> Message:
    role = _SPEAKERS.get(str(item["from"]).lower())
    if role is None:
        raise DataError(
            f"{where} is from {item['from']!r}, which is none of {', '.join(_SPEAKERS)}",
            "rename the speaker in the record",
        )
    return {"role": role, "content": _string(item.get("value"), "value", where)}


def _pair(record: Record, prompt: str, response: str) -> list[Message]:
    place, fields = record
    if isinstance(fields[prompt], list) and isinstance(fields[response], list):
        return [
            *_conversation(fields[prompt], prompt, "messages", place),
            *_conversation(fields[response], response, "messages", place),
        ]
    asked = _string(fields[prompt], prompt, place)
    if prompt == "instruction" and fields.get("input"):
        asked = f"{asked}\n\n{_string(fields['input'], 'input', place)}"
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": _string(fields[response], response, place)},
    ]
    return [*system_message(record), *messages]


def system_message(record: Record) -> list[Message]:
    """The system prompt beside a pair or a question; empty if there is none. Raises `DataError`."""
    place, fields = record
    key = next((key for key in _SYSTEM_KEYS if fields.get(key)), None)
    return [{"role": "system", "content": _string(fields[key], key, place)}] if key else []


def _talk(record: Record, messages: list[Message]) -> Document:
    ended = record.fields.get("finish_reason")
    unfinished = ended == "length" and messages[-1]["role"] == "assistant"
    return Document(record.place, messages, None, tools_of(record), unfinished, refused=ended == "refused")


def tools_of(record: Record) -> list[dict[str, Any]] | None:
    """The `tools` beside a conversation. Raises `DataError`."""
    tools = record.fields.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{record.place}: tools is not valid JSON: {error}", "fix the record") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{record.place}: tools must be a list of objects", "fix the record")
    return tools


def _string(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        found = "missing" if value is None else f"{type(value).__name__}, not a text"
        raise DataError(f"{where}: {key} is {found}", "fix the record")
    return value


def _stripped(content: Any) -> Any:
    return content.strip() if isinstance(content, str) else content
