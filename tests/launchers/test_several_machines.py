"""The commands of docs/operations.md for several machines, word for word, on three hosts: they end in a trained drafter."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import operations_page as page
import yaml
from hosts import Host, network
from process_trees import SECONDS

from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.bench.tiny_run import tiny_tree, write_conversations

_TITLE = "Several machines"
_ADDRESSES = {"A": "10.0.0.5", "B": "10.0.0.6"}  # as the page writes them
_SCP = """\
#!/bin/sh
# Copies between the hosts' directories: HOST:dflash-mp/FILE lies in $HOSTS/HOST/FILE.
place() { case "$1" in *:dflash-mp/*) echo "$HOSTS/${1%%:*}/${1#*:dflash-mp/}" ;; *) echo "$1" ;; esac; }
exec cp "$(place "$1")" "$(place "$2")"
"""


class Place:
    """A host with a directory of its own, in which the repository's launchers lie."""

    def __init__(self, host: Host, directory: Path, configuration: dict[str, Any]) -> None:
        self.host, self.directory = host, directory
        self.started: list[subprocess.Popen[str]] = []
        directory.mkdir()
        (directory / "launchers").symlink_to(page.ROOT / "launchers")
        (directory / "run.yaml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
        tools = directory.parent / "tools"
        python = Path(sys.executable).parent
        self.environment = {
            **os.environ,
            "HOSTS": str(directory.parent),
            "PATH": f"{tools}:{python}:{os.environ['PATH']}",
        }

    def start(self, command: str) -> subprocess.Popen[str]:
        log = (self.directory / f"log-{len(self.started)}").open("w+")
        process = self.host.popen(
            shlex.split(command),
            cwd=self.directory,
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        self.started.append(process)
        return process

    def said(self) -> str:
        return "".join(file.read_text() for file in sorted(self.directory.glob("log-*")))

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def machines(directory: Path) -> Iterator[dict[str, Place]]:
    """Hosts A, B and C as the page describes them, with a tiny target and its documents on A."""
    with network("A", "B", "C") as (_, *hosts):
        tools = directory / "tools"
        tools.mkdir()
        (tools / "scp").write_text(_SCP)
        (tools / "scp").chmod(0o755)
        addresses = {_ADDRESSES[host.name]: host.address for host in hosts if host.name in _ADDRESSES}
        places = {host.name: Place(host, directory / host.name, _configuration(addresses)) for host in hosts}
        write_tiny_target(directory / "A" / "target")
        write_conversations(directory / "A" / "pairs.jsonl", 120)
        for place in places.values():
            place.environment["ADDRESSES"] = " ".join(f"{old}={new}" for old, new in addresses.items())
        try:
            yield places
        finally:
            for place in reversed(places.values()):
                place.close()


def _configuration(addresses: dict[str, str]) -> dict[str, Any]:
    """A tiny run with the page's options; what is done on GPUs there is done on the CPU here."""
    tree = tiny_tree(Path())
    for name, options in page.configuration(_TITLE).items():
        tree[name] = {**tree.get(name, {}), **options} if isinstance(options, dict) else options
    tree["feed"]["devices"] = ["cpu"] * len(tree["feed"]["devices"])
    tree["feed"]["endpoints"] = [_translated(text, addresses) for text in tree["feed"]["endpoints"]]
    tree["train"]["drafters"] = 1
    return tree


def _translated(text: str, addresses: dict[str, str]) -> str:
    for old, new in addresses.items():
        text = text.replace(old, new)
    return text


def test_the_page_word_for_word_ends_in_a_trained_drafter(tmp_path: Path) -> None:
    with machines(tmp_path) as places:
        addresses = {_ADDRESSES[name]: places[name].host.address for name in _ADDRESSES}
        scripts: dict[str, subprocess.Popen[str]] = {}
        for name, line in page.commands(_TITLE):
            command = _translated(line, addresses)
            if command.startswith("dflash-mp export"):
                for trainer in ("B", "C"):
                    assert scripts[trainer].wait(2 * SECONDS) == 0, places[trainer].said()
            process = places[name].start(command)
            if command.startswith("launchers/"):
                scripts[name] = process
            else:
                assert process.wait(SECONDS) == 0, f"{name}$ {command}\n{places[name].said()}"
        assert (tmp_path / "B" / "drafter" / "model.safetensors").stat().st_size > 0
        assert not (tmp_path / "C" / "runs").exists()
        scripts["A"].send_signal(signal.SIGINT)
        assert scripts["A"].wait(SECONDS) == 0, places["A"].said()
        served = [line for line in places["A"].said().splitlines() if " rows" in line and "stopped after" in line]
        assert len(served) == 2
