"""Services of the compose files as Compose itself reads them, and their commands run outside a container."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_trees import SECONDS

ROOT = Path(__file__).parent.parent.parent
DOCKER = ROOT / "docker"
_INSIDE = {"/dflash-mp": "home", "/run/dflash-mp": "sockets"}  # directories of the image, and where they are here
_ROW = re.compile(r"^(\w+) (.*)$")


def tool(name: str) -> str:
    """A program beside this Python or on the PATH; the test is skipped where there is none."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (extra test)")
    return found


def compose(*files: str, profiles: tuple[str, ...] = (), **variables: str) -> dict[str, Any]:
    """What Compose makes of these files in docker/, checked against its schema. Fails the test if it refuses them."""
    command = [tool("docker-compose"), *(word for file in files for word in ("-f", str(DOCKER / file)))]
    command += [word for profile in profiles for word in ("--profile", profile)]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    done = subprocess.run(
        [*command, "config", "--format", "json"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr
    tree: dict[str, Any] = json.loads(done.stdout)
    return tree


def image() -> dict[str, Any]:
    """Environment and health check of the image's last stage: {"environment": {…}, "healthcheck": […]}."""
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    environment: dict[str, str] = {}
    health: list[str] = []
    for line in text.splitlines():
        found = _ROW.match(line)
        if found and found[1] == "FROM":
            environment = {}
        if found and found[1] == "ENV":
            environment.update(pair.split("=", 1) for pair in found[2].split())
        if found and found[1] == "HEALTHCHECK":
            health = json.loads(found[2].partition(" CMD ")[2])
    return {"environment": environment, "healthcheck": health}


class Container:
    """A service's command, run here: its directories lie below `directory`, its environment is that of image and service."""

    def __init__(self, directory: Path, service: dict[str, Any], *more: str) -> None:
        for inside in _INSIDE.values():
            (directory / inside).mkdir(exist_ok=True, mode=0o700)
        home = directory / "home"
        for name in ("configs", "launchers"):
            if not (home / name).exists():
                (home / name).symlink_to(ROOT / name)
        self._directory = directory
        self._image = image()
        own = {**self._image["environment"], **(service.get("environment") or {})}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {name: self._here(value) for name, value in own.items()} | {
            "PATH": path,
            "OMP_NUM_THREADS": "1",
        }
        self.health_check = (service.get("healthcheck") or {}).get("test", ["CMD", *self._image["healthcheck"]])
        self.log = directory / f"log-{len(list(directory.glob('log-*')))}"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [*map(self._here, service["command"]), *more],
                cwd=home,
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def health(self) -> tuple[int, str]:
        """Exit code and output of the service's health check, looking at this process in place of process 1."""
        kind, *command = self.health_check
        assert kind == "CMD"
        if command[0] == "dflash-mp":
            command += ["--pid", str(self.process.pid)]
        done = subprocess.run(
            command, cwd=self._directory / "home", env=self.environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def wait_until_well(self) -> None:
        """Ask once a second, as an engine does."""
        deadline = time.monotonic() + SECONDS
        while (health := self.health())[0] != 0:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, f"{health[1]}\n{self.said()}"
            time.sleep(1)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """As an engine does: the stop signal to process 1, then patience."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS)

    def said(self) -> str:
        return self.log.read_text()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _here(self, text: str) -> str:
        for inside, here in sorted(_INSIDE.items(), key=lambda pair: -len(pair[0])):
            text = re.sub(rf"{re.escape(inside)}(?=/|$)", str(self._directory / here), text)
        return text


@contextlib.contextmanager
def running(directory: Path, service: dict[str, Any], *more: str) -> Iterator[Container]:
    """A container that is gone at the end."""
    container = Container(directory, service, *more)
    try:
        yield container
    finally:
        container.close()
