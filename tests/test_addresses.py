"""What an address says, and who listens at it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from dflash_mp.addresses import in_url, is_loopback, is_of_this_host, only_from_here
from dflash_mp.listening import sockets_at, who_listens


@pytest.mark.parametrize(
    ("endpoint", "this_host", "from_here"),
    [
        ("ipc:///tmp/x.sock", True, True),
        ("tcp://127.0.0.1:5555", True, True),
        ("tcp://localhost:5555", True, True),
        ("tcp://0.0.0.0:5555", True, False),
        ("tcp://*:5555", True, False),
        ("tcp://198.51.100.1:5555", False, False),
        ("tcp://[2001:db8::1]:5555", False, False),
        ("tcp://no-such-host.invalid:5555", False, False),
    ],
)
def test_where_an_endpoint_is_and_who_reaches_it(endpoint: str, this_host: bool, from_here: bool) -> None:
    assert (is_of_this_host(endpoint), only_from_here(endpoint)) == (this_host, from_here)


def test_an_address_whose_port_is_taken_is_of_this_host_all_the_same() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert is_of_this_host(f"tcp://127.0.0.1:{server.getsockname()[1]}")


def test_loopback_is_what_the_address_says_and_not_how_a_name_begins() -> None:
    assert all(map(is_loopback, ("localhost", "127.3.2.1", "::1", "[::1]")))
    assert not any(map(is_loopback, ("127.0.0.1.example.org", "localhost.example.org", "10.0.0.5", "::", "")))


def test_a_process_that_listens_everywhere_is_read_at_loopback() -> None:
    written = ["127.0.0.1", "[::1]", "[fd00::6]", "[fd00::6]", "10.0.0.5"]
    assert [in_url(address) for address in ("0.0.0.0", "::", "fd00::6", "[fd00::6]", "10.0.0.5")] == written


def test_who_listens_is_found_and_who_only_has_a_name_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a socket"
    with socket.socket(socket.AF_UNIX) as unix, socket.socket() as tcp:
        unix.bind(str(path))
        tcp.bind(("127.0.0.1", 0))
        endpoints = [f"ipc://{path}", f"tcp://127.0.0.1:{tcp.getsockname()[1]}"]
        assert not any(map(sockets_at, endpoints))
        unix.listen()
        tcp.listen()
        assert [len(sockets_at(endpoint)) for endpoint in endpoints] == [1, 1]
        assert all(f"(process {os.getpid()})" in (who_listens(endpoint) or "") for endpoint in endpoints)
    assert who_listens(endpoints[1]) is None
