"""A drafter in a process of its own that connects, asks for rows and takes none: to be killed or stopped."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import stream_client
from feeder_process import SERVER, START_SECONDS
from stream_client import client_of, keys

from dflash_mp.stream.plan import StreamPlan


def start_drafter(endpoint: str, plan: StreamPlan | None = None, *, shared_memory: bool = False) -> BaseProcess:
    """Rank 1 of 2, connected when this returns, with rows asked for."""
    mine, theirs = SERVER.Pipe()
    process = SERVER.Process(target=_main, args=(endpoint, plan, shared_memory, theirs), daemon=True)
    process.start()
    theirs.close()
    assert mine.poll(START_SECONDS)
    mine.recv()
    return process


def _main(endpoint: str, plan: StreamPlan | None, shared_memory: bool, pipe: Connection) -> None:
    stream_client.SHARED_MEMORY = shared_memory
    client = client_of([endpoint], plan, rank=1, world=2)
    client.connect()
    client.schedule(iter(keys(0, 9)))
    pipe.send(None)
    time.sleep(3600)
