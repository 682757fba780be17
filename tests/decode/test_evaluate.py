"""`dflash-mp eval` and `dflash-mp generate` on a tiny run, from the command line."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from rich.console import Console
from tiny_checkpoint import write_tiny_checkpoint
from tiny_run import make_tiny_run

from dflash_mp.bench.tiny import tiny_tokenizer, write_tiny_target
from dflash_mp.cli import main
from dflash_mp.config_file import load_config
from dflash_mp.decode.evaluate import DrafterResult, Evaluation, SetResult
from dflash_mp.decode.generate import TextStream
from dflash_mp.decode.measure import Figures
from dflash_mp.decode.report import print_report
from dflash_mp.export import export_checkpoint


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a prepared run with one checkpoint."""
    file = make_tiny_run(tmp_path_factory.mktemp("run"))
    write_tiny_checkpoint(load_config(file).config)
    return file


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def short(*arguments: object) -> tuple[object, ...]:
    return (*arguments, "--set", "eval.max_new_tokens=12")


def test_trained_and_untrained_are_measured_on_held_out_prompts_and_files(run_file: Path, tmp_path: Path) -> None:
    prompts, figures = tmp_path / "mine.jsonl", tmp_path / "out" / "eval.json"
    prompts.write_text('{"prompt": "a red cat"}\n{"prompt": "' + "x" * 5000 + '"}\n')
    options = ("--untrained", "--prompts", "held_out", "--prompts", prompts, "--limit", 3, "--json", figures)
    result = call(*short("eval", "-c", run_file, *options))
    assert result.exit_code == 0, result.output
    assert "untrained" in result.output
    assert "step 4" in result.output
    assert "3 of 3" in result.output
    assert "too long for the target's context: 1" in result.output
    tree = json.loads(figures.read_text())
    assert [s["name"] for s in tree["sets"]] == ["held_out", "mine"]
    for s, count in zip(tree["sets"], (3, 1), strict=True):
        assert s["plain"]["prompts"] == count
        assert [d["name"] for d in s["drafters"]] == ["untrained", "step 4"]
        for drafter in s["drafters"]:
            found = drafter["figures"]
            assert drafter["differing"] == []
            assert found["tokens"] == s["plain"]["tokens"]
            assert sum(found["lengths"]) == found["blocks"]
            assert 1 <= found["tau"] <= 4


def test_before_training_the_untrained_drafter_is_measured_alone(run_file: Path, tmp_path: Path) -> None:
    nothing_there = ("--set", f"run_dir={tmp_path / 'none'}")
    result = call(*short("eval", "-c", run_file, "--untrained", "--limit", 1, *nothing_there))
    assert result.exit_code == 0, result.output
    assert "untrained" in result.output
    assert "step" not in result.output


def test_an_export_measures_as_the_checkpoint_it_came_from(run_file: Path, tmp_path: Path) -> None:
    config = load_config(run_file).config
    export_checkpoint(config.run_dir, tmp_path / "drafter", dtype="float32")
    trees = []
    for number, drafter in enumerate((config.run_dir, tmp_path / "drafter")):
        file = tmp_path / f"{number}.json"
        result = call(*short("eval", "-c", run_file, "--drafter", drafter, "--limit", 2, "--json", file))
        assert result.exit_code == 0, result.output
        trees.append(json.loads(file.read_text())["sets"][0]["drafters"][0]["figures"])
    for tree in trees:
        del tree["tokens_per_second"]
    assert trees[0] == trees[1]


def test_sampling_is_measured_without_comparing_outputs(run_file: Path, tmp_path: Path) -> None:
    trees = []
    for number in range(2):
        file = tmp_path / f"{number}.json"
        options = ("--set", "eval.temperature=1.5", "--limit", 2, "--json", file)
        result = call(*short("eval", "-c", run_file, *options))
        assert result.exit_code == 0, result.output
        assert "temperature 1.5" in result.output
        trees.append(json.loads(file.read_text())["sets"][0]["drafters"][0])
    assert trees[0]["differing"] is None
    assert trees[0]["figures"]["lengths"] == trees[1]["figures"]["lengths"]


def change(run_file: Path, tmp_path: Path, section: str, **values: Any) -> Path:
    tree = yaml.safe_load(run_file.read_text())
    tree[section].update(values)
    file = tmp_path / "changed.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def test_a_drafter_of_another_target_is_refused(run_file: Path, tmp_path: Path) -> None:
    write_tiny_target(tmp_path / "other", hidden=64, heads=2, layers=6)
    file = change(run_file, tmp_path, "target", path=str(tmp_path / "other"))
    result = call("eval", "-c", file)
    assert result.exit_code == 6
    assert "hidden size 96 instead of 64, target layers 4 instead of 6" in result.output


def test_prompts_prepared_or_a_drafter_trained_with_another_chat_template_are_refused(
    run_file: Path, tmp_path: Path
) -> None:
    write_tiny_target(tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "model")
    tokenizer.save_pretrained(tmp_path / "other")
    file = change(run_file, tmp_path, "target", path=str(tmp_path / "other"))
    result = call("eval", "-c", file)
    assert result.exit_code == 3
    assert "prepared with another chat template" in result.output
    result = call("generate", "-c", file, "hello")
    assert result.exit_code == 6
    assert "trained with another chat template" in result.output


def test_a_drafter_trained_in_another_thinking_mode_is_refused(run_file: Path, tmp_path: Path) -> None:
    config = load_config(run_file).config
    export_checkpoint(config.run_dir, tmp_path / "drafter")
    file = tmp_path / "drafter" / "config.json"
    tree = json.loads(file.read_text())
    tree["dflash_mp"]["thinking"] = "on"
    file.write_text(json.dumps(tree))
    result = call("eval", "-c", run_file, "--drafter", tmp_path / "drafter")
    assert result.exit_code == 2
    assert "trained with thinking on, the prompts are prepared with default" in result.output


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--set", "run_dir={tmp}"], 6, "holds neither a checkpoint nor an exported drafter"),
        (["--set", "data.path={tmp}/none"], 3, "does not exist"),
        (["--prompts", "{tmp}/none.jsonl"], 3, "does not exist"),
        (["--prompts", "{tmp}/bad.jsonl"], 3, "bad.jsonl:2: not valid JSON"),
        (["--set", "eval.max_new_tokens=4096"], 3, "leaves room for 4096 new tokens"),
        (["--set", "eval.top_p=0"], 2, "eval.top_p"),
    ],
)
def test_what_cannot_be_evaluated_is_one_message(
    run_file: Path, tmp_path: Path, options: list[str], code: int, message: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "fine"}\n{"prompt": \n')
    result = call("eval", "-c", run_file, *(option.format(tmp=tmp_path) for option in options))
    assert result.exit_code == code, result.output
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize("place", ["figures.json", "new/figures.json"])
def test_a_file_of_figures_that_cannot_be_written_is_refused_before_any_work(small_disk: Path, place: str) -> None:
    (small_disk / "file").write_text("")
    words = ("eval", "-c", small_disk / "none.yaml", "--json")
    _check_refused(call(*words, small_disk / "file" / place))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    _check_refused(call(*words, small_disk / place))
    _check_refused(call(*words, small_disk / "file"))


def _check_refused(result: Result) -> None:
    assert result.exit_code == 2
    assert "Invalid value for '--json'" in result.output


def test_checking_the_file_of_figures_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for place in (tmp_path / "file", tmp_path / "new" / "figures.json"):
        result = call("eval", "-c", tmp_path / "none.yaml", "--json", place)
        assert "cannot read the configuration" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_figures_that_could_not_be_written_were_shown_before(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "figures.json").symlink_to("/dev/full")
    result = call(*short("eval", "-c", run_file, "--limit", 1, "--json", tmp_path / "figures.json"))
    assert result.exit_code == 1
    assert "No space left" in result.output
    assert 0 < result.output.find("slot accepted") < result.output.find("cannot write")


@pytest.mark.parametrize(("dtype", "text"), [("float32", "in float32 it must not"), ("bfloat16", "rounds otherwise")])
def test_differing_outputs_are_reported_with_their_place(dtype: str, text: str) -> None:
    found = Figures(3, 30, 9.0, 10, 2.7, 2.6, [0.9, 0.5], [1, 1, 8])
    result = SetResult("mine", 0, found, [DrafterResult("step 9", found, 1.5, [(2, 17)])])
    options = {"temperature": 0.0, "max_new_tokens": 10}
    out = io.StringIO()
    print_report(Evaluation("t", dtype, "cpu", "default", options, [result]), Console(file=out, width=80))
    assert "prompt 2 from token 17" in " ".join(out.getvalue().split())
    assert text in " ".join(out.getvalue().split())
    assert "2 of 3" in out.getvalue()


def test_a_block_of_sixteen_fits_a_terminal_of_eighty_columns() -> None:
    found = Figures(3, 30, 9.0, 10, 2.7, 2.6, [1.0] * 15, [10] * 16)
    result = SetResult("mine", 0, found, [DrafterResult("untrained", found, 1.5, [])])
    out = io.StringIO()
    options = {"temperature": 0.0, "max_new_tokens": 10}
    print_report(Evaluation("t", "float32", "cpu", "default", options, [result]), Console(file=out, width=80))
    line = next(line for line in out.getvalue().splitlines() if "slot accepted" in line)
    assert line.split() == ["slot", "accepted", *["100"] * 15]


def test_generate_streams_the_answer_and_its_figures(run_file: Path) -> None:
    result = call(*short("generate", "-c", run_file, "a red cat", "--no-color"))
    assert result.exit_code == 0, result.output
    answer, _, last = result.output.rstrip().rpartition("\n\n")
    assert answer
    assert last.startswith("τ ")
    coloured = call(*short("generate", "-c", run_file, "a red cat", "--color"))
    assert "\x1b[33m" in coloured.output
    raw = call(*short("generate", "-c", run_file, "a red cat", "--raw", "--no-color"))
    assert raw.exit_code == 0
    assert raw.output.split("\n\nτ")[0] != answer


@pytest.mark.parametrize("text", ["naïve 日本語 🙂🙂 end", "a\ufffdb", "🙂"])
def test_characters_spread_over_tokens_are_shown_whole(text: str) -> None:
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in tokenizer.encode("a🙂")[:-1]] == ["a", "", "", ""]
    assert stream.finish() == "\ufffd"
