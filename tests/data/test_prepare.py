"""`prepare` keeps every token it should, decides the same everywhere, and leaves whole datasets or nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_families import CHATML, byte_tokenizer, supervised_texts
from prepared_data import data_config, pairs, prepare_pairs, stored_files, write_jsonl

from dflash_mp.config import DataConfig
from dflash_mp.data.manifest import read_manifest
from dflash_mp.data.prepare import prepare
from dflash_mp.data.row import SPLITS
from dflash_mp.data.store import PreparedDataset
from dflash_mp.errors import ConfigError, DataError


def _answers(dataset: PreparedDataset, split: Any) -> list[str]:
    tokenizer = byte_tokenizer(CHATML)
    rows = (dataset.row(split, index) for index in range(dataset.rows(split)))
    return [text for row in rows for text in supervised_texts(tokenizer, row.input_ids, row.loss_mask)]


def test_every_answer_is_supervised_in_exactly_one_row(tmp_path: Path) -> None:
    dataset = prepare_pairs(tmp_path)
    found = [answer for split in SPLITS for answer in _answers(dataset, split)]
    wanted = [f"{pair['response']}<|im_end|>" for pair in pairs(200)]
    tokenizer = byte_tokenizer(CHATML)
    kept = [text for text in wanted if len(tokenizer(text)["input_ids"]) >= 8]
    assert sorted(found) == sorted(kept)
    assert 0 < len(kept) < len(wanted)
    assert dataset.manifest.dropped() == {"fewer than 8 supervised tokens": len(wanted) - len(kept)}


def test_the_manifest_counts_what_is_stored(tmp_path: Path) -> None:
    dataset = prepare_pairs(tmp_path)
    for split, counts in (("train", dataset.manifest.train), ("held_out", dataset.manifest.held_out)):
        rows = [dataset.row(split, index) for index in range(counts.rows)]  # type: ignore[arg-type]
        assert counts.documents == sum(int(row.document_ids.max()) for row in rows)
        assert counts.tokens == sum(int((row.document_ids > 0).sum()) for row in rows)
        assert counts.supervised_tokens == sum(int(row.loss_mask.sum()) for row in rows)
        assert counts.padding_tokens == sum(int((row.document_ids == 0).sum()) for row in rows)
    (source,) = dataset.manifest.sources
    both = (dataset.manifest.train, dataset.manifest.held_out)
    assert source.documents == 200
    assert source.kept == sum(counts.documents for counts in both)
    assert source.tokens == sum(counts.tokens for counts in both)
    assert source.supervised_tokens == sum(counts.supervised_tokens for counts in both)


def test_the_same_input_gives_the_same_bytes_wherever_it_lies(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "elsewhere" / "deeper"
    prepare_pairs(one)
    prepare_pairs(other)
    assert stored_files(one / "prepared") == stored_files(other / "prepared")


def test_the_number_of_threads_does_not_matter(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", pairs(300))
    script = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[3:]\n"
        "from prepared_data import byte_tokenizer, data_config, prepare, CHATML\n"
        "prepare(data_config(Path(sys.argv[2]), Path(sys.argv[1])), byte_tokenizer(CHATML), seed=1)\n"
    )
    for threads in ("1", "3"):
        command = [
            sys.executable,
            "-c",
            script,
            str(tmp_path / "pairs.jsonl"),
            str(tmp_path / threads),
            str(Path(__file__).parent),
        ]
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}
        subprocess.run(command, check=True, env=environment, timeout=120)
    assert stored_files(tmp_path / "1") == stored_files(tmp_path / "3")


class TestHeldOut:
    def test_copies_of_a_document_are_on_one_side(self, tmp_path: Path) -> None:
        records = pairs(60)
        asked = [{"messages": _as_messages(pair)} for pair in records]
        sources = [write_jsonl(tmp_path / "a.jsonl", records), write_jsonl(tmp_path / "b.jsonl", asked)]
        config = data_config(tmp_path / "prepared", *sources, held_out=0.4, min_supervised_tokens=2)
        prepare(config, byte_tokenizer(CHATML), seed=3)
        dataset = PreparedDataset.open(config.path)
        train, held_out = (_answers(dataset, split) for split in SPLITS)
        assert len(train) + len(held_out) == 120
        assert held_out
        assert not set(train) & set(held_out)

    def test_another_source_moves_no_document(self, tmp_path: Path) -> None:
        sources = [write_jsonl(tmp_path / "a.jsonl", pairs(60)), write_jsonl(tmp_path / "b.jsonl", pairs(60, seed=9))]
        sides = []
        for name, used in (("one", sources[:1]), ("two", sources[::-1])):
            config = data_config(tmp_path / name, *used, min_supervised_tokens=2)
            prepare(config, byte_tokenizer(CHATML), seed=3)
            sides.append(set(_answers(PreparedDataset.open(config.path), "held_out")))
        assert sides[0]
        assert sides[0] < sides[1]

    def test_the_seed_decides_and_the_share_is_met(self, tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "a.jsonl", pairs(1000))
        sides = []
        for seed in (1, 2):
            config = data_config(tmp_path / str(seed), source, min_supervised_tokens=2)
            prepare(config, byte_tokenizer(CHATML), seed=seed)
            sides.append(set(_answers(PreparedDataset.open(config.path), "held_out")))
        assert sides[0] != sides[1]
        assert all(150 < len(side) < 250 for side in sides)

    def test_prompts_end_where_the_last_answer_begins(self, tmp_path: Path) -> None:
        talk = [
            {"messages": [*_as_messages(a), *_as_messages(b)]} for a, b in zip(pairs(40), pairs(40, 1), strict=True)
        ]
        source = write_jsonl(tmp_path / "talks.jsonl", talk)
        config = data_config(tmp_path / "prepared", source, min_supervised_tokens=2)
        prepare(config, byte_tokenizer(CHATML), seed=1)
        prompts = list(PreparedDataset.open(config.path).held_out_prompts())
        asked = [record["messages"][:-1] for record in talk]
        assert prompts
        for prompt in prompts:
            line = int(prompt.source.rpartition(":")[2])
            assert prompt.source == f"talks.jsonl:{line}"
            assert prompt.messages == asked[line - 1]

    def test_a_prompt_never_needs_more_than_the_document_kept(self, tmp_path: Path) -> None:
        long = {
            "messages": [
                *_as_messages(pairs(1)[0]),
                {"role": "user", "content": "x" * 400},
                *_as_messages(pairs(2)[1])[1:],
            ]
        }
        source = write_jsonl(tmp_path / "talks.jsonl", [long, *pairs(90)])
        config = data_config(tmp_path / "prepared", source, held_out=0.9, min_supervised_tokens=2)
        prepare(config, byte_tokenizer(CHATML), seed=0)
        prompts = {prompt.source: prompt for prompt in PreparedDataset.open(config.path).held_out_prompts()}
        assert prompts["talks.jsonl:1"].messages == long["messages"][:1]

    def test_of_a_text_the_prompt_is_the_first_part(self, tmp_path: Path) -> None:
        texts = [{"text": f"{n} " + " ".join(pair["response"] for pair in pairs(4, n))} for n in range(40)]
        source = write_jsonl(tmp_path / "texts.jsonl", texts)
        config = data_config(tmp_path / "prepared", source)
        prepare(config, byte_tokenizer(None), seed=1)
        prompts = list(PreparedDataset.open(config.path).held_out_prompts())
        assert prompts
        for prompt in prompts:
            whole = texts[int(prompt.source.rpartition(":")[2]) - 1]["text"]
            assert prompt.text
            assert whole.startswith(prompt.text + " ")
            assert len(prompt.text) <= len(whole) / 2

    def test_none_at_all_is_said(self, tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "a.jsonl", pairs(3))
        said: list[str] = []
        config = data_config(tmp_path / "prepared", source, held_out=0.001, min_supervised_tokens=2)
        prepare(config, byte_tokenizer(CHATML), seed=1, say=said.append)
        assert "no document fell into the held-out share of 0.001" in said[0]


class TestCutting:
    def test_a_long_document_is_cut_and_recounted(self, tmp_path: Path) -> None:
        tokenizer = byte_tokenizer(CHATML)
        source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "response": "z" * 500}])
        config = data_config(tmp_path / "prepared", source, max_document_tokens=64, held_out=0)
        manifest = prepare(config, tokenizer, seed=0)
        row = PreparedDataset.open(config.path).row("train", 0)
        assert int((row.document_ids == 1).sum()) == manifest.train.tokens == 64
        assert manifest.sources[0].cut == 1
        (answer,) = supervised_texts(tokenizer, row.input_ids, row.loss_mask)
        assert set(answer) == {"z"}
        assert manifest.train.supervised_tokens == int(row.loss_mask.sum()) == len(answer)

    def test_what_is_dropped_has_a_reason(self, tmp_path: Path) -> None:
        records = [
            {"prompt": "q", "response": "z" * 50},
            {"prompt": "q", "response": ""},
            {"prompt": "q" * 500, "response": "z" * 50},
            {"messages": [{"role": "user", "content": "q"}]},
        ]
        config = data_config(tmp_path / "prepared", write_jsonl(tmp_path / "a.jsonl", records), held_out=0)
        manifest = prepare(config, byte_tokenizer(CHATML), seed=0)
        assert manifest.train.documents == 1
        assert manifest.dropped() == {
            "fewer than 8 supervised tokens": 1,
            "fewer than 8 supervised tokens in the first 256": 1,
            "no assistant turn": 1,
        }


class TestWholeOrNotAtAll:
    def test_a_bad_line_leaves_nothing(self, tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "a" / "x.jsonl", [*pairs(1200), {"prompt": 1, "response": 2}])
        with pytest.raises(DataError, match=r"x\.jsonl:1201: prompt is int"):
            prepare(data_config(tmp_path / "out" / "prepared", source), byte_tokenizer(CHATML), seed=0)
        assert list((tmp_path / "out").iterdir()) == []

    def test_an_interrupted_replacement_leaves_the_old_dataset(self, tmp_path: Path) -> None:
        prepare_pairs(tmp_path)
        before = stored_files(tmp_path / "prepared")
        source = write_jsonl(tmp_path / "b.jsonl", pairs(10, seed=5))

        def interrupt(documents: int, tokens: int) -> None:
            raise KeyboardInterrupt

        config = data_config(tmp_path / "prepared", source)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, byte_tokenizer(CHATML), seed=1, force=True, advance=interrupt)
        assert stored_files(tmp_path / "prepared") == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["b.jsonl", "pairs.jsonl", "prepared"]

    def test_what_a_killed_process_left_is_removed(self, tmp_path: Path) -> None:
        left = tmp_path / ".prepared.preparing"
        (left / "deeper").mkdir(parents=True)
        (left / "train-00000.input_ids.npy").write_bytes(b"half")
        prepare_pairs(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.jsonl", "prepared"]
        PreparedDataset.open(tmp_path / "prepared").verify()
        assert not (tmp_path / "prepared" / "deeper").exists()

    def test_two_at_once_do_not_mix(self, tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "pairs.jsonl", pairs(50))
        config = data_config(tmp_path / "prepared", source)

        def start_another(documents: int, tokens: int) -> None:
            with pytest.raises(DataError, match="another dflash-mp prepare is writing"):
                prepare(config, byte_tokenizer(CHATML), seed=1)

        prepare(config, byte_tokenizer(CHATML), seed=1, advance=start_another)
        PreparedDataset.open(config.path).verify()

    def test_a_directory_with_something_else_is_not_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "prepared").mkdir()
        (tmp_path / "prepared" / "thesis.tex").touch()
        source = write_jsonl(tmp_path / "pairs.jsonl", pairs(50))
        with pytest.raises(DataError, match="is no prepared dataset, so it will not be replaced"):
            prepare(data_config(tmp_path / "prepared", source), byte_tokenizer(CHATML), seed=1, force=True)
        assert (tmp_path / "prepared" / "thesis.tex").exists()

    def test_a_destination_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        source = write_jsonl(tmp_path / "pairs.jsonl", pairs(50))
        with pytest.raises(DataError, match="cannot write"):
            prepare(data_config(tmp_path / "file" / "prepared", source), byte_tokenizer(CHATML), seed=1)


class TestPreparedAlready:
    @pytest.fixture
    def config(self, tmp_path: Path) -> DataConfig:
        config = data_config(tmp_path / "prepared", write_jsonl(tmp_path / "pairs.jsonl", pairs(100)))
        prepare(config, byte_tokenizer(CHATML), seed=1)
        return config

    def test_the_same_again_is_left_as_it_is(self, config: DataConfig) -> None:
        before = (config.path / "manifest.json").stat().st_mtime_ns
        said: list[str] = []
        manifest = prepare(config, byte_tokenizer(CHATML), seed=1, say=said.append)
        assert (config.path / "manifest.json").stat().st_mtime_ns == before
        assert manifest == read_manifest(config.path)
        assert "is already there" in said[0]

    def test_other_settings_need_force(self, config: DataConfig) -> None:
        other = config.model_copy(update={"row_tokens": 512, "max_document_tokens": 256})
        with pytest.raises(DataError, match=r"made with other seed, row_tokens\n.*--force"):
            prepare(other, byte_tokenizer(CHATML), seed=2)
        assert prepare(other, byte_tokenizer(CHATML), seed=2, force=True).row_tokens == 512
        assert PreparedDataset.open(config.path).manifest.row_tokens == 512
        assert [path.name for path in config.path.parent.iterdir() if path.name.startswith(".")] == []

    def test_other_content_of_a_source_needs_force(self, config: DataConfig) -> None:
        path = Path(config.sources[0].path)
        path.write_text(path.read_text().replace("question 7", "question 8"))
        with pytest.raises(DataError, match="made with other sources"):
            prepare(config, byte_tokenizer(CHATML), seed=1)

    def test_another_tokenizer_or_template_needs_force(self, config: DataConfig) -> None:
        tokenizer = byte_tokenizer(CHATML.replace("assistant", "model"))
        tokenizer.add_tokens(["<new>"])
        with pytest.raises(DataError, match="made with other tokenizer, chat_template"):
            prepare(config, tokenizer, seed=1)

    def test_a_damaged_dataset_is_not_taken_for_finished(self, config: DataConfig) -> None:
        (config.path / "train-00000.lengths.npy").unlink()
        with pytest.raises(DataError, match=r"train-00000\.lengths\.npy"):
            prepare(config, byte_tokenizer(CHATML), seed=1)
        prepare(config, byte_tokenizer(CHATML), seed=1, force=True)
        PreparedDataset.open(config.path).verify()


def test_without_sources_there_is_nothing_to_prepare(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.sources is empty"):
        prepare(data_config(tmp_path / "prepared"), byte_tokenizer(CHATML), seed=0)


def test_when_everything_is_dropped_the_reasons_are_given(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "response": "a"}] * 3)
    with pytest.raises(DataError, match=r"no document is left to train on \(dropped: 3 with fewer than 8"):
        prepare(data_config(tmp_path / "prepared", source), byte_tokenizer(CHATML), seed=0)
    assert not (tmp_path / "prepared").exists()


def test_memory_does_not_grow_with_the_number_of_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_mp.data.prepare._BATCH_DOCUMENTS", 64)
    peaks = []
    for count in (1000, 4000):
        source = write_jsonl(tmp_path / f"{count}.jsonl", [{"text": f"{n} is the answer"} for n in range(count)])
        config = data_config(tmp_path / str(count), source, min_supervised_tokens=2, shard_tokens=4096)
        tracemalloc.start()
        prepare(config, byte_tokenizer(None), seed=0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        shutil.rmtree(config.path)
    assert peaks[1] < 1.2 * peaks[0]


def test_thinking_reaches_the_template_and_the_manifest(tmp_path: Path) -> None:
    template = CHATML + "{% if enable_thinking is defined %}{{ 'thinking ' + enable_thinking | string }}{% endif %}"
    for thinking, printed in (("default", ""), ("on", "thinking True"), ("off", "thinking False")):
        source = write_jsonl(
            tmp_path / "a.jsonl", [{"prompt": "q", "response": "the answer is there and then it was gone"}]
        )
        config = data_config(tmp_path / thinking, source, thinking=thinking, held_out=0)
        manifest = prepare(config, byte_tokenizer(template), seed=0)
        row = PreparedDataset.open(config.path).row("train", 0)
        text = byte_tokenizer(template).decode(row.input_ids[row.document_ids == 1].tolist())
        assert manifest.thinking == thinking
        assert text.endswith(f"<|im_end|>\n{printed}")


def test_the_end_of_an_answer_that_was_cut_is_not_supervised(tmp_path: Path) -> None:
    whole = {"prompt": "question", "response": "one two three four"}
    source = write_jsonl(tmp_path / "cut.jsonl", [whole, {**whole, "finish_reason": "length"}])
    config = data_config(tmp_path / "kept", source, held_out=0.0)
    prepare(config, byte_tokenizer(CHATML), seed=1)
    row = PreparedDataset.open(config.path).row("train", 0)
    first, second = (row.document_ids == number for number in (1, 2))
    np.testing.assert_array_equal(row.input_ids[first], row.input_ids[second])
    differs = np.flatnonzero(row.loss_mask[first] != row.loss_mask[second])
    assert differs.tolist() == [np.flatnonzero(row.loss_mask[first])[-1]]
    assert row.loss_mask[second][differs[0]] == 0

    config = data_config(tmp_path / "dropped", source, held_out=0.0, unfinished="drop")
    manifest = prepare(config, byte_tokenizer(CHATML), seed=1)
    assert manifest.dropped() == {"answer cut when generated": 1}
    with pytest.raises(DataError, match="other unfinished"):
        prepare(config.model_copy(update={"unfinished": "keep"}), byte_tokenizer(CHATML), seed=1)


def test_manifest_is_plain_json_without_times(tmp_path: Path) -> None:
    prepare_pairs(tmp_path)
    tree = json.loads((tmp_path / "prepared" / "manifest.json").read_text())
    assert {"fingerprint", "format", "row_tokens", "seed", "thinking", "tokenizer", "chat_template"} <= set(tree)
    assert not [key for key in tree if "time" in key or "date" in key]
    assert np.sum([file["bytes"] for file in tree["files"].values()]) > 0


def _as_messages(pair: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair["response"]}]
