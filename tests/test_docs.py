"""The documentation keeps step with the code. `python tests/test_docs.py` rewrites the table of options."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from dflash_mp.config import RunConfig

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "guide.md"
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
_BLOCK = re.compile(r"(<!-- options: [^>]* -->\n).*(<!-- /options -->)", re.DOTALL)


def options() -> str:
    """The tables of all options, one for each section of the configuration."""
    return "\n".join(_section("", RunConfig))


def _section(name: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"### {f'`{name}`' if name else 'At the top'}\n"
    yield f"{(model.__doc__ or '').strip()}\n"
    yield "| key | value | default | |\n|---|---|---|---|"
    below = []
    for key, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None and field.description is None:
            below.append((key, inner))
            continue
        default = (
            "required"
            if field.is_required()
            else f"`{_plain(field.get_default(call_default_factory=True, validated_data={}))}`"
        )
        yield f"| `{key}` | {_type(field.annotation)} | {default} | {field.description or ''} |"
        if inner is not None:
            below.append((f"{key}[]", inner))
    yield ""
    for key, inner in below:
        yield from _section(f"{name}.{key}" if name else key, inner)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    for each in (annotation, *get_args(annotation)):
        if get_origin(each) is None and isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _type(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part) for part in inner if part is not type(None))
    if origin is Annotated:
        return _type(inner[0])
    if origin is list:
        return f"list of {_type(inner[0])}"
    if origin is tuple:
        return f"{len(inner)} of {_type(inner[0])}"
    names = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path"}
    return names.get(annotation) or ("mapping" if _model_in(annotation) else str(annotation))


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


def test_the_guide_lists_every_option_as_it_is() -> None:
    found = _BLOCK.search(GUIDE.read_text(encoding="utf-8"))
    assert found is not None
    written = found[0].removeprefix(found[1]).removesuffix(found[2])
    assert written == options(), "run python tests/test_docs.py"


def test_every_option_says_what_it_is() -> None:
    lacking = [line for line in options().splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert lacking == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        linked = document.parent / file if file else document
        assert linked.exists(), f"{document.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings}, target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_options_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for name in re.findall(r"\b(?:configs|launchers|tests|docs|dflash_mp)/[\w/.-]+\w", text):
        assert (ROOT / name).exists(), f"{document.name}: {name}"
    known = set(re.findall(r"^\| `(\w+)`", options(), re.MULTILINE))
    for section, key in re.findall(r"\b(target|data|feed|stream|drafter|train|eval)\.([a-z_]+)\b", text):
        assert key in known | {"py", "public", "secret"}, f"{document.name}: {section}.{key}"


if __name__ == "__main__":
    GUIDE.write_text(_BLOCK.sub(lambda m: m[1] + options() + m[2], GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
