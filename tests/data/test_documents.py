"""Records of every usual shape become conversations or texts; what is wrong in one is named."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_mp.data.documents import Document, Record, to_document
from dflash_mp.errors import DataError

QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def _document(fields: dict[str, Any], shape: str = "auto") -> Document:
    return to_document(Record("chats.jsonl:3", fields), shape)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [QUESTION, ANSWER], "prompt": "ignored", "text": "ignored"},
        {"conversations": [QUESTION, ANSWER]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversation": [{"from": "User", "value": "q"}, {"from": "Assistant", "value": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER]},
        {"prompt": "q", "response": "a"},
        {"prompt": "q", "completion": "a"},
        {"prompt": [QUESTION], "completion": [ANSWER]},
        {"instruction": "q", "input": "", "output": "a"},
        {"instruction": "q", "response": "a"},
        {"question": "q", "answer": "a"},
        {"query": "q", "response": "a"},
        {"problem": "q", "solution": "a"},
        {"input": "q", "output": "a"},
    ],
)
def test_the_same_conversation_in_many_shapes(fields: dict[str, Any]) -> None:
    document = _document(fields)
    assert document.messages == [QUESTION, ANSWER]
    assert document.identity() == Document("elsewhere", messages=[QUESTION, ANSWER]).identity()


def test_an_instruction_with_an_input() -> None:
    assert _document({"instruction": "do", "input": "this", "output": "a"}).messages == [
        {"role": "user", "content": "do\n\nthis"},
        ANSWER,
    ]


def test_a_system_prompt_beside_a_pair_and_inside_conversations() -> None:
    system = {"role": "system", "content": "s"}
    assert _document({"system": "s", "question": "q", "answer": "a"}).messages == [system, QUESTION, ANSWER]
    spoken = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert _document({"conversations": spoken}).messages == [system, QUESTION, ANSWER]


def test_a_plain_text() -> None:
    document = _document({"text": "words", "id": 7})
    assert (document.text, document.messages) == ("words", None)


def test_tools_and_tool_calls_are_kept() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    document = _document({"messages": [QUESTION, call], "tools": '[{"type": "function"}]'})
    assert document.tools == [{"type": "function"}]
    assert document.messages is not None
    assert document.messages[1] == {**call, "content": ""}


def test_arguments_of_tool_calls_become_objects() -> None:
    for wrap in (lambda call: {"type": "function", "function": call}, lambda call: call):
        calls = [wrap({"name": "f", "arguments": text}) for text in ('{"x": 1}', "")]
        document = _document({"messages": [QUESTION, {**ANSWER, "tool_calls": calls}]})
        assert document.messages is not None
        wanted = [wrap({"name": "f", "arguments": value}) for value in ({"x": 1}, {})]
        assert document.messages[1]["tool_calls"] == wanted
    for text in ("{x", "[" * 100_000, '{"n": ' + "9" * 6000 + "}"):
        bad = [{"function": {"name": "f", "arguments": text}}]
        with pytest.raises(DataError, match=r"chats\.jsonl:3: message 2 .* call f are not a JSON object"):
            _document({"messages": [QUESTION, {**ANSWER, "tool_calls": bad}]})


def test_reasoning_under_its_newer_name_is_reasoning() -> None:
    document = _document({"messages": [QUESTION, {**ANSWER, "reasoning": "why"}]})
    assert document.messages is not None
    assert document.messages[1]["reasoning_content"] == "why"


def test_a_given_shape_is_the_only_one_tried() -> None:
    record = {"prompt": "q", "response": "a", "text": "t"}
    assert _document(record, "text").text == "t"
    assert _document(record, "pairs").messages == [QUESTION, ANSWER]
    with pytest.raises(DataError, match="no shape messages in a record with the keys prompt, response, text"):
        _document(record, "messages")


def test_blanks_around_a_text_do_not_make_another_document() -> None:
    assert Document("x", text=" t\n").identity() == Document("y", text="t").identity()
    assert Document("x", text="t").identity() != Document("x", text="u").identity()
    talk = Document("x", messages=[QUESTION, ANSWER])
    assert talk.identity() == Document("x", messages=[QUESTION, {**ANSWER, "content": "a\n"}]).identity()
    for other in (
        [ANSWER, QUESTION],
        [QUESTION, {**ANSWER, "content": "b"}],
        [QUESTION, {**ANSWER, "tool_calls": [1]}],
    ):
        assert talk.identity() != Document("x", messages=other).identity()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"no messages, conversations, .* with the keys \(none\)"),
        ({"body": "x"}, "with the keys body"),
        ({"prompt": "q"}, "with the keys prompt"),
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": "hi"}, "messages must be a list"),
        ({"messages": [QUESTION, "a"]}, "message 2 of messages is str, not an object"),
        (
            {"messages": [{"content": "q"}]},
            "message 1 of messages has the keys content, not role/content or from/value",
        ),
        ({"messages": [{"role": 1, "content": "q"}]}, "message 1 of messages: role must be a text"),
        ({"messages": [QUESTION, {"role": "assistant"}]}, "message 2 of messages: content is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "message 1 of messages: content is int, not a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part that is not text"),
        ({"conversations": [{"from": "narrator", "value": "q"}]}, "is from 'narrator', which is none of human, user"),
        ({"conversations": [{"from": "human"}]}, "message 1 of conversations: value is missing"),
        ({"prompt": 3, "response": "a"}, "prompt is int, not a text"),
        ({"text": ["t"]}, "text is list, not a text"),
        ({"messages": [QUESTION, ANSWER], "tools": "{"}, "tools is not valid JSON"),
        ({"messages": [QUESTION, ANSWER], "tools": "[" * 100_000}, "tools is not valid JSON"),
        ({"messages": [QUESTION, ANSWER], "tools": "[" + "9" * 6000 + "]"}, "tools is not valid JSON"),
        ({"messages": [QUESTION, ANSWER], "tools": {"a": 1}}, "tools must be a list of objects"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"chats\.jsonl:3: .*{message}"):
        _document(fields)
