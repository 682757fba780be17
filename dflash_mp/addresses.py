"""What an address says about where it leads: to this host, or elsewhere. Sends nothing; a name costs one look-up."""

from __future__ import annotations

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
