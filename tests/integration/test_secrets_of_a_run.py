"""What a run with keys writes and prints holds none of them, in no form."""

from __future__ import annotations

import base64
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import make_tiny_run
from zmq.utils import z85

from dflash_mp.stream.keys import keygen


def forms(key_file: Path) -> dict[str, bytes]:
    """A key as text and as bytes, hexadecimal and base64."""
    text = key_file.read_text().splitlines()[1]
    raw = z85.decode(text)
    return {
        "Z85": text.encode(),
        "bytes": raw,
        "hex": raw.hex().encode(),
        "HEX": raw.hex().upper().encode(),
        "base64": base64.b64encode(raw).rstrip(b"="),
        "repr": repr(raw)[2:-1].encode(),
    }


def leaks(keys: list[Path], texts: dict[str, bytes]) -> list[str]:
    """Which key stands where."""
    return [
        f"{key.name} as {form} in {name}"
        for key in keys
        for form, wanted in forms(key).items()
        for name, text in texts.items()
        if wanted in text
    ]


@pytest.fixture(scope="module")
def key_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return keygen(tmp_path_factory.mktemp("keys"))


def test_nothing_that_a_run_writes_or_prints_holds_a_key(tmp_path: Path, key_files: list[Path]) -> None:
    file = make_tiny_run(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = [f"feed.endpoints=[tcp://127.0.0.1:{port}]", f"stream.keys={key_files[0].parent}"]
    command = [sys.executable, "-m", "dflash_mp.cli", "run", "-c", str(file)]
    command += [word for option in options for word in ("--set", option)]
    plan = subprocess.run([*command, "--plan"], capture_output=True, check=True, timeout=120)
    done = subprocess.run(command, capture_output=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    written = {str(path): path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert len(written) > 8
    assert any("connected" in text.decode(errors="replace") for name, text in written.items() if "feeder" in name)
    printed = {"--plan": plan.stdout + plan.stderr, "output": done.stdout + done.stderr}
    assert leaks(key_files, {**written, **printed}) == []


@pytest.mark.parametrize("form", ["Z85", "bytes", "hex", "base64", "repr"])
def test_a_key_that_is_written_is_found(form: str, key_files: list[Path]) -> None:
    secret = next(file for file in key_files if file.name == "drafter.secret")
    found = leaks(key_files, {"a log": b"key=" + forms(secret)[form] + b"\n", "another": b"stream.keys=/run/keys"})
    assert f"drafter.secret as {form} in a log" in found
    assert all("in a log" in leak for leak in found)
