"""The wire between the hosts of `hosts.py`: a process that passes Ethernet frames on, late, or not at all.

`python switch.py FD…` reads frames from TAP devices (open file descriptors) and writes each to where its destination lies, after `delay`
seconds; it loses a share `loss` of them (drawn with `seed`), and all of those between two hosts that are cut apart. A command is a line of JSON on
standard input, `{"delay": 0.05, "loss": 0.01, "seed": 0, "cut": [[0, 1]]}`, answered by an empty line on standard output once it holds. The end of
standard input ends the process. A user-space switch instead of `tc netem`, because many kernels are built without it.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from collections import deque

_FRAME_BYTES = 65536
_QUEUE_FRAMES = 20_000  # under way at once; a wire that is asked for more drops, as any does


def main(taps: list[int]) -> None:
    """Pass frames on until standard input ends. MAC addresses end in the number of their host (`hosts.py` sets them)."""
    for tap in taps:
        os.set_blocking(tap, False)
    draw, delay, loss, cut = random.Random(0), 0.0, 0.0, set[frozenset[int]]()
    under_way: deque[tuple[float, int, int, bytes]] = deque()  # when due, from, to, what
    while True:
        wait = None if not under_way else max(0.0, under_way[0][0] - time.monotonic())
        ready, _, _ = select.select([0, *taps], [], [], wait)
        for tap in ready:
            if tap == 0:
                line = sys.stdin.readline()
                if not line:
                    return
                command = json.loads(line)
                draw, delay, loss = random.Random(command["seed"]), command["delay"], command["loss"]
                cut = {frozenset(pair) for pair in command["cut"]}
                print(flush=True)
                continue
            source = taps.index(tap)
            for _ in range(64):
                try:
                    frame = os.read(tap, _FRAME_BYTES)
                except (BlockingIOError, OSError):  # nothing more, or the interface is down
                    break
                for to in [frame[5]] if not frame[0] & 1 and frame[5] < len(taps) else range(len(taps)):
                    lost = loss > 0 and draw.random() < loss
                    if to != source and not lost and len(under_way) < _QUEUE_FRAMES:
                        under_way.append((time.monotonic() + delay, source, to, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, source, to, frame = under_way.popleft()
            if frozenset((source, to)) not in cut:
                try:
                    os.write(taps[to], frame)
                except OSError:  # that interface is down, or its queue full: the frame is lost
                    continue


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
