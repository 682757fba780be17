"""Key files: their modes, what is refused, and that no text shows a secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner

from dflash_mp.cli import main
from dflash_mp.config_file import load_config
from dflash_mp.errors import ConfigError, StreamError
from dflash_mp.preflight import check_endpoints
from dflash_mp.run import _write_config as write_config
from dflash_mp.stream.keys import DrafterKeys, FeederKeys, keygen


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def secret_of(file: Path) -> str:
    return file.read_text().splitlines()[1]


def test_keygen_writes_both_pairs_for_this_user_only_and_shows_no_key(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "keys"
    old = os.umask(0)
    try:
        done = CliRunner().invoke(main, ["keygen", str(directory)])
    finally:
        os.umask(old)
    assert done.exit_code == 0, done.output
    names = {"feeder.public": 0o644, "feeder.secret": 0o600, "drafter.public": 0o644, "drafter.secret": 0o600}
    assert {file.name: mode(file) for file in directory.iterdir()} == names
    assert mode(directory) == 0o700
    for file in directory.iterdir():
        assert str(file) in done.output
        assert secret_of(file) not in done.output


def test_the_files_are_two_halves_of_a_pair(tmp_path: Path) -> None:
    keygen(tmp_path)
    drafter, feeder = DrafterKeys.load(tmp_path), FeederKeys.load(tmp_path)
    assert zmq.curve_public(feeder.secret) == drafter.feeder
    assert list(feeder.drafters.values()) == ["drafter"]
    assert drafter.public.decode() == secret_of(tmp_path / "drafter.public")


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    keygen(tmp_path, ["drafter"])
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(StreamError, match=r"drafter.public exists, and keys are never overwritten"):
        keygen(tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert CliRunner().invoke(main, ["keygen", str(tmp_path), "--name", "other"]).exit_code == 0
    assert {file.name for file in tmp_path.iterdir()} == {
        *("drafter.public", "drafter.secret", "other.public", "other.secret")
    }


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 65])
def test_a_name_that_is_a_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StreamError, match="can't name a key"):
        keygen(tmp_path / "keys", [name])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("bits", [0o040, 0o004, 0o020])
def test_a_secret_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path, bits: int) -> None:
    keygen(tmp_path)
    for name, load in (("drafter", DrafterKeys.load), ("feeder", FeederKeys.load)):
        file = tmp_path / f"{name}.secret"
        file.chmod(0o600 | bits)
        with pytest.raises(StreamError, match="can be read by other users") as caught:
            load(tmp_path)
        assert f"chmod 600 {file}" in caught.value.remedy
        assert secret_of(file) not in str(caught.value)
        file.chmod(0o600)
        load(tmp_path)


def test_a_directory_in_which_others_could_put_keys_is_refused(tmp_path: Path) -> None:
    keygen(tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(StreamError, match="they could let anyone in"):
        FeederKeys.load(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match=r"cannot read stream.keys"):
        DrafterKeys.load(tmp_path / "none")
    keygen(tmp_path, ["feeder"])
    with pytest.raises(StreamError, match=r"drafter.secret: No such file"):
        DrafterKeys.load(tmp_path)
    with pytest.raises(StreamError, match="holds no drafter's public key"):
        FeederKeys.load(tmp_path)


def test_a_secret_in_a_public_keys_place_and_a_damaged_key_are_refused_without_being_shown(tmp_path: Path) -> None:
    keygen(tmp_path)
    secret = (tmp_path / "drafter.secret").read_text()
    key = secret.splitlines()[1]
    broken = [secret, f"dflash-mp public key\n{key[:-1]}\n", f"dflash-mp public key\n{'é' * 40}\n", ""]
    broken.append("dflash-mp public key\n" + "~" * 40)  # not in Z85's alphabet
    for text in broken:
        (tmp_path / "drafter.public").write_text(text, encoding="utf-8")
        with pytest.raises(StreamError, match=r"drafter.public is no public key") as caught:
            FeederKeys.load(tmp_path)
        assert key[:8] not in str(caught.value)


def test_no_repr_shows_a_key(tmp_path: Path) -> None:
    keygen(tmp_path)
    shown = repr(DrafterKeys.load(tmp_path)) + repr(FeederKeys.load(tmp_path))
    assert shown == "DrafterKeys()FeederKeys()"


def test_configuration_dumps_hold_the_directory_and_no_key(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    keygen(directory)
    file = tmp_path / "c.yaml"
    file.write_text(
        f"run_dir: {tmp_path}/run\ntarget: {{path: t}}\ndata: {{path: d}}\ntrain: {{steps: 1}}\nstream: {{keys: {directory}}}\n"
    )
    shown = CliRunner().invoke(main, ["run", "-c", str(file), "--plan"]).output
    (tmp_path / "run").mkdir()
    write_config(load_config(file))
    for text in (shown, (tmp_path / "run/config.yaml").read_text()):
        assert str(directory) in text
        assert not any(secret_of(key) in text for key in directory.iterdir())


def test_keys_and_no_keys_at_once_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"run_dir: {tmp_path}\ntarget: {{path: t}}\ndata: {{path: d}}\ntrain: {{steps: 1}}\n")
    with pytest.raises(ConfigError, match="contradict each other"):
        load_config(file, ["stream.keys=keys", "feed.insecure_no_auth=true"])


def test_run_refuses_what_is_wrong_with_keys_before_it_starts_anything(tmp_path: Path) -> None:
    keygen(tmp_path)
    (tmp_path / "feeder.secret").chmod(0o640)
    file = tmp_path / "c.yaml"
    file.write_text(f"run_dir: {tmp_path}/run\ntarget: {{path: t}}\ndata: {{path: d}}\ntrain: {{steps: 1}}\n")
    with pytest.raises(StreamError, match="can be read by other users"):
        check_endpoints(load_config(file, [f"stream.keys={tmp_path}"]).config)
