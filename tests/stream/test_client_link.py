"""What a drafter says of a feeder, while the stream's thread loses it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from stream_client import keys
from test_stream import ipc

from dflash_mp.stream.client_link import Link
from dflash_mp.stream.messages import Pong


def test_a_feeder_that_is_lost_while_it_is_described_does_no_harm(tmp_path: Path) -> None:
    answers: list[Pong | None] = []

    class Losing(Link):
        @property  # each answer is taken back once it has been read
        def pong(self) -> Pong | None:  # type: ignore[override]
            return answers.pop() if answers else None

        @pong.setter
        def pong(self, pong: Pong | None) -> None:
            pass

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        link = Losing(ipc(tmp_path), context, zmq.Poller())
        link.state, link.row_time.seconds = "live", 0.5
        busy = Pong(1, 0, 2, keys(0, 1)[0], 30.0)
        link.heard = now = time.monotonic()
        answers.append(busy)
        assert link.stuck_for(now) >= 30
        answers.append(busy)
        assert "is connected and busy with train row 0 for 30 s, 2 more queued" in link.describe(now)
        link.close()
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("seconds", "lent", "most"), [(None, 0, 3), (1.0, 0, 3), (0.002, 0, 4), (0.0005, 0, 8), (0.0, 0, 8), (0.0005, 7, 5)]
)
def test_more_rows_are_asked_for_ahead_where_they_take_less_than_a_message(
    seconds: float | None, lent: int, most: int, tmp_path: Path
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link: Any = Link(ipc(tmp_path), context, zmq.Poller())
    try:
        assert link.most == 0
        link.welcome, link.ring = SimpleNamespace(outstanding=8), SimpleNamespace(rows=[None] * 12)
        link.row_time.seconds, link._lent = seconds, set(range(lent))
        assert link.most == most
        link.welcome.outstanding = 3
        assert link.most == 3
        link.close()
    finally:
        context.destroy(linger=0)
