"""One feeder as a group of processes that share the target: the feeder itself leads, the others follow each of its passes.

The leader starts its followers, hands each what it needs to know and then every row through a pipe, and computes with them. They live as
long as it does: the kernel kills them when it dies, and they end when the pipe is closed. When one of them dies, or doesn't take a row
for `GROUP_SECONDS`, the leader says which and ends at once, since it may hang in a sum that will never come. Bytes in the pipe are numbers and JSON.
Nobody takes leave of the group: NCCL does that together with all others, of which some may be gone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from dflash_mp import logs
from dflash_mp.errors import TargetError
from dflash_mp.process import LEADER, mark_of
from dflash_mp.target.capture import Capture
from dflash_mp.target.split import GROUP_SECONDS, Share, join_group

log = logging.getLogger("dflash_mp.feed")
STOPS = frozenset({signal.SIGTERM, signal.SIGINT})  # for the leader: the followers end with it
_LENGTH = struct.Struct("<q")
_END_SECONDS = 8.0
_LOOK_SECONDS = 0.2
_BLAME_SECONDS = 2.0


class SplitGroup:
    """The leader's side. `module` is run with -m as each follower, on `devices[1:]`, and is told `facts`. Leaving the context ends them."""

    def __init__(self, module: str, devices: Sequence[torch.device], facts: dict[str, Any]) -> None:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # all are on this machine
        ways = len(devices)
        self.share = Share(0, ways, devices[0])
        self._store = _local_store(ways)
        self._closing = False
        self._since: float | None = None  # when the row was begun that is being handed out
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # inherited: held back until the followers ignore them
        try:
            self._followers = [
                subprocess.Popen(
                    [sys.executable, "-m", module],
                    stdin=subprocess.PIPE,
                    stdout=sys.stderr.fileno(),
                    start_new_session=True,  # Ctrl-C is for the leader
                    env={**os.environ, LEADER: mark_of(os.getpid())},
                )
                for _ in devices[1:]
            ]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        threading.Thread(target=self._watch, name="followers", daemon=True).start()
        for rank, follower in enumerate(self._followers, 1):
            text = {"rank": rank, "devices": list(map(str, devices)), "port": self._store.port, "facts": facts}
            self._send(follower, json.dumps(text).encode())
        join_group(self.share, self._store.port, self._store)

    def lead(self, capture: Capture) -> None:
        """From now on every pass of `capture` is one of all processes, which have come as far as this."""
        capture.forward.together = self._together

    def __enter__(self) -> SplitGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing = True
        for follower in self._followers:
            if follower.stdin is not None:
                follower.stdin.close()
        deadline = time.monotonic() + (_END_SECONDS if error is None else 0.0)
        for rank, follower in enumerate(self._followers, 1):
            try:
                follower.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                follower.kill()
                follower.wait()
                if error is None:
                    log.warning("process %d (pid %d) did not end by itself and was killed", rank, follower.pid)

    @contextmanager
    def _together(self, inputs: torch.Tensor) -> Iterator[None]:
        self._since = time.monotonic()
        for follower in self._followers:
            self._send(follower, inputs.contiguous().numpy().tobytes())
        self._since = None
        try:
            yield
        except Exception as error:  # the others are in the middle of this row: there is no next one
            self._blame_the_dead()
            self._end(f"the leader could not compute a row: {error}")

    def _send(self, follower: subprocess.Popen[bytes], message: bytes) -> None:
        if follower.stdin is None:
            raise RuntimeError("a follower without a pipe")
        try:
            follower.stdin.write(_LENGTH.pack(len(message)) + message)
            follower.stdin.flush()
        except BrokenPipeError:
            self._blame_the_dead()
            self._end(f"process {self._followers.index(follower) + 1} (pid {follower.pid}) listens no more")

    def _watch(self) -> None:
        while not self._closing:
            if (dead := self._dead()) is not None and not self._closing:
                self._end(dead)
            since = self._since
            if since is not None and time.monotonic() - since > GROUP_SECONDS:
                self._end(f"one took no row for {GROUP_SECONDS:.0f} s")
            time.sleep(_LOOK_SECONDS)

    def _blame_the_dead(self) -> None:
        """A sum that failed may be the first thing that is seen of a follower's death."""
        deadline = time.monotonic() + _BLAME_SECONDS
        while time.monotonic() < deadline:
            if (dead := self._dead()) is not None:
                self._end(dead)
            time.sleep(_LOOK_SECONDS)

    def _dead(self) -> str | None:
        for rank, follower in enumerate(self._followers, 1):
            code = follower.poll()
            if code is not None:
                what = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
                return f"process {rank} (pid {follower.pid}) ended {what}"
        return None

    def _end(self, what: str) -> NoReturn:
        """Not by raising: the thread that computes may wait for a sum that will never come."""
        error = TargetError(
            f"of the {self.share.ways} processes that share the target, {what}",
            "its own last lines are above; start the feeder again",
        )
        log.error("%s", error, extra=logs.facts("failed", exit_code=error.exit_code))
        os._exit(error.exit_code)


class Follower:
    """A follower's side: what the leader says, through `pipe`."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe
        said = self._read()
        if said is None:
            sys.exit(0)
        text = json.loads(said)
        self.facts: dict[str, Any] = text["facts"]
        devices = [torch.device(name) for name in text["devices"]]
        self.share = Share(text["rank"], len(devices), devices[text["rank"]])
        self._port: int = text["port"]

    def join(self) -> None:
        """Meet the others."""
        join_group(self.share, self._port)

    def follow(self, capture: Capture) -> None:
        """Compute with the others until the leader closes the pipe."""
        info, like = capture.target.info, capture.target.embedding
        with torch.inference_mode():
            while (message := self._read()) is not None:
                inputs = torch.from_numpy(np.frombuffer(message, np.int64).reshape(3, -1).copy())
                out = like.new_empty(inputs.shape[1], info.feature_width)
                last = like.new_empty(inputs.shape[1], info.hidden_size) if capture.last_hidden else None
                capture.forward(inputs, out, last)
        if like.device.type == "cuda":
            torch.cuda.synchronize(like.device)  # the leader may still be in the sums of its last row

    def _read(self) -> bytes | None:
        head = self._pipe.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        message = self._pipe.read(length)
        return message if len(message) == length else None


def _local_store(ways: int) -> dist.TCPStore:
    """Where the processes meet: listens on this machine's own address only, since whoever reaches it may write into it."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        ways,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=GROUP_SECONDS),
        master_listen_fd=listening.detach(),
    )
