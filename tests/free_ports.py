"""Ports for processes that are told theirs before they listen there."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterable

# Below those that the kernel gives to whoever asks for any, so that hardly anybody gets one in the meantime, another test run neither.
_PORTS, _ROWS = range(10_000, 16_000), range(20_000, 32_000, 50)


def free_ports(count: int = 1) -> list[int]:
    """That many ports at which nobody listens."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if _is_free([port]):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports")


def ports_in_a_row(count: int) -> int:
    """The first of `count` neighbours, at most 50, at which nobody listens."""
    for first in random.SystemRandom().sample(_ROWS, len(_ROWS)):
        if _is_free(range(first, first + count)):
            return first
    raise RuntimeError("no free ports")


def _is_free(ports: Iterable[int]) -> bool:
    with contextlib.ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.create_server(("", port)))
        except OSError:
            return False
    return True
