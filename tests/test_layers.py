"""The direction of imports: what a layer may use, checked in the source, imports inside functions and type checks included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dflash_mp"

_BASE = {"addresses", "control_groups", "errors", "process", "config", "logs"}
# Each layer and the layers it may import. A layer is a folder or a module directly below dflash_mp.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "addresses": set(),
    "control_groups": set(),
    "listening": set(),
    "split": set(),
    "process": {"errors"},
    "logs": set(),
    "build_facts": set(),
    "profiling": {"errors"},
    "config": set(),
    "config_file": {"config", "errors"},
    "options": {"config_file", "errors", "logs"},
    "file_lock": set(),
    "run_lock": {"errors", "file_lock"},
    "child": {"process"},
    "torchrun": {"process", "logs"},
    "supervisor": {"errors", "process", "logs"},
    "data": {*_BASE, "file_lock"},
    "stream": {*_BASE, "data"},
    "monitor": {*_BASE, "data", "stream"},
    "target": {*_BASE, "data", "stream", "monitor"},
    "drafter": {*_BASE, "run_lock", "split", "data", "stream", "monitor", "options", "profiling"},
    "decode": {*_BASE, "data", "stream", "target", "drafter", "export"},
    "export": {*_BASE, "data", "stream", "target", "drafter"},
    "regenerate": {*_BASE, "file_lock", "data", "target", "decode"},
    "demo": {*_BASE, "file_lock", "data", "target"},
    "preflight": {*_BASE, "data", "stream"},
    "run_view": {*_BASE, "supervisor"},
    "calibration": {*_BASE, "config_file", "split", "supervisor"},
    "run": {
        *_BASE,
        "config_file",
        "run_lock",
        "calibration",
        "stream",
        "drafter",
        "preflight",
        "profiling",
        "run_view",
        "supervisor",
    },
    "bench": {
        *_BASE,
        "config_file",
        "data",
        "stream",
        "target",
        "drafter",
        "decode",
        "regenerate",
        "export",
        "monitor",
        "options",
        "run",
        "run_view",
        "supervisor",
    },
    "health": {*_BASE, "config_file", "listening", "drafter"},
    "doctor": {*_BASE, "listening", "data", "stream", "target", "drafter", "bench"},
    "threads": {*_BASE, "data", "stream", "target", "drafter"},
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[str]:
    """Full dotted names that a module imports, `from a import b` as "a.b"."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_layers_below_its_own(path: Path) -> None:
    layer = layer_of(path)
    if layer in ("cli", "commands", "__init__"):
        return
    assert layer in MAY_IMPORT, f"give the new layer {layer!r} its place in this table"
    for name in imports_of(path):
        if name.startswith("dflash_mp."):
            used = name.split(".")[1]
            assert used in MAY_IMPORT[layer] | {layer, "__version__"}, f"{layer} may not import {name}"


def test_the_table_has_no_cycle() -> None:
    def reaches(layer: str, seen: tuple[str, ...]) -> None:
        assert layer not in seen, f"cycle: {' → '.join((*seen, layer))}"
        for below in MAY_IMPORT[layer]:
            reaches(below, (*seen, layer))

    for layer in MAY_IMPORT:
        reaches(layer, ())


def test_the_stream_knows_neither_a_process_group_nor_a_model() -> None:
    for path in (path for path in MODULES if layer_of(path) == "stream"):
        for name in imports_of(path):
            assert not name.startswith(("torch.distributed", "transformers", "torch.nn")), f"{path}: {name}"


# What may run code that lies in the data.
NEVER_CALLED = {
    *("torch.load", "torch.jit.load", "torch.hub.load", "pickle.load", "pickle.loads", "marshal.load", "marshal.loads"),
    *("eval", "exec", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "runpy.run_path"),
}


def test_nothing_unpickles_or_runs_what_it_reads() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in NEVER_CALLED, path
                if called in ("np.load", "numpy.load"):
                    assert "allow_pickle=False" in ast.unparse(node), path
        assert not any(name.split(".")[0] in ("pickle", "cloudpickle", "dill", "joblib") for name in imports_of(path))


# Programs that answer the process which started them on their standard output, or print what they were asked for.
MAY_PRINT = {
    "bench/chaos_kills.py",
    "bench/stream_source.py",
    "threads/deadlock.py",
    "threads/reproduce.py",
    "threads/worker.py",
}


def test_events_are_logged_and_not_printed() -> None:
    for path in MODULES:
        name = path.relative_to(PACKAGE).as_posix()
        calls = [ast.unparse(n.func) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        assert name in MAY_PRINT or "print" not in calls, (
            f"{name}: log it (dflash_mp/logs.py), or let the command print it"
        )
        assert name == "logs.py" or "logging.basicConfig" not in calls, name
        if layer_of(path) not in ("cli", "commands"):
            assert name in MAY_PRINT or not {"click.echo", "click.secho"} & set(calls), name
