"""A run's description: one YAML file plus `--set section.key=value` overrides.

`load_config` validates both before any work is done and remembers where each value came from (`file`, `--set`, `default`), which `--plan`
prints. Plain words and numbers are read as YAML 1.2 does, not as PyYAML: `on` is a word, 010 is ten, 1:30 is no number and nothing is a
date. A key that stands twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dflash_mp.config import RunConfig
from dflash_mp.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """What the module says of YAML."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    f"the key {key.value} is given twice, first", seen[key.value], "then", key.start_mark
                )
            seen[key.value] = key.start_mark
        return super().construct_mapping(node, deep)


_READ_ANEW = {"tag:yaml.org,2002:bool", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _READ_ANEW]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile("^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"), "-+0123456789"
)


_SECTIONS = {key for key, field in RunConfig.model_fields.items() if isinstance(field.annotation, type(BaseModel))}


@dataclass(frozen=True)
class LoadedConfig:
    """A validated configuration and the source (`file`, `--set` or `default`) of each dotted key."""

    config: RunConfig
    sources: dict[str, str]
    file: Path


def load_config(file: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read `file`, apply `overrides` ("section.key=value", the value in YAML), validate.

    Relative paths in the file are taken from the current directory. Raises `ConfigError`.
    """
    tree = {key: {} if value is None and key in _SECTIONS else value for key, value in _read_yaml(file).items()}
    given = {key: "file" for key in _leaves(tree)}
    for text in overrides:
        key, value = _parse_override(text)
        _put(tree, key, value)
        given = {k: s for k, s in given.items() if k != key and not k.startswith(key + ".")}
        given.update({k: "--set" for k in (_leaves({key: value}) if isinstance(value, dict) else [key])})
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(
            _explain(error, file, given), "see `dflash-mp run --plan` and docs/guide.md for every key"
        ) from None
    resolved = list(_leaves(config.model_dump(mode="json")))
    return LoadedConfig(config, {key: _source_of(key, given) for key in resolved}, file)


def describe_config(loaded: LoadedConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, value as text, source) of every option, in the schema's order."""
    tree = loaded.config.model_dump(mode="json")
    for key in _leaves(tree):
        value: Any = tree
        for part in key.split("."):
            value = value[part]
        yield (
            key,
            yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip(),
            loaded.sources[key],
        )


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        tree = _parse(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {file}: {error.strerror}", "check the path given with --config"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}", "fix the file at the place named") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} is empty or not a mapping of sections", "start from a file in configs/")
    return tree


def _parse(text: str, name: str) -> Any:
    """What `text`, in YAML, says. Raises `ValueError`, which says where in `name`."""
    try:
        loader = _Loader(text)
        loader.name = name
        return loader.get_single_data()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # as its constructors come upon it
        raise ValueError(f"a value is not what its tag says: {error}") from None


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text!r} is not of the form section.key=value", "for example --set train.steps=100")
    try:
        return key, _parse(value, f"--set {key}")
    except ValueError as error:
        raise ConfigError(f"--set {key}: the value {value!r} is not valid YAML: {error}", "quote it") from None


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {key}: {parent!r} is a value, not a section", "check the key's spelling")
        tree = child
    tree[last] = value


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _source_of(key: str, given: dict[str, str]) -> str:
    parts = key.split(".")
    return next((given[k] for k in (".".join(parts[:n]) for n in range(len(parts), 0, -1)) if k in given), "default")


def _explain(error: ValidationError, file: Path, given: dict[str, str]) -> str:
    of_file, of_overrides = [], []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "configuration"
        if item["type"] == "extra_forbidden":
            problem = f"{key}: unknown key"
        elif item["type"] == "missing":
            problem = f"{key}: required, but not given"
        else:
            got = "" if isinstance(item["input"], dict) or key == "configuration" else f" (got {item['input']!r})"
            problem = f"{key}: {item['msg'].removeprefix('Value error, ')}{got}"
        if _source_of(key, given) == "--set":
            of_overrides.append(f"--set {problem}")
        else:
            of_file.append(problem)
    return "; ".join([*([f"{file}: {'; '.join(of_file)}"] if of_file else []), *of_overrides])
