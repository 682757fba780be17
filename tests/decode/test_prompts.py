"""Prompts reach the target as z-lab's client and a server would put them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import make_tiny_run

from dflash_mp.bench.tiny import tiny_tokenizer
from dflash_mp.config_file import load_config
from dflash_mp.data.store import PreparedDataset, Prompt
from dflash_mp.decode.prompts import PromptEncoder, ask, held_out_prompts, read_prompts
from dflash_mp.errors import DataError

CPU = torch.device("cpu")
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)


def write(file: Path, *records: dict[str, Any]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(file)


def test_records_of_every_shape_become_prompts(tmp_path: Path) -> None:
    user, bot = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}
    file = write(
        tmp_path / "some.jsonl",
        {"prompt": "hello", "canonical_solution": "return 1"},
        {"messages": [user, bot]},
        {"messages": [user, bot, user]},
        {"prompt": [user]},
        {"turns": ["hello", "and then?"]},
        {"question": "hello", "answer": "hi"},
        {"text": "Once upon"},
    )
    found = read_prompts(file, 100)
    assert found.name == "some"
    assert [prompt.messages for prompt in found.prompts] == [
        [user],
        [user],
        [user, bot, user],
        [user],
        [user],
        [user],
        None,
    ]
    assert found.prompts[-1].text == "Once upon"
    assert len(read_prompts(file, 2).prompts) == 2


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"nothing": 1}, r"p\.jsonl:2: no messages"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, r"p\.jsonl:2: nothing is asked"),
        ({"prompt": 5}, r"p\.jsonl:2: messages must be a list"),
    ],
)
def test_a_record_that_asks_nothing_is_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    file = write(tmp_path / "p.jsonl", {"prompt": "fine"}, record)
    with pytest.raises(DataError, match=message):
        read_prompts(file, 100)


def test_a_conversation_is_put_as_the_official_client_puts_it() -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = tokenizer.encode(text, add_special_tokens=False)
    got = PromptEncoder(tokenizer, "default").encode(Prompt(messages, None, "here"), CPU)
    assert got.tolist() == expected
    assert text.endswith("<|im_start|>assistant\n")


def test_the_thinking_mode_reaches_the_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING
    texts = {
        mode: tokenizer.decode(PromptEncoder(tokenizer, mode).encode(ask("2+2?"), CPU))  # type: ignore[arg-type]
        for mode in ("default", "on", "off")
    }
    assert texts["default"] == texts["on"]
    assert texts["off"] == texts["on"] + "<think></think>"


def test_a_text_is_continued_without_a_template() -> None:
    tokenizer = tiny_tokenizer(chat_template=False)
    encoder = PromptEncoder(tokenizer, "default")
    assert tokenizer.decode(encoder.encode(Prompt(None, "Once upon", "here"), CPU)) == "Once upon"
    with pytest.raises(DataError, match="no chat template"):
        encoder.encode(ask("2+2?"), CPU)
    with pytest.raises(DataError, match="is empty"):
        encoder.encode(Prompt(None, "", "here"), CPU)


def test_held_out_prompts_are_spread_over_all_of_them(tmp_path: Path) -> None:
    config = load_config(make_tiny_run(tmp_path)).config
    dataset = PreparedDataset.open(config.data.path)
    everything = list(dataset.held_out_prompts())
    assert len(everything) > 6
    some = held_out_prompts(dataset, 3).prompts
    assert [everything.index(prompt) for prompt in some] == [0, len(everything) // 3, 2 * len(everything) // 3]
    assert held_out_prompts(dataset, 1000).prompts == everything
