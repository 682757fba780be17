"""Every command line of the documentation: it can be parsed, and it is run here, on a tiny target, or it says why it is not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner
from command_lines import ROOT, CommandLine, check, command_lines, commands_in, without_variables
from test_cli import COMMANDS, command_named
from tiny_run import make_tiny_run

from dflash_mp.cli import main
from dflash_mp.drafter.__main__ import main as drafter

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINES = [line for document in DOCUMENTS for line in command_lines(document)]

# Run by `test_the_documented_session`, in this order, in a directory where CONFIG, RUN, TARGET and so on are those of a tiny run.
SESSION = (
    "dflash-mp --version",
    "dflash-mp prepare -c CONFIG --show 3",
    "dflash-mp prepare -c CONFIG",
    "dflash-mp run -c CONFIG --plan",
    "dflash-mp run -c CONFIG",
    "dflash-mp export RUN drafter",
    "dflash-mp eval -c CONFIG --drafter drafter --untrained",
    "dflash-mp eval -c CONFIG --drafter drafter --untrained --json figures.json",
    'dflash-mp generate -c CONFIG --drafter drafter "Write a haiku about rain."',
    "dflash-mp keygen keys --name feeder",
    "dflash-mp keygen keys --name drafter",
    "dflash-mp keygen keys",
)
# Names that stand for the same thing.
SAME = (
    (r"configs/qwen3-8b-8gpu\.yaml|\brun\.yaml", "CONFIG"),
    (r"\bruns/(?:qwen3-8b|several)\b", "RUN"),
    (r"\bdrafter-qwen3-8b\b", "drafter"),
    (r"--show 2\b", "--show 3"),
    (r" +", " "),
)
# Why other command lines are not run by this test. The first pattern that is found decides.
NOT_RUN = (
    (
        r"^(vllm|python -m sglang)",
        "a server that needs a GPU and a package of its own; tests/decode/test_official_client.py loads an export",
    ),
    (
        r"^(pip|git|python3 -m venv|pre-commit install)",
        "changes the environment; launchers/test.sh installs the package",
    ),
    (r"^(scp|ssh) ", "copies between hosts"),
    (r"^(docker|kubectl|helm|sbatch|srun|squeue|scancel) ", "needs a container engine, a cluster or a batch system"),
    (r"launchers/(quickstart|test)\.sh", "minutes long: the two commands of README.md, run from a clean clone"),
    (r"launchers/\w+", "needs several hosts; tests/launchers and tests/network run the scripts"),
    (r"^(tensorboard|curl|mlflow)", "serves or asks until it is stopped, with a program of its own"),
    (
        r"^pytest|^python tests/test_docs.py|^(ruff|mypy|mkdocs|pre-commit)",
        "a check of this project, which launchers/test.sh runs",
    ),
    (
        r"^dflash-mp feed|^torchrun|dflash_mp\.torchrun",
        "runs until it is stopped; tests/target/test_feed.py and tests/integration run it",
    ),
    (
        r"^dflash-mp (demo|regenerate)",
        "fetches files or needs a server; tests/test_demo.py and tests/regenerate run it",
    ),
    (
        r"^dflash-mp (top|health|trained|report|doctor)",
        "looks at something that runs; tests/monitor and tests/doctor run it",
    ),
    (r"^dflash-mp (compare|threads)|dflash_mp\.threads", "minutes, or a GPU; tests/threads runs it small"),
    (
        r"\bdflash-mp bench",
        "minutes, or a GPU; tests/test_bench_*.py, tests/stream and tests/integration/test_chaos.py run it small",
    ),
    (
        r"train\.(objective|schedule)=",
        "the run above with another objective; tests/drafter/test_objectives.py trains with each",
    ),
    (r"train\.precision=", "the run above in fp8; tests/drafter/test_fp8_training.py trains with it"),
    (r"stream\.wire_dtype=", "the run above with other rows; tests/integration/test_rows_in_fp8.py runs it"),
    (r"-c compare\.yaml", "minutes; the session runs the same commands"),
    (
        r"-c configs/quickstart\.yaml",
        "minutes; launchers/quickstart.sh runs it, tests/integration/test_same_bits.py other numbers of ranks",
    ),
    (r"configs/embedded-h200\.yaml", "for a GPU; the session runs the same commands"),
    (r"_DFLASH_MP_COMPLETE", "for a shell's start-up file; tests/test_cli.py asks for each script"),
    (r"--profile|--log-format| -q\b", "tests/integration/test_logs_and_profile.py runs it"),
)


def plain(text: str) -> str:
    for pattern, name in SAME:
        text = re.sub(pattern, name, text)
    return text.strip()


def is_whole(line: CommandLine) -> bool:
    """A call, not only the name of a command or one with placeholders left out."""
    return not (line.inline and (len(line.text.split()) < 4 or re.search(r"…|\bCOMMAND\b", line.text)))


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.document}:{line.line}")
def test_a_command_line_can_be_parsed(line: CommandLine) -> None:
    if "COMMAND" not in line.text:
        check(line.text, whole=not line.inline)


def test_every_command_line_is_run_or_says_why_not() -> None:
    calls = [line for line in LINES if is_whole(line)]
    open_ones = [
        f"{line.document}:{line.line}: {line.text}"
        for line in calls
        if plain(line.text) not in SESSION
        and not any(re.search(pattern, without_variables(line.text)) for pattern, _ in NOT_RUN)
    ]
    assert open_ones == [], "add them to SESSION, or say in NOT_RUN why they are not run"
    assert len(calls) > 40


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("documented")
    file = make_tiny_run(directory)
    tree = yaml.safe_load(file.read_text())
    tree["eval"] = {"limit": 1, "max_new_tokens": 4}
    tree["data"]["path"] = "prepared"  # not prepared yet
    tree["train"].update(steps=2, held_out_every=0)
    tree["run_dir"] = "RUN"
    (directory / "CONFIG").write_text(yaml.safe_dump(tree))
    before = Path.cwd()
    os.chdir(directory)
    yield directory
    os.chdir(before)


def test_the_documented_session(place: Path) -> None:
    for text in SESSION:
        ((_, *words),) = commands_in(text)
        done = CliRunner().invoke(main, words)
        if text == "dflash-mp keygen keys":  # both are there by then: no key is ever replaced
            assert "keys are never overwritten" in done.output
            continue
        assert done.exit_code == 0, f"{text}\n{done.output}\n{done.exception!r}"
    for name in ("prepared/manifest.json", "RUN/metrics.jsonl", "drafter/model.safetensors", "figures.json"):
        assert (place / name).stat().st_size > 0
    assert sorted(file.name for file in (place / "keys").iterdir()) == [
        "drafter.public",
        "drafter.secret",
        "feeder.public",
        "feeder.secret",
    ]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_help_of_a_command_ends_with_examples_that_it_would_take(words: tuple[str, ...]) -> None:
    command = command_named(words)
    examples: tuple[str, ...] = getattr(command, "examples", ())
    assert examples, "give the command `examples`"
    shown = CliRunner().invoke(main, [*words, "--help"], terminal_width=200).output
    for example in examples:
        assert f"  {example}\n" in shown.partition("\nExamples:\n")[2]
        assert f"dflash-mp {' '.join(words)}" in example
        check(re.sub(r"\s+#\s.*$", "", example))


def test_the_examples_of_the_drafters_and_of_the_whole_would_be_taken() -> None:
    for command in (drafter, main):
        assert command.examples  # type: ignore[attr-defined]
        for example in command.examples:  # type: ignore[attr-defined]
            if not example.startswith("eval "):
                check(re.sub(r"\s+#\s.*$", "", example))


@pytest.mark.parametrize(
    "text",
    [
        "dflash-mp nothing",
        "nice -n 5 dflash-mp nothing",
        "dflash-mp run --no-such-option",
        "dflash-mp run",
        "dflash-mp bench stream --rows many",
        "dflash-mp prepare -c x.yaml more",
        "dflash-mp trained -c run.yaml || dflash-mp run -d run.yaml",
        "torchrun --nproc-per-node 2 -m dflash_mp.drafter --konfig x.yaml",
        "python -m dflash_mp.nothing",
        "pytest tests/test_nothing.py",
        "launchers/nothing.sh",
    ],
)
def test_a_wrong_command_line_is_found(text: str) -> None:
    with pytest.raises(click.UsageError):
        check(text)
