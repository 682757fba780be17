"""`dflash-mp compare matrix 2.9.1 2.13.0 …`: the races and the shim, version by version.

For each version an environment is made below `environments` (or used again), PyTorch is installed in it from the package index, and
`dflash_mp.threads.reproduce` runs there from this source tree. Writes `matrix.json` and `matrix.md`. An environment takes 3 to 6 GB and some
minutes; one that cannot be made is told in the table.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_mp.threads.reproduce import VARIANTS

_INSTALL_SECONDS = 3600.0
_RUN_SECONDS = 900.0


def run_matrix(versions: Sequence[str], python: str, environments: Path, say: Callable[[str], None]) -> None:
    """Run every version and write the tables."""
    environments.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for version in versions:
        say(f"PyTorch {version} …")
        found[version] = _one(version, python, environments / version)
        say(found[version].get("failure") or f"PyTorch {found[version]['torch']}: shim: {found[version]['shim']}")
    (environments / "matrix.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (environments / "matrix.md").write_text(markdown(found), encoding="utf-8")
    say(f"{environments / 'matrix.md'}")


def markdown(found: dict[str, dict[str, Any]]) -> str:
    """Two tables: what each state is in each version, and what each case did, bare and under the shims."""
    sound = {version: one for version, one in found.items() if "failure" not in one}
    lines = [
        "| state | " + " | ".join(one["torch"] for one in sound.values()) + " |",
        "| --- |" + " --- |" * len(sound),
    ]
    for state in next(iter(sound.values()), {"states": {}})["states"]:
        lines.append(f"| {state} | " + " | ".join(one["states"][state] for one in sound.values()) + " |")
    for variant in VARIANTS:
        lines += ["", f"**{variant}**", "", "| case | " + " | ".join(one["torch"] for one in sound.values()) + " |"]
        lines.append("| --- |" + " --- |" * len(sound))
        for case in next(iter(sound.values()), {"cases": {}})["cases"]:
            lines.append(
                f"| {case} | " + " | ".join(_short(one["cases"][case][variant]) for one in sound.values()) + " |"
            )
    lines += ["", *(f"{version}: {one['failure']}" for version, one in found.items() if "failure" in one)]
    return "\n".join(lines).rstrip() + "\n"


def _one(version: str, python: str, environment: Path) -> dict[str, Any]:
    try:
        interpreter = _environment(version, python, environment)
        source = Path(__file__).parents[2]
        done = subprocess.run(
            [
                interpreter,
                "-c",
                "import json; from dflash_mp.threads import reproduce; print(json.dumps(reproduce.reproduce()))",
            ],
            capture_output=True,
            text=True,
            timeout=_RUN_SECONDS,
            check=True,
            env={**os.environ, "PYTHONPATH": str(source)},
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
        return {"failure": f"PyTorch {version}: {error}\n{getattr(error, 'stderr', None) or ''}"[-1500:]}
    one: dict[str, Any] = json.loads(done.stdout)
    return one


def _environment(version: str, python: str, environment: Path) -> Path:
    interpreter = environment / "bin" / "python"
    if not (environment / "complete").exists():
        for command in (
            [python, "-m", "venv", str(environment)],
            [str(interpreter), "-m", "pip", "install", "--quiet", "--no-cache-dir", f"torch=={version}", "numpy"],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
        (environment / "complete").touch()
    return interpreter


def _short(outcome: str) -> str:
    return outcome.partition(":")[0].replace("|", "/") or "–"
