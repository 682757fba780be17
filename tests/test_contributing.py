"""What contributors are given: hooks that run, documentation that builds, and a changelog that keeps its form."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_mp import __version__

ROOT = Path(__file__).parent.parent


def hooks() -> list[dict[str, Any]]:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local", "nothing is fetched from elsewhere"
    return repository["hooks"]


def run_hook(hook: dict[str, Any], file: Path, directory: Path) -> int:
    """The exit code of a hook for a changed file, as pre-commit would call it."""
    words = [*shlex.split(hook["entry"]), *([str(file)] if hook.get("pass_filenames", True) else [])]
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=directory, capture_output=True, check=False).returncode


def test_the_hooks_are_complete() -> None:
    assert [hook["id"] for hook in hooks()] == ["ruff-check", "ruff-format", "mypy"]
    for hook in hooks():
        assert {"id", "name", "entry", "language"} <= set(hook)
        assert hook["language"] == "system"


@pytest.mark.parametrize("hook", hooks()[:2], ids=lambda hook: hook["id"])
def test_a_hook_passes_good_files_and_refuses_bad_ones(hook: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    shutil.copy(ROOT / "ruff.toml", tmp_path)
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text('"""A module."""\n\nNAME = "x"\n')
    bad.write_text('import os\nNAME   =   "x"\n')
    assert run_hook(hook, good, tmp_path) == 0
    assert run_hook(hook, bad, tmp_path) == 1


def test_the_type_checkers_hook_is_the_configured_check(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    hook = hooks()[2]
    config = "[mypy]\npackages = small\ndisallow_untyped_defs = True\ncache_dir = /dev/null\n"
    (tmp_path / "setup.cfg").write_text(config)
    (tmp_path / "small").mkdir()
    module = tmp_path / "small" / "__init__.py"
    module.write_text("def f(x: int) -> int:\n    return x\n")
    assert run_hook(hook, module, tmp_path) == 0
    module.write_text("def f(x: int) -> str:\n    return x\n")
    assert run_hook(hook, module, tmp_path) == 1


def build(directory: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = {file.stem for file in (tmp_path / "site").glob("*.html")}
    assert {file.stem for file in (ROOT / "docs").glob("*.md")} <= pages


def test_dead_links_in_the_documentation_are_errors(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    links = ["nowhere.md", "#no-such-heading", "/absolute.md"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n" + "".join(f"see [gone]({link})\n\n" for link in links))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    warnings = re.findall(r"WARNING .* contains an? .*", done.stderr)
    for link in links:
        assert any(link in warning for warning in warnings), done.stderr


def test_the_index_of_the_documentation_names_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in index, page.name


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert __version__ in titles[0]
    for title in titles:
        assert re.fullmatch(r"(Unreleased: )?\d+\.\d+\.\d+( – \d{4}-\d\d-\d\d)?", title), title
    for heading in re.findall(r"^### (.+)$", text, re.MULTILINE):
        assert heading in ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"), heading
