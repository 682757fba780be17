"""The configuration: what is refused, with which words, and where values come from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_mp.config_file import describe_config, load_config
from dflash_mp.errors import ConfigError

SMALLEST: dict[str, Any] = {
    "run_dir": "runs/a",
    "target": {"path": "t"},
    "data": {"path": "d"},
    "train": {"steps": 10},
}


def write(tmp_path: Path, tree: object) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return file


def with_value(key: str, value: object) -> dict[str, Any]:
    """The smallest configuration with one dotted key set."""
    section, _, name = key.partition(".")
    if not name:
        return {**SMALLEST, section: value}
    return {**SMALLEST, section: {**SMALLEST.get(section, {}), name: value}}


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert caught.value.exit_code == 2
    assert caught.value.remedy
    return caught.value.what


def test_the_smallest_configuration_is_complete(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SMALLEST)).config
    assert config.train.steps == 10
    assert config.data.row_tokens == 2048


@pytest.mark.parametrize("key", ["run_dir", "target.path", "data.path", "train.steps", "train"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    section, _, name = key.partition(".")
    tree = {k: dict(v) if isinstance(v, dict) else v for k, v in SMALLEST.items()}
    del (tree[section] if name else tree)[name or section]
    assert f"{key}: required, but not given" in refusal(write(tmp_path, tree))


@pytest.mark.parametrize("key", ["color", "train.step", "target.pth", "data.sources"])
def test_an_unknown_key_is_named(tmp_path: Path, key: str) -> None:
    value: object = [{"path": "a.jsonl", "pth": 1}] if key == "data.sources" else 1
    expected = "data.sources.0.pth" if key == "data.sources" else key
    assert f"{expected}: unknown key" in refusal(write(tmp_path, with_value(key, value)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.steps", "many"),
        ("train.steps", 1.5),
        ("train.steps", 0),
        ("train.learning_rate", -1),
        ("train.betas", 0.9),
        ("train.schedule", "linear"),
        ("target.layer_ids", "1,2"),
        ("data.held_out", 1.0),
        ("feed", 3),
        ("seed", -1),
    ],
)
def test_a_wrong_type_or_value_is_named_and_shown(tmp_path: Path, key: str, value: object) -> None:
    message = refusal(write(tmp_path, with_value(key, value)))
    assert key in message
    assert f"got {value!r}" in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["drafter.block_size=64", "data.row_tokens=32"], ("drafter.block_size (64)", "data.row_tokens (32)")),
        (["data.max_document_tokens=4096"], ("max_document_tokens (4096)", "row_tokens (2048)")),
        (["feed.endpoints=[ipc:///a, ipc:///b]", "feed.devices=[cpu]"], ("feed.devices", "feed.endpoints")),
        (["feed.count=3", "feed.devices=[cuda:0, cuda:1]"], ("feed.devices", "feed.count")),
        (
            ["feed.tensor_parallel=2", "target.device=cuda:0"],
            ("feed.tensor_parallel (2)", "feeder 0 has cuda:0 and cuda:0"),
        ),
        (
            ["feed.tensor_parallel=2", "feed.devices=[cuda, cuda:0]"],
            ("feed.tensor_parallel (2)", "name 2 in feed.devices"),
        ),
    ],
)
def test_values_that_cannot_go_together_are_refused(
    tmp_path: Path, overrides: list[str], words: tuple[str, str]
) -> None:
    message = refusal(write(tmp_path, SMALLEST), *overrides)
    for word in words:
        assert word in message


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, with_value("train.stepz", 3)), "data.row_tokens=x", "feed.count=-1")
    for key in ("train.stepz", "data.row_tokens", "feed.count"):
        assert key in message


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert "not a mapping" in refusal(write(tmp_path, text))


def test_broken_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    assert "line 2" in refusal(write(tmp_path, "run_dir: a\ntrain: [1\n"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none.yaml") in refusal(tmp_path / "none.yaml")


def test_set_overrides_the_file_and_creates_sections(tmp_path: Path) -> None:
    overrides = ["train.steps=20", "feed.count=2", "target.layer_ids=[1, 5]", "train.compile=null"]
    config = load_config(write(tmp_path, SMALLEST), overrides).config
    assert (config.train.steps, config.feed.count, config.target.layer_ids) == (20, 2, [1, 5])
    assert config.train.compile is None


def test_the_last_set_of_a_key_counts(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, SMALLEST), ["train.steps=20", "train.steps=30"]).config.train.steps == 30


@pytest.mark.parametrize("text", ["train.steps", "=3", "train..steps=3", ".steps=3", "run_dir.a=3", "train.steps=[1"])
def test_a_malformed_set_is_refused(tmp_path: Path, text: str) -> None:
    assert "--set" in refusal(write(tmp_path, SMALLEST), text)


def test_a_wrong_key_in_set_is_named(tmp_path: Path) -> None:
    assert "train.stps: unknown key" in refusal(write(tmp_path, SMALLEST), "train.stps=3")


def test_each_value_knows_its_source(tmp_path: Path) -> None:
    tree = with_value("train.warmup_ratio", 0.1)
    loaded = load_config(write(tmp_path, tree), ["train.steps=20", "drafter={layers: 2}"])
    described = {key: (value, source) for key, value, source in describe_config(loaded)}
    assert described["train.steps"] == ("20", "--set")
    assert described["train.warmup_ratio"] == ("0.1", "file")
    assert described["train.clip"] == ("1.0", "default")
    assert described["drafter.layers"] == ("2", "--set")
    assert described["drafter.block_size"] == ("16", "default")
    assert described["run_dir"] == ("runs/a", "file")


def test_ipc_addresses_differ_by_run_directory_and_feeder(tmp_path: Path) -> None:
    file = write(tmp_path, with_value("feed.count", 2))
    one = load_config(file).config.feeder_endpoints()
    other = load_config(file, ["run_dir=runs/b"]).config.feeder_endpoints()
    assert len({*one, *other}) == 4
    assert load_config(file).config.feeder_endpoints() == one


def test_the_configurations_that_come_with_the_project_are_valid() -> None:
    files = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
    assert files
    for file in files:
        load_config(file)


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_words_that_yaml_once_took_for_booleans_are_words(tmp_path: Path, thinking: str) -> None:
    in_file = write(tmp_path, yaml.safe_dump(SMALLEST).replace("path: d", f"path: d\n  thinking: {thinking}"))
    assert load_config(in_file).config.data.thinking == thinking
    overridden = load_config(write(tmp_path, SMALLEST), [f"data.thinking={thinking}", f"train.compile={thinking}"])
    assert overridden.config.data.thinking == thinking
    assert overridden.config.train.compile is (thinking == "on")


def test_numbers_are_what_they_look_like(tmp_path: Path) -> None:
    file = write(tmp_path, SMALLEST)
    assert load_config(file, ["seed=010"]).config.seed == 10
    assert load_config(file, ["seed=0x10"]).config.seed == 16
    assert load_config(file, ["run_dir=2026-11-30"]).config.run_dir == Path("2026-11-30")
    assert "--set train.steps: Input should be a valid integer" in refusal(file, "train.steps=1:30")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("train.betas", [0.9, beta]) for beta in (2, 1, -0.1)),
        *(("train.learning_rate", rate) for rate in (float("inf"), float("nan"))),
        ("eval.temperature", float("inf")),
    ],
)
def test_numbers_beyond_reason_are_refused(tmp_path: Path, key: str, value: object) -> None:
    assert key in refusal(write(tmp_path, with_value(key, value)))


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    text = yaml.safe_dump(SMALLEST) + "train:\n  steps: 4\n"
    assert re.search(r"key train is given twice[\s\S]*line \d+[\s\S]*line \d+", refusal(write(tmp_path, text)))
    assert "key steps is given twice" in refusal(write(tmp_path, SMALLEST), "train={steps: 1, steps: 2}")


@pytest.mark.parametrize(
    "text", ["a: !!int x", "a: !!bool x", "a: !!timestamp x", "a: {[b]: c}", "a: " + "[" * 5000, "a: &b [*b", "a: \0"]
)
def test_what_yaml_cannot_read_is_one_error(tmp_path: Path, text: str) -> None:
    assert "is not valid YAML" in refusal(write(tmp_path, text))
    assert "is not valid YAML" in refusal(write(tmp_path, SMALLEST), f"train.steps={text[3:]}")


def test_a_section_without_keys_is_an_empty_one(tmp_path: Path) -> None:
    text = yaml.safe_dump({**SMALLEST, "train": None, "feed": None})
    assert refusal(write(tmp_path, text)).endswith("train.steps: required, but not given")
    assert load_config(write(tmp_path, text), ["train.steps=5"]).config.train.steps == 5


def test_an_error_is_blamed_on_who_gave_the_value(tmp_path: Path) -> None:
    file = write(tmp_path, with_value("train.step", 1))
    assert refusal(file, "data.pth=x") == f"{file}: train.step: unknown key; --set data.pth: unknown key"
