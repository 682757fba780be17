"""Command lines in texts: where they stand, and whether the command line's own parsers take them.

A line of a code block (fenced as a shell's or not at all, or indented) is a command line when its first word is a program: one that is
known here or a script of this project, or any that runs `dflash-mp`; what this machine has plays no part. In running text, code that
begins with one of `NAMED` is one, too; it may leave out what is required, since it stands for a command and not for a call.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from dflash_mp.cli import main
from dflash_mp.drafter.__main__ import main as drafter

ROOT = Path(__file__).parent.parent
NAMED = (
    "dflash-mp",
    "torchrun",
    "python",
    "pytest",
    "bash",
    "docker",
    "kubectl",
    "sbatch",
    "srun",
    "tensorboard",
    "pip",
)
PROGRAMS = {
    *NAMED,
    "vllm",
    "scp",
    "ssh",
    "helm",
    "curl",
    "pre-commit",
    "mkdocs",
    "ruff",
    "mypy",
    "git",
    "make",
    "mlflow",
    "python3",
    "sed",
}
_SHELLS = {"", "bash", "sh", "shell", "console"}
_PROMPT = re.compile(r"^(?:[\w.-]*\$|#)\s+")
_ASSIGNMENT = re.compile(r"^[A-Z_][A-Z0-9_]*=\S*$")
_OPERATORS = {"|", "||", "&&", ";", "&", ">", ">>", "2>", "<"}


@dataclass(frozen=True)
class CommandLine:
    """`text` as it stands in `document`, continuation lines joined, prompt and comment removed. `inline`: in running text."""

    document: str
    line: int
    text: str
    inline: bool


def command_lines(document: Path) -> Iterator[CommandLine]:
    """All command lines of a Markdown text, in order."""
    name = document.name
    fence: str | None = None
    held, held_line = "", 0
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("```"):
            fence = stripped[3:].strip() if fence is None else None
            continue
        indented = fence is None and line.startswith("    ")
        if (fence is not None and fence in _SHELLS) or indented:
            text = held + _PROMPT.sub("", stripped)
            held_line = held_line or number
            if text.endswith("\\"):
                held = text[:-1]
                continue
            held = ""
            if is_command(text):
                yield CommandLine(name, held_line, without_comment(text), inline=False)
            held_line = 0
        elif fence is None:
            for code in re.findall(r"`([^`]+)`", line):
                if code.split()[0] in NAMED and len(code.split()) > 1:
                    yield CommandLine(name, number, code, inline=True)


def is_command(text: str) -> bool:
    """Whether the first word, variables set before it left out, is a program."""
    words = text.split()
    while words and _ASSIGNMENT.match(words[0]):
        words.pop(0)
    if not words:
        return False
    first = words[0]
    script = "/" in first and (ROOT / first).is_file()
    behind = re.fullmatch(r"[a-z][\w.-]*", first) is not None and "dflash-mp" in words
    return first in PROGRAMS or script or behind


def without_variables(text: str) -> str:
    """`text` without what is set before its first word."""
    return re.sub(r"^(?:_?[A-Z][A-Z0-9_]*=\S+ )+(?!dflash-mp)", "", text)


def without_comment(text: str) -> str:
    return re.sub(r"\s+#\s.*$", "", text).strip()


def commands_in(text: str) -> Iterator[list[str]]:
    """The simple commands of a line: words between pipes and the like, variables set before them left out."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word in _OPERATORS:
            while words and _ASSIGNMENT.match(words[0]):
                words.pop(0)
            if words:
                yield words
            words = []
        else:
            words.append(word)


def check(text: str, whole: bool = True) -> None:
    """Raise `click.UsageError` unless every part of a command line that this project answers for can be parsed.

    `whole`: what is required must be there. Values are converted, but files need not exist.
    """
    for words in commands_in(text):
        if "dflash-mp" in words:  # perhaps behind another program, which runs it
            _parse(main, words[words.index("dflash-mp") + 1 :], whole)
        elif words[0] == "torchrun" or words[:2] == ["python", "-m"]:
            if "dflash_mp.drafter" in words:
                _parse(drafter, words[words.index("dflash_mp.drafter") + 1 :], whole)
            elif words[0] == "python" and words[2].startswith("dflash_mp"):
                _require(importlib.util.find_spec(words[2]) is not None, f"no module {words[2]}")
        elif words[0] == "pytest":
            for word in words[1:]:
                _require(not word.startswith("tests") or (ROOT / word.partition("::")[0]).exists(), f"no {word}")
        elif words[0] == "bash" or "/" in words[0]:
            script = words[1] if words[0] == "bash" else words[0]
            _require(not script.startswith("launchers/") or (ROOT / script).is_file(), f"no {script}")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise click.UsageError(what)


def _parse(command: click.Command, words: Sequence[str], whole: bool) -> None:
    context = click.Context(command, info_name=command.name, resilient_parsing=True)
    if isinstance(command, click.Group) and words and not words[0].startswith("-"):
        _require(words[0] in command.commands, f"no command {words[0]}")
        _parse(command.commands[words[0]], words[1:], whole)
        return
    values, rest, _ = command.make_parser(context).parse_args(args=list(words))
    _require(not rest, f"left over: {rest}")
    if "version" in values or "help" in values:
        return
    for parameter in command.params:
        value = values.get(parameter.name or "")
        given = value not in (None, (), []) and type(value).__name__ != "Sentinel"
        _require(given or not (whole and parameter.required), f"{parameter.name} is missing")
        stands_for_one = isinstance(value, str) and re.fullmatch(r"[A-Z]+", value)
        if given and not (stands_for_one or _is_file(parameter.type) or getattr(parameter, "is_flag", False)):
            parameter.type_cast_value(context, value)


def _is_file(kind: click.ParamType) -> bool:
    return isinstance(kind, (click.Path, click.File))
