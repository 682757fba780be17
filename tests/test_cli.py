"""The command line as a whole: quick, documented, and without tracebacks for what a user can cure."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dflash_mp import __version__, build_facts
from dflash_mp.cli import main
from dflash_mp.errors import ConfigError, DataError, DflashError

HEAVY = ("torch", "transformers", "numpy", "zmq", "rich.live", "datasets")


def commands(group: click.Group = main, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command as the words that call it."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name)


COMMANDS = sorted(commands())


def command_named(words: tuple[str, ...]) -> click.Command:
    command: click.Command = main
    for word in words:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    return command


def test_the_project_has_its_commands() -> None:
    expected = {"demo", "prepare", "feed", "run", "export", "eval", "generate"}
    assert expected <= {words[0] for words in COMMANDS}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_number_that_is_none_is_refused(words: tuple[str, ...]) -> None:
    for option in command_named(words).params:
        if isinstance(option.type, (click.FloatRange, type(click.FLOAT))):
            for number in ("nan", "inf"):
                with pytest.raises(click.BadParameter):
                    option.type.convert(number, option, None)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_describes_itself_and_each_of_its_options(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, [*words, "--help"], terminal_width=200)
    assert done.exit_code == 0
    assert done.output.startswith(f"Usage: main {' '.join(words)}")
    command = command_named(words)
    assert command.help, "a docstring says what the command does"
    undocumented = [
        p.name
        for p in command.params
        if isinstance(p, click.Option) and not (p.help or isinstance(p.type, click.Choice))
    ]
    assert undocumented == []


def test_help_of_every_command_needs_no_heavy_import() -> None:
    program = (
        "import sys; from click.testing import CliRunner; from dflash_mp.cli import main\n"
        f"for words in {COMMANDS!r}: assert CliRunner().invoke(main, [*words, '--help']).exit_code == 0\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_version_comes_with_what_a_bug_report_needs() -> None:
    import torch

    first, *facts = CliRunner().invoke(main, ["--version"]).output.splitlines()
    assert first == f"dflash-mp {__version__}"
    known = dict(fact.split(": ", 1) for fact in facts)
    assert known["python"].startswith(platform.python_version())
    build, cuda = known["torch"].split(", CUDA: ")
    assert torch.__version__ in (build, f"{build}+cu{cuda.replace('.', '')}")  # as some wheels leave it out
    assert cuda == (torch.version.cuda or "none")
    assert Path(known["installed at"]) == Path(build_facts.__file__).parent


def test_the_commit_is_that_of_a_checkout_and_changes_are_said(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert build_facts.commit(tmp_path) is None
    git("init", "-q")
    assert build_facts.commit(tmp_path) is None
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    revision = git("rev-parse", "--short=12", "HEAD")
    assert build_facts.commit(tmp_path) == revision
    (tmp_path / "file").write_text("b")
    assert build_facts.commit(tmp_path) == f"{revision}, with changes"


@pytest.mark.parametrize(
    ("shell", "says"),
    [
        ("bash", "complete -o nosort"),
        ("zsh", "#compdef dflash-mp"),
        ("fish", "complete --no-files --command dflash-mp"),
    ],
)
def test_a_shell_gets_its_completion(shell: str, says: str) -> None:
    command = [sys.executable, "-c", "from dflash_mp.cli import main; main(prog_name='dflash-mp')"]
    environment = {**os.environ, "_DFLASH_MP_COMPLETE": f"{shell}_source"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert says in done.stdout, done.stderr
    assert f"_DFLASH_MP_COMPLETE={shell}_complete" in done.stdout
    asked = {"bash": {"COMP_CWORD": "2"}, "zsh": {"COMP_CWORD": "2"}, "fish": {"COMP_CWORD": "--prof"}}[shell]
    environment |= {"_DFLASH_MP_COMPLETE": f"{shell}_complete", "COMP_WORDS": "dflash-mp run --prof", **asked}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "--profile" in done.stdout, done.stderr


@pytest.mark.parametrize("error", [DflashError("x", "do y"), ConfigError("x", "do y"), DataError("x", "do y")])
def test_a_curable_error_is_its_text_and_its_exit_code(error: DflashError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("dflash_mp.config_file.load_config", fail)
    done = CliRunner().invoke(main, ["run", "-c", "x.yaml"])
    assert done.exit_code == error.exit_code
    assert done.output == "dflash-mp: x\n  → do y\n"


@pytest.mark.parametrize("command", [words for words in COMMANDS if words[0] in ("prepare", "feed", "run", "eval")])
def test_a_missing_configuration_is_said_plainly(command: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dflash_mp.cli", *command, "-c", str(tmp_path / "none.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "cannot read the configuration" in done.stderr
    assert "Traceback" not in done.stderr
