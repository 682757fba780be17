"""How a key is looked for in what a run wrote, as test_logs_and_profile.py does: it is found in any form."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("form", ["Z85", "bytes", "hex", "base64", "repr"])
def test_a_key_that_is_written_is_found(form: str, key_files: list[Path]) -> None:
    secret = next(file for file in key_files if file.name == "drafter.secret")
    found = leaks(key_files, {"a log": b"key=" + forms(secret)[form] + b"\n", "another": b"stream.keys=/run/keys"})
    assert f"drafter.secret as {form} in a log" in found
    assert all("in a log" in leak for leak in found)
