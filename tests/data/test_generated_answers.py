"""What `prepare` makes of generated answers: the cut, the refused, and those that were made for another target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_families import CHATML, QWEN3, byte_tokenizer
from prepared_data import data_config, write_jsonl

from dflash_mp.data.chat_template import chat_template_fingerprint
from dflash_mp.data.documents import Record, to_document
from dflash_mp.data.encoding import DocumentEncoder, tokenizer_fingerprint
from dflash_mp.data.prepare import prepare
from dflash_mp.errors import DataError


def test_an_answer_that_was_cut_inside_its_thought_is_left_out(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "question"}
    cut: list[dict[str, Any]] = [
        {"content": "<think>one two three four"},
        {"content": "<think>one</think>two three <think>four"},
        {"content": "", "reasoning_content": "one two three four"},
        {"content": None, "reasoning": "one two three four"},
    ]
    whole = {"content": "<think>one</think>two three four"}
    talks = [[asked, {"role": "assistant", **answer}] for answer in [*cut, whole]]
    source = write_jsonl(tmp_path / "cut.jsonl", [{"messages": talk, "finish_reason": "length"} for talk in talks])
    config = data_config(tmp_path / "kept", source, held_out=0.0)
    manifest = prepare(config, byte_tokenizer(QWEN3), seed=1)
    assert manifest.dropped() == {"answer cut inside its thought when generated": 4}
    assert (manifest.sources[0].documents, manifest.train.documents) == (5, 1)
    opens = CHATML.replace("assistant\n'", "assistant\n<think>'")
    document = to_document(Record("x:1", {"prompt": "question", "response": "one two three"}))
    assert DocumentEncoder(byte_tokenizer(opens)).opens_thought()
    assert not DocumentEncoder(byte_tokenizer(CHATML)).opens_thought()
    assert replace(document, unfinished=True).cut_inside_thought(True)
    assert not document.cut_inside_thought(True)
    assert not replace(document, unfinished=True).cut_inside_thought(False)


def test_answers_of_another_target_template_or_mode_are_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "answers.jsonl", [{"prompt": "question", "response": "one two three four five"}])
    beside = tmp_path / "answers.jsonl.settings.json"
    tokenizer = byte_tokenizer(CHATML)
    own = {
        "thinking": "default",
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": chat_template_fingerprint(tokenizer),
    }
    config = data_config(tmp_path / "kept", source, held_out=0.0)
    for key, value in own.items():
        beside.write_text(json.dumps({**own, key: "other"}))
        wanted = rf"answers.jsonl was generated with {key} other, and is prepared with {key} {value}"
        with pytest.raises(DataError, match=wanted):
            prepare(config, tokenizer, seed=1)
    beside.write_text("{")
    with pytest.raises(DataError, match="settings of"):
        prepare(config, tokenizer, seed=1)
    beside.write_text(json.dumps({**own, "temperature": 1}))
    assert prepare(config, tokenizer, seed=1).train.documents == 1
    beside.write_text(json.dumps({"server": "http://host/v1", "thinking": "default"}))
    prepare(config, tokenizer, seed=1, force=True)
