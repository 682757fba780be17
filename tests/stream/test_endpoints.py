"""An address is taken by one feeder at a time, and by default only this machine's."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest
import zmq
from feeder_process import FeederProcess, feeders

from dflash_mp.errors import StreamError
from dflash_mp.stream.endpoints import bind, check_available, check_endpoint, claim


@pytest.fixture
def router() -> zmq.Socket[bytes]:
    with zmq.Context() as context:
        yield context.socket(zmq.ROUTER)
        context.destroy(linger=0)


def listen(router: zmq.Socket[bytes], endpoint: str) -> str:
    claim(endpoint, insecure_no_auth=False)
    return bind(router, endpoint)


def test_a_port_in_use_is_named(router: zmq.Socket[bytes]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(StreamError, match=f"cannot listen on {endpoint}: Address already in use") as caught:
            listen(router, endpoint)
    assert "stop the other" in caught.value.remedy


def test_a_live_feeder_keeps_its_socket_file_and_a_dead_ones_is_replaced(
    tmp_path: Path, router: zmq.Socket[bytes]
) -> None:
    endpoint = f"ipc://{tmp_path}/feeder.sock"
    with feeders(FeederProcess(endpoint)) as (feeder,):
        with pytest.raises(StreamError, match="a live feeder has it"):
            listen(router, endpoint)
        feeder.kill()
        assert (tmp_path / "feeder.sock").exists()
    assert listen(router, endpoint) == endpoint


def test_a_feeder_that_stops_leaves_no_file(tmp_path: Path) -> None:
    with feeders(FeederProcess(f"ipc://{tmp_path}/feeder.sock")) as (feeder,):
        assert feeder.stop() == 0
    assert not (tmp_path / "feeder.sock").exists()


def test_only_this_user_can_reach_an_ipc_socket(tmp_path: Path, router: zmq.Socket[bytes]) -> None:
    listen(router, f"ipc://{tmp_path}/new/deep/feeder.sock")
    assert stat.S_IMODE((tmp_path / "new/deep").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new/deep/feeder.sock").stat().st_mode) == 0o600


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path, router: zmq.Socket[bytes]) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StreamError, match="other users can change"):
        listen(router, f"ipc://{tmp_path}/open/feeder.sock")


def test_a_file_that_is_no_socket_is_kept(tmp_path: Path, router: zmq.Socket[bytes]) -> None:
    (tmp_path / "feeder.sock").write_text("precious")
    with pytest.raises(StreamError, match="is no socket"):
        listen(router, f"ipc://{tmp_path}/feeder.sock")
    assert (tmp_path / "feeder.sock").read_text() == "precious"


def test_looking_whether_an_address_is_free_leaves_it_free(tmp_path: Path, router: zmq.Socket[bytes]) -> None:
    endpoint = f"ipc://{tmp_path}/feeder.sock"
    check_available(endpoint, False)
    assert not (tmp_path / "feeder.sock").exists()
    listen(router, endpoint)
    with pytest.raises(StreamError, match="a live feeder has it"):
        check_available(endpoint, False)


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("tcp://0.0.0.0:5555", "can be reached from other hosts"),
        ("tcp://*:5555", "can be reached from other hosts"),
        ("tcp://10.0.0.1:5555", "can be reached from other hosts"),
        ("tcp://[::]:5555", "can be reached from other hosts"),
        ("tcp://127.0.0.1", "names no port"),
        ("tcp://127.0.0.1:99999", "names no port"),
        ("inproc://x", "is no feeder address"),
        ("/tmp/x", "is no feeder address"),
        ("ipc://relative", "must be absolute"),
        ("ipc:///" + "x" * 107, "108 bytes"),
    ],
)
def test_an_address_that_may_not_be_used_is_refused(endpoint: str, says: str) -> None:
    with pytest.raises(StreamError) as caught:
        check_endpoint(endpoint, insecure_no_auth=False)
    assert says in str(caught.value)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:1", "ipc:///tmp/x/y"])
def test_addresses_of_this_machine_are_allowed(endpoint: str) -> None:
    check_endpoint(endpoint, insecure_no_auth=False)


def test_other_hosts_may_be_allowed_in_words() -> None:
    check_endpoint("tcp://0.0.0.0:5555", insecure_no_auth=True)


def test_a_free_port_is_found_and_ipv6_works(router: zmq.Socket[bytes]) -> None:
    assert listen(router, "tcp://127.0.0.1:0").startswith("tcp://127.0.0.1:")
    assert listen(router, "tcp://[::1]:0").startswith("tcp://[::1]:")
