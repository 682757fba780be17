"""Strict reading of untrusted values into typed dataclasses.

`reader(hint)` compiles a type hint into a function that takes a decoded value and its path, and returns the typed value or raises
`ProtocolError` naming the path. Nothing is converted (but text `FOR_PEOPLE`) or guessed: an unknown key, a missing key, a wrong type (a bool is no int, an
infinity no float) and a value outside its rule are errors. A dataclass field with the metadata `LATER` came with a later version: it may be
missing, and is left out as long as it has its default. It understands int, float, bool, str, None, unions with None, Literal,
`tuple[X, ...]`, NamedTuples (as arrays), dataclasses (as maps), and `Annotated[X, Rule]`. A dataclass may check itself further in
`__post_init__` by raising ValueError.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from dflash_mp.errors import StreamError

Path = str | tuple[Any, str | int]  # a name, or whose field or item it is and which: put into words only for an error
Read = Callable[[object, Path], Any]
LATER = {"later": True}  # metadata of a dataclass field
FOR_PEOPLE = "for people"  # in an `Annotated[str, …]`: it is read as `escaped` text, fit for a log or a terminal
_LONGEST_REPR = 80
_LINE_CHARACTERS = 1024


class ProtocolError(StreamError):
    """A peer sent something that is no message of this protocol."""


class Rule(NamedTuple):
    """What a value must satisfy beyond its type; `holds` is only given values of that type."""

    says: str
    holds: Callable[[Any], bool]


def between(low: float, high: float) -> Rule:
    """low ≤ value ≤ high."""
    return Rule(f"from {low} to {high}", lambda value: low <= value <= high)


def at_most(length: int) -> Rule:
    """No longer than `length` characters or items."""
    return Rule(f"no longer than {length}", lambda value: len(value) <= length)


def printable(text: str) -> str:
    """`text` from the wire on one line of a log: shortened, and without what a terminal would obey."""
    return escaped(text if len(text) <= _LINE_CHARACTERS else f"{text[: _LINE_CHARACTERS - 1]}…")


def escaped(text: str) -> str:
    """`text` on one line, and without what a terminal would obey."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "replace").decode("ascii") for each in text
    )


def shown(value: object) -> str:
    """`value` in an error message: shortened, on one line."""
    text = repr(value)
    return text if len(text) <= _LONGEST_REPR else f"{text[:_LONGEST_REPR]}…"


def plain(value: object) -> Any:
    """The reverse of reading: dataclasses to maps, tuples to lists, all else as it is."""
    kind = type(value)
    if kind in (int, str, float, bool):
        return value
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(kind):
        tree = {}
        for name, may_lack, default in _fields(kind):
            inner = getattr(value, name)
            if not (may_lack and inner == default):
                tree[name] = plain(inner)
        return tree
    return value


@cache
def _fields(kind: type) -> list[tuple[str, bool, object]]:
    """Name, whether it may be left out, and default of each field of a dataclass."""
    return [(field.name, _is_later(field), field.default) for field in dataclasses.fields(kind)]


@cache
def reader(hint: Any) -> Read:
    """A reader for values of the type `hint`. TypeError if the hint is of a kind that this module doesn't know."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _annotated(reader(args[0]), args[1:])
    if origin in (typing.Union, types.UnionType) and len(args) == 2 and type(None) in args:
        inner = reader(next(arg for arg in args if arg is not type(None)))
        return lambda value, path: None if value is None else inner(value, path)
    if origin is typing.Literal:
        return _literal(args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _tuple(reader(args[0]))
    if hint is float:
        return _float
    if hint in (int, bool, str):
        return _exactly(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass(hint)
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return _named_tuple(hint)
    raise TypeError(f"no reader for {hint!r}")


def _annotated(inner: Read, notes: tuple[object, ...]) -> Read:
    rules = [note for note in notes if isinstance(note, Rule)]
    for_people = FOR_PEOPLE in notes
    if len(rules) == 1 and not for_people:
        return _ruled(inner, rules[0])

    def read(value: object, path: Path) -> Any:
        result = inner(value, path)
        for rule in rules:
            if not rule.holds(result):
                raise ProtocolError(f"{_words(path)} must be {rule.says}, not {shown(value)}")
        return escaped(result) if for_people else result

    return read


def _ruled(inner: Read, rule: Rule) -> Read:
    """What `_annotated` does for one rule, which is what most fields have."""
    says, holds = rule

    def read(value: object, path: Path) -> Any:
        result = inner(value, path)
        if not holds(result):
            raise ProtocolError(f"{_words(path)} must be {says}, not {shown(value)}")
        return result

    return read


def _exactly(kind: type) -> Read:
    def read(value: object, path: Path) -> Any:
        if type(value) is not kind:
            raise _wrong_type(kind.__name__, value, path)
        return value

    return read


def _float(value: object, path: Path) -> float:
    if type(value) not in (float, int):
        raise _wrong_type("float", value, path)
    number = float(typing.cast(float, value))
    if not math.isfinite(number):
        raise ProtocolError(f"{_words(path)} must be finite, not {number}")
    return number


def _literal(choices: tuple[object, ...]) -> Read:
    def read(value: object, path: Path) -> Any:
        if type(value) is not str or value not in choices:
            raise ProtocolError(f"{_words(path)} must be one of {', '.join(map(str, choices))}, not {shown(value)}")
        return value

    return read


def _tuple(item: Read) -> Read:
    def read(value: object, path: Path) -> Any:
        if not isinstance(value, tuple):
            raise _wrong_type("array", value, path)
        return tuple([item(entry, (path, index)) for index, entry in enumerate(value)])

    return read


def _named_tuple(kind: Any) -> Read:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = [(name, reader(hints[name])) for name in kind._fields]

    def read(value: object, path: Path) -> Any:
        if not isinstance(value, tuple) or len(value) != len(fields):
            raise _wrong_type(f"array of {len(fields)}", value, path)
        return kind(*[item(entry, (path, name)) for (name, item), entry in zip(fields, value, strict=True)])

    return read


def _dataclass(kind: type) -> Read:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {field.name: reader(hints[field.name]) for field in dataclasses.fields(kind)}
    required = {field.name: None for field in dataclasses.fields(kind) if not _is_later(field)}

    def read(value: object, path: Path) -> Any:
        if not isinstance(value, dict):
            raise _wrong_type("map", value, path)
        if not value.keys() <= fields.keys():
            unknown = next(key for key in value if key not in fields)
            raise ProtocolError(f"{_words(path)} has an unknown key {shown(unknown)}")
        if not required.keys() <= value.keys():
            missing = next(key for key in required if key not in value)
            raise ProtocolError(f"{_words(path)} lacks the key {missing!r}")
        typed = {key: item(value[key], (path, key)) for key, item in fields.items() if key in value}
        try:
            return kind(**typed)
        except ValueError as error:
            raise ProtocolError(f"{_words(path)}: {error}") from None

    return read


def _words(path: Path) -> str:
    if isinstance(path, str):
        return path
    whole, part = path
    return f"{_words(whole)}[{part}]" if isinstance(part, int) else f"{_words(whole)}.{part}"


def _is_later(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("later"))


def _wrong_type(wanted: str, value: object, path: Path) -> ProtocolError:
    return ProtocolError(f"{_words(path)} must be of type {wanted}, not {type(value).__name__} ({shown(value)})")
