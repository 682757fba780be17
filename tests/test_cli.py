"""The command line as a whole: quick, documented, and without tracebacks for what a user can cure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dflash_mp import __version__
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


def test_the_project_has_its_commands() -> None:
    expected = {"demo", "prepare", "feed", "run", "export", "eval", "generate"}
    assert expected <= {words[0] for words in COMMANDS}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_describes_itself_and_each_of_its_options(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, [*words, "--help"], terminal_width=200)
    assert done.exit_code == 0
    assert done.output.startswith(f"Usage: main {' '.join(words)}")
    command: click.Command = main
    for word in words:
        assert isinstance(command, click.Group)
        command = command.commands[word]
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


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"dflash-mp, version {__version__}\n"


@pytest.mark.parametrize("error", [DflashError("x", "do y"), ConfigError("x", "do y"), DataError("x", "do y")])
def test_a_curable_error_is_its_text_and_its_exit_code(error: DflashError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("dflash_mp.config.load_config", fail)
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
