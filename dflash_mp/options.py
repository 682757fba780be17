"""What commands share: `Command` and `Group`, whose help ends with examples, and the options that several of them take."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from dflash_mp import logs

if TYPE_CHECKING:
    from dflash_mp.config_file import LoadedConfig

F = TypeVar("F", bound=Callable[..., Any])

_VERBOSE, _QUIET, _FORMAT = "dflash_mp.verbose", "dflash_mp.quiet", "dflash_mp.log_format"


class Command(click.Command):
    """A command with `examples`: whole command lines, with a comment after `#` where one helps."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples as they are, one a line: a wrapped command line could not be copied."""
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class FiniteRange(click.FloatRange):
    """As click's, but neither infinite nor NaN, which lies outside no range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no number to count with.", param, ctx)
        return number


class Group(Command, click.Group):
    """A group of `Command`s; one that does something without a subcommand has `examples` of its own."""

    command_class = Command


class NewFile(click.Path):
    """A file to be written at the end of long work: what is wrong with its place is said before that begins."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        file = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
            self.fail(f"{file.parent} is no directory that can be written to", param, ctx)
        return file


def config_options(command: F) -> F:
    """-c FILE and --set KEY=VALUE, as `config_file` and `overrides`."""
    return _config("YAML file of the run.", required=True)(command)


def optional_config_options(says: str) -> Callable[[F], F]:
    """The same, for a command that can do without; `says` what the file is for."""
    return _config(says, required=False)


def _config(says: str, required: bool) -> Callable[[F], F]:
    file = click.option("-c", "--config", "config_file", required=required, type=click.Path(path_type=Path), help=says)
    override = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one option.")
    return lambda command: file(override(command))


def drafter_option(command: F) -> F:
    """--drafter DIRECTORY."""
    return click.option(
        "--drafter",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="Export, run directory or checkpoint; default: the newest checkpoint of the configured run.",
    )(command)


def load(config_file: Path, overrides: tuple[str, ...]) -> LoadedConfig:
    """The configuration; commands read it before they import anything slow, so that a mistake in it shows at once."""
    from dflash_mp.config_file import load_config

    return load_config(config_file, overrides)


def profile_option(command: F) -> F:
    """--profile, as `profile`: words for `dflash_mp.profiling.parse_profile`."""
    return click.option(
        "--profile",
        multiple=True,
        metavar="steps=FIRST..LAST",
        help="Write a profile of these steps to RUN/profile; ranks=N,N in a second --profile: of these ranks, not of rank 0.",
    )(command)


def log_options(command: F) -> F:
    """-v, -q and --log-format, kept in the context for `log_settings`."""
    for option in (
        click.option(
            "--log-format",
            type=click.Choice(logs.FORMATS),
            envvar=logs.FORMAT_VARIABLE,
            help="Lines for people (default), or one JSON object per line.",
            **_kept(_FORMAT),
        ),
        click.option(
            "-q", "--quiet", count=True, help="Only warnings and errors; twice: only errors.", **_kept(_QUIET)
        ),
        click.option("-v", "--verbose", count=True, help="Log details, too.", **_kept(_VERBOSE)),
    ):
        command = option(command)
    return command


def log_settings() -> logs.Settings:
    """What the running command's `log_options` say; the environment where they say nothing."""
    kept = click.get_current_context().meta
    inherited = logs.Settings.of(os.environ)
    level = logs.LEVELS.index(inherited.level) - kept.get(_VERBOSE, 0) + kept.get(_QUIET, 0)
    return logs.Settings(
        format=kept.get(_FORMAT) or inherited.format,
        level=logs.LEVELS[min(max(level, 0), len(logs.LEVELS) - 1)],
    )


def start_logs(role: str, rank: int | None = None, out: TextIO | None = None) -> logs.Settings:
    """Log as this command's options say. Call it after the slow imports, whose libraries it brings into line."""
    settings = log_settings()
    logs.start(logs.Speaker(role, rank), settings, out)
    return settings


def _kept(name: str) -> dict[str, Any]:
    """Arguments of an option whose value goes into the context and not to the command."""

    def keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        context.meta[name] = value

    return {"callback": keep, "expose_value": False}
