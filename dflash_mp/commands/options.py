"""What the commands share: `Command` and `Group`, whose help ends with examples, and the options that several of them take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from dflash_mp.config import LoadedConfig

F = TypeVar("F", bound=Callable[..., Any])


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


class Group(Command, click.Group):
    """A group of `Command`s; one that does something without a subcommand has `examples` of its own."""

    command_class = Command


def config_options(command: F) -> F:
    """-c FILE and --set KEY=VALUE, as `config_file` and `overrides`."""
    command = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one option.")(
        command
    )
    return click.option(
        "-c", "--config", "config_file", required=True, type=click.Path(path_type=Path), help="YAML file of the run."
    )(command)


def drafter_option(command: F) -> F:
    """--drafter DIRECTORY."""
    return click.option(
        "--drafter",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="Export, run directory or checkpoint; default: the newest checkpoint of the configured run.",
    )(command)


def load(config_file: Path, overrides: tuple[str, ...]) -> LoadedConfig:
    """The configuration; commands read it before they import anything slow, so that a mistake in it shows at once."""
    from dflash_mp.config import load_config

    return load_config(config_file, overrides)
