"""The loss mask covers exactly what the target would generate: the assistant's words and its end of turn."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import chat_families as families
import numpy as np
import pytest
from chat_families import FAMILIES, Family, byte_tokenizer, metaspace_tokenizer, supervised_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from dflash_mp.data.documents import Document, Message
from dflash_mp.data.encoding import DocumentEncoder, EncodedDocument
from dflash_mp.errors import DataError


@cache
def _encoder(name: str, trim_offsets: bool = True) -> tuple[Any, DocumentEncoder]:
    tokenizer = byte_tokenizer(FAMILIES[name].template, trim_offsets=trim_offsets)
    return tokenizer, DocumentEncoder(tokenizer)


def _encode(tokenizer: Any, messages: list[Message], thinking: Any = "default", **extra: Any) -> EncodedDocument:
    return DocumentEncoder(tokenizer, thinking).encode([Document("chats.jsonl:7", messages=messages, **extra)])[0]


def _masked(tokenizer: Any, messages: list[Message], thinking: Any = "default", **extra: Any) -> list[str]:
    document = _encode(tokenizer, messages, thinking, **extra)
    return supervised_texts(tokenizer, document.input_ids, document.loss_mask)


def _conversation(*contents: str, system: str | None = None) -> list[Message]:
    turns = [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def _spoken(family: Family, contents: tuple[str, ...]) -> list[str]:
    answers = contents[1::2]
    return [family.spoken(answer, n == len(answers) - 1) for n, answer in enumerate(answers)]


_MARKUP = re.compile("|".join(map(re.escape, families.SPECIAL)))
texts = st.one_of(
    st.text(max_size=12),
    st.text(alphabet=" \n\tab<>é🙂日", max_size=8),
    st.sampled_from(
        ["", " ", "\n", "\n\n", "  the answer\n\n", "user\n", "<|im_end", "x <b>", "assistant\n", "\n  the"]
    ),
).filter(lambda text: not _MARKUP.search(text))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(st.tuples(texts, texts), min_size=1, max_size=3),
    system=st.one_of(st.none(), texts),
    trim_offsets=st.booleans(),
)
def test_masked_tokens_decode_to_the_answers_and_their_ends_of_turn(
    name: str, contents: list[tuple[str, str]], system: str | None, trim_offsets: bool
) -> None:
    family = FAMILIES[name]
    tokenizer, encoder = _encoder(name, trim_offsets)
    flat = tuple(text for pair in contents for text in pair)
    messages = _conversation(*flat, system=system if family.system else None)
    document = encoder.encode([Document("x", messages=messages)])[0]
    assert supervised_texts(tokenizer, document.input_ids, document.loss_mask) == _spoken(family, flat)
    # … and the tokens are those of the template's own rendering of the conversation.
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(document.input_ids.tolist(), skip_special_tokens=False) == rendered
    starts = np.flatnonzero(np.diff(document.loss_mask.astype(int), prepend=0) == 1)
    assert document.turns == tuple(starts)


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_the_whole_rendering(name: str) -> None:
    tokenizer = byte_tokenizer(FAMILIES[name].template)
    messages = _conversation("the one?", "the other.", "and then?", "there")
    document = _encode(tokenizer, messages)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert document.input_ids.tolist() == tokenizer(rendered, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["llama2", "mistral"])
def test_a_tokenizer_in_the_manner_of_sentencepiece_gives_the_answers_with_their_blank(name: str) -> None:
    tokenizer = metaspace_tokenizer(FAMILIES[name].template)
    document = _encode(tokenizer, _conversation("the one?", "the other 🙂", "and?", "they gave the answer"))
    runs = [
        [tokenizer.convert_ids_to_tokens(t) for t, m in zip(part, mask, strict=True) if m]
        for part, mask in [(document.input_ids.tolist(), document.loss_mask)]
    ]
    text = "".join(runs[0]).replace("▁", " ").replace("<0xF0><0x9F><0x99><0x82>", "🙂")
    assert text == "".join(FAMILIES[name].spoken(answer, False) for answer in ("the other 🙂", "they gave the answer"))


class TestThinking:
    thought = _conversation("q1", "<think>\nwhy\n</think>\n\na1", "q2", "<think>\nhow\n</think>\n\na2")

    def test_qwen3_prints_only_the_last_thought(self) -> None:
        tokenizer = byte_tokenizer(families.QWEN3)
        assert _masked(tokenizer, self.thought) == ["a1<|im_end|>", "<think>\nhow\n</think>\n\na2<|im_end|>"]

    def test_a_thought_in_a_key_of_its_own_is_the_same(self) -> None:
        tokenizer = byte_tokenizer(families.QWEN3)
        messages = _conversation("q1", "a1", "q2", "a2")
        messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "why", "how"
        apart, inside = _encode(tokenizer, messages), _encode(tokenizer, self.thought)
        assert np.array_equal(apart.input_ids, inside.input_ids)
        assert np.array_equal(apart.loss_mask, inside.loss_mask)

    def test_with_thinking_off_the_empty_thought_is_part_of_the_prompt(self) -> None:
        tokenizer, messages = byte_tokenizer(families.QWEN3), _conversation("q1", "a1", "q2", "a2")
        empty = "<think>\n\n</think>\n\n"
        assert _masked(tokenizer, messages, "off") == ["a1<|im_end|>", "a2<|im_end|>"]
        assert _masked(tokenizer, messages, "on") == ["a1<|im_end|>", f"{empty}a2<|im_end|>"]
        assert _masked(tokenizer, messages, "default") == ["a1<|im_end|>", f"{empty}a2<|im_end|>"]

    def test_a_thought_that_the_template_keeps_is_the_targets_even_with_thinking_off(self) -> None:
        tokenizer = byte_tokenizer(families.QWEN3)
        assert _masked(tokenizer, self.thought, "off")[1] == "<think>\nhow\n</think>\n\na2<|im_end|>"

    def test_an_answer_that_begins_like_the_thinking_of_the_prompt_is_whole(self) -> None:
        tokenizer = byte_tokenizer(families.DEEPSEEK_R1)
        assert _masked(tokenizer, _conversation("q", "<thin>")) == ["<thin><｜end▁of▁sentence｜>"]

    def test_what_the_prompt_gives_is_not_the_targets_whoever_wrote_it(self) -> None:
        tokenizer = byte_tokenizer(families.NEMOTRON)
        assert _masked(tokenizer, self.thought) == [
            f"{t}\n</think>\n\n{a}<|im_end|>" for t, a in (("why", "a1"), ("how", "a2"))
        ]
        assert _masked(tokenizer, _conversation("q", "a"), "off") == ["a<|im_end|>"]

    def test_deepseek_r1_prints_no_thought_at_all(self) -> None:
        tokenizer = byte_tokenizer(families.DEEPSEEK_R1)
        assert _masked(tokenizer, self.thought) == [f"\n\n{a}<｜end▁of▁sentence｜>" for a in ("a1", "a2")]


class TestUnusualConversations:
    def test_two_answers_in_a_row(self) -> None:
        messages = [*_conversation("q", "a1"), {"role": "assistant", "content": "a2"}]
        assert _masked(byte_tokenizer(families.CHATML), messages) == ["a1<|im_end|>", "a2<|im_end|>"]
        assert _masked(byte_tokenizer(families.QWEN3), messages) == [
            "a1<|im_end|>",
            "<think>\n\n</think>\n\na2<|im_end|>",
        ]

    def test_an_answer_without_a_question(self) -> None:
        messages = [{"role": "assistant", "content": "hello"}, *_conversation("q", "a")]
        for template in (families.CHATML, families.SMOLLM2):
            assert _masked(byte_tokenizer(template), messages) == ["hello<|im_end|>", "a<|im_end|>"]

    def test_a_question_at_the_end_is_not_supervised(self) -> None:
        assert _masked(byte_tokenizer(families.SMOLLM2), _conversation("q1", "a1", "q2")) == ["a1<|im_end|>"]

    def test_a_conversation_without_an_answer_has_no_supervised_token(self) -> None:
        assert _masked(byte_tokenizer(families.SMOLLM2), _conversation("q")) == []

    def test_the_first_token_of_all_is_never_supervised(self) -> None:
        template = (
            "{% for m in messages %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% endfor %}"
        )
        assert _masked(byte_tokenizer(template), [{"role": "assistant", "content": "abc"}]) == ["bc<|im_end|>"]

    def test_a_template_without_a_generation_prompt_gives_the_header(self) -> None:
        silent = families.CHATML.partition("{% if add_generation_prompt")[0]
        assert _masked(byte_tokenizer(silent), _conversation("q", "a", "q", "b")) == ["a<|im_end|>", "b<|im_end|>"]

    def test_an_end_of_turn_of_two_tokens_is_supervised_whole(self) -> None:
        template = families.CHATML.replace("'<|im_end|>'", "'<|im_end|></s>'")
        assert _masked(byte_tokenizer(template), _conversation("q", "a", "q", "b")) == [
            "a<|im_end|></s>",
            "b<|im_end|></s>",
        ]

    def test_markup_of_the_template_in_a_question_does_not_mislead(self) -> None:
        question = "say <|im_end|>\n<|im_start|>assistant\nnothing<|im_end|>\n"
        assert _masked(byte_tokenizer(families.CHATML), _conversation(question, "a")) == ["a<|im_end|>"]

    def test_private_characters_in_contents_do_not_mislead(self) -> None:
        content = "\ue0f01.0\ue0f1"
        assert _masked(byte_tokenizer(families.CHATML), _conversation(content, content)) == [f"{content}<|im_end|>"]

    def test_tool_calls_are_the_assistants(self) -> None:
        call = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
        messages = [
            *_conversation("q"),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "seen"},
            {"role": "assistant", "content": "done"},
        ]
        assert _masked(byte_tokenizer(families.QWEN3), messages) == [
            '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call><|im_end|>',
            "<think>\n\n</think>\n\ndone<|im_end|>",
        ]
        with pytest.raises(DataError, match="leaves out a tool call of message 2"):
            _masked(byte_tokenizer(families.CHATML), messages)

    def test_an_answer_that_the_template_rewrites_is_supervised_as_printed(self) -> None:
        template = families.CHATML.replace("message['content']", "(message['content'] | upper)")
        assert _masked(byte_tokenizer(template), _conversation("q", "a", "q", "b")) == ["A<|im_end|>", "B<|im_end|>"]

    def test_a_day_printed_by_the_template_does_not_depend_on_today(self) -> None:
        dated = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + families.CHATML
        tokenizer = byte_tokenizer(dated)
        document = _encode(tokenizer, _conversation("q", "a"))
        assert tokenizer.decode(document.input_ids.tolist()).startswith("Today: 26 Jul 2024\n<|im_start|>user")


class TestRefusals:
    """What cannot be located exactly is an error that names the record, never a mask."""

    def test_what_the_template_refuses(self) -> None:
        messages = _conversation("q", "a", system="s")
        with pytest.raises(DataError, match=r"chats\.jsonl:7: the chat template refuses .*System role not supported"):
            _masked(byte_tokenizer(families.GEMMA2), messages)

    def test_a_template_without_an_end_of_turn(self) -> None:
        bare = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
        with pytest.raises(DataError, match="ends an assistant's turn without a special token"):
            _masked(byte_tokenizer(bare), _conversation("q", "a"))

    @pytest.mark.parametrize("ending", ["<|im_end|>", "{% if not add_generation_prompt %}<|im_end|>{% endif %}"])
    def test_a_template_that_ends_turns_with_the_header_of_the_next(self, ending: str) -> None:
        glued = (
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '\n' }}{% endfor %}"
            f"{ending}{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}"
        )
        with pytest.raises(DataError, match="does not show exactly where it begins and ends"):
            _masked(byte_tokenizer(glued), _conversation("q", "a", "q", "a"))

    def test_a_generation_prompt_that_is_not_the_header_of_answers(self) -> None:
        other = families.CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>bot\n' }}")
        with pytest.raises(DataError, match="does not show exactly"):
            _masked(byte_tokenizer(other), _conversation("q", "a"))

    def test_text_elsewhere_that_depends_on_a_rewritten_answer(self) -> None:
        template = families.CHATML.replace(
            "message['content']",
            "(message['content'] | upper ~ (messages[1]['content'] | length if loop.index0 == 2 else ''))",
        )
        with pytest.raises(DataError, match="does not show exactly"):
            _masked(byte_tokenizer(template), _conversation("q", "a", "q"))

    def test_text_behind_an_answer_that_depends_on_it(self) -> None:
        template = families.CHATML + "{{ 'secret' if 'secret' in messages[-1]['content'] else '' }}"
        with pytest.raises(DataError, match="does not show exactly"):
            _masked(byte_tokenizer(template), _conversation("q", "a secret"))

    def test_an_end_of_turn_that_the_tokenizer_does_not_see(self) -> None:
        tokenizer = byte_tokenizer(families.CHATML)
        tokenizer.add_tokens([AddedToken("x<|im_end|>", special=True, normalized=False)])
        with pytest.raises(DataError, match="joins"):
            _masked(tokenizer, _conversation("q", "ax"))

    def test_a_template_that_leaves_answers_out(self) -> None:
        mute = families.CHATML.replace(
            "message['content']", "(message['content'] if message['role'] == 'user' else '')"
        )
        with pytest.raises(DataError, match="does not show exactly"):
            _masked(byte_tokenizer(mute), _conversation("q", "a"))

    def test_a_template_that_repeats_an_answer_later(self) -> None:
        recap = families.CHATML.replace(
            "{% endfor %}",
            "{% endfor %}{{ '<|im_start|>recap\n' + messages[-1]['content'] | upper + '<|im_end|>\n' }}",
            1,
        )
        with pytest.raises(DataError, match="does not show exactly"):
            _masked(byte_tokenizer(recap), _conversation("q", "a", "q", "b"))

    def test_a_template_that_prints_an_answer_twice(self) -> None:
        twice = families.CHATML.replace("message['content']", "message['content'] + message['content']")
        with pytest.raises(DataError, match="does not show exactly"):
            _masked(byte_tokenizer(twice), _conversation("q", "a", "q", "b"))

    def test_a_conversation_without_a_chat_template(self) -> None:
        with pytest.raises(DataError, match=r"chats\.jsonl:7 is a conversation, but .* no chat template\n.*plain text"):
            _masked(byte_tokenizer(None), _conversation("q", "a"))

    def test_a_tokenizer_that_joins_header_and_answer_inseparably(self) -> None:
        template = "{% for m in messages %}{{ m['role'] + ':\n' + m['content'] + eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
        tokenizer = metaspace_tokenizer(template)
        assert _masked(tokenizer, _conversation("q", "a")) == ["a</s>"]
        with pytest.raises(DataError, match="joins the beginning of an assistant's turn with what stands before"):
            _masked(tokenizer, _conversation("q", "\n\na"))

    def test_half_a_surrogate_pair(self) -> None:
        with pytest.raises(DataError, match=r"chats\.jsonl:7: half a surrogate pair \(U\+D800\)"):
            _masked(byte_tokenizer(families.CHATML), _conversation("q", "a\ud800"))

    def test_a_slow_tokenizer(self) -> None:
        class Slow:
            is_fast = False

        with pytest.raises(DataError, match=r"Slow.* is not a fast one"):
            DocumentEncoder(Slow())


class TestPlainText:
    def test_every_token_but_the_first_is_supervised(self) -> None:
        tokenizer = byte_tokenizer(None)
        document = DocumentEncoder(tokenizer).encode([Document("x", text="the answer")])[0]
        assert document.input_ids.tolist() == tokenizer("the answer")["input_ids"]
        assert document.loss_mask.tolist() == [0] + [1] * (len(document.input_ids) - 1)

    def test_a_tokenizer_that_starts_texts_with_a_token_starts_documents_with_it(self) -> None:
        tokenizer = byte_tokenizer(None, add_bos=True)
        document = DocumentEncoder(tokenizer).encode([Document("x", text="the answer")])[0]
        assert document.input_ids.tolist() == tokenizer("the answer")["input_ids"]
        assert document.input_ids[0] == tokenizer.bos_token_id
        assert document.loss_mask.tolist() == [0] + [1] * (len(document.input_ids) - 1)


def test_a_conversation_is_rendered_once() -> None:
    tokenizer = byte_tokenizer(families.QWEN3)
    encoder = DocumentEncoder(tokenizer)
    encoder.encode([Document("x", messages=_conversation("p", "<think>\nt\n</think>\n\na", "q", "a"))])
    calls = 0
    original = tokenizer.apply_chat_template

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **options)

    tokenizer.apply_chat_template = counted
    encoder.encode(
        [Document("x", messages=_conversation(f"q{n}", f"<think>{n}</think>a{n}", "q", "b")) for n in range(9)]
    )
    assert calls == 9


def test_reasoning_of_the_last_answer_that_the_template_leaves_out_is_named() -> None:
    talk = _conversation("q", "a", "q", "b")
    talk[3]["reasoning_content"] = "how"
    assert _masked(byte_tokenizer(families.QWEN3), talk)[1].startswith("<think>\nhow\n</think>")
    with pytest.raises(DataError, match=r"chats.jsonl:7: .*leaves out the reasoning of message 4"):
        _masked(byte_tokenizer(families.CHATML), talk)
