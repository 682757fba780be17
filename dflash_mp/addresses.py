"""What an address says about where it leads: to this host, or elsewhere. Sends nothing; a name costs one look-up."""

from __future__ import annotations

import ipaddress
import socket


def is_of_this_host(endpoint: str) -> bool:
    """Whether a feeder on this host could listen on the `ipc://PATH` or `tcp://HOST:PORT` endpoint, whoever has its port now. False for an unknown name."""
    scheme, _, address = endpoint.partition("://")
    host = address.rpartition(":")[0].strip("[]")
    if scheme == "ipc" or host == "*":
        return True
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def only_from_here(endpoint: str) -> bool:
    """Whether only this host reaches the endpoint."""
    scheme, _, address = endpoint.partition("://")
    return scheme == "ipc" or is_loopback(address.rpartition(":")[0])


def is_loopback(host: str) -> bool:
    """Of an address, or `localhost`; any other name leads who knows where."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def in_url(address: str) -> str:
    """What this host writes into a URL to reach a process of its own that listens at `address`."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"[{address}]" if ":" in address and not address.startswith("[") else address
