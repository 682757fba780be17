"""How much a path on this machine carries: rows of random bytes from a feeder process to this one, a few seconds.

The real feeder service and the real client, by ipc or by tcp over loopback, with what the target and the drafter would do left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

from dflash_mp.bench.synthetic import synthetic_expectations, synthetic_plan
from dflash_mp.config import StreamConfig
from dflash_mp.data.row import RowKey
from dflash_mp.errors import DflashError
from dflash_mp.process import MARK, mark_of
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.layout import RowLayout

_TOKENS, _HIDDEN = 1024, 2048  # rows of 8 MiB
_SLOTS, _ROWS, _TRIES = 6, 12, 2
_KINDS = ("ipc", "tcp")  # the order in which the source names its addresses


def probe_stream(kind: str) -> float:
    """Bytes per second by `kind`, "ipc" or "tcp": the better of two tries. Raises `DflashError` if the feeder process fails."""
    with tempfile.TemporaryDirectory(prefix="dflash-mp-doctor-") as directory:
        command = (sys.executable, "-m", "dflash_mp.bench.stream_source", directory, str(_TOKENS), str(_HIDDEN))
        environment = {**os.environ, MARK: mark_of(os.getpid())}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as source:
            try:
                line = source.stdout.readline() if source.stdout is not None else ""
                if not line:
                    raise DflashError(
                        "the feeder of the probe ended early", "its error is above; --no-probe leaves it out"
                    )
                return _measure(json.loads(line)["feeders"][_KINDS.index(kind)])
            finally:
                if source.stdin is not None:
                    source.stdin.close()


def _measure(endpoint: str) -> float:
    plan = synthetic_plan(_TOKENS, _HIDDEN)
    row_bytes = RowLayout.of(plan).nbytes
    window = StreamConfig(window_mib=_SLOTS * row_bytes / 2**20, row_seconds=60)
    keys = [RowKey("train", number) for number in range(_SLOTS + _TRIES * _ROWS)]
    seconds = []
    with RowClient([endpoint], synthetic_expectations(plan), stream=window) as client:
        client.connect()
        client.schedule(iter(keys))
        for key in keys[:_SLOTS]:
            client.take(key).release()
        for start in range(_SLOTS, len(keys), _ROWS):
            started = time.perf_counter()
            for key in keys[start : start + _ROWS]:
                client.take(key).release()
            seconds.append(time.perf_counter() - started)
    return _ROWS * row_bytes / min(seconds)
