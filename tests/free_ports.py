"""Ports for processes that are told theirs before they listen there."""

from __future__ import annotations

import contextlib
import random
import socket

# Below those that the kernel gives to whoever asks for any, so that hardly anybody gets one in the meantime.
_PORTS = range(10_000, 16_000)


def free_ports(count: int = 1) -> list[int]:
    """That many ports of 127.0.0.1 at which nobody listens."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports")
