"""The sending side of `dflash-mp bench stream`, a process of its own: `python -m dflash_mp.bench.stream_source DIRECTORY TOKENS HIDDEN`.

It holds a pool of random rows larger than any cache and serves them in every way that is compared: two real feeders (ipc, tcp), two raw
sockets (Unix, TCP), and copies into memory such as two processes share. In all of them a row is first written, by one copy out of the pool, to the
buffer that it is sent from: that stands for the target writing its taps. Commands come as lines on standard input, answers go as
JSON lines to standard output; it ends when standard input does.
"""

from __future__ import annotations

import json
import queue
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dflash_mp.bench.synthetic import RUN, synthetic_plan, synthetic_weights
from dflash_mp.data.row import RowKey
from dflash_mp.process import die_with_parent
from dflash_mp.stream.feeder import FeederService
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.shared_memory import Ring

Write = Callable[[int, torch.Tensor], None]
Buffers = queue.SimpleQueue[torch.Tensor]
POOL_BYTES = 256 << 20
_BUFFERS = 4


def pool_row(number: int, nbytes: int) -> torch.Tensor:
    """Row `number` of the pool: random bytes that both sides can make."""
    generator = torch.Generator().manual_seed(number)
    return torch.empty(-(-nbytes // 8), dtype=torch.int64).random_(generator=generator).view(torch.uint8)[:nbytes]


def pool_rows(nbytes: int) -> int:
    """How many rows there are."""
    return -(-POOL_BYTES // nbytes)


def main(directory: Path, tokens: int, hidden: int) -> None:
    """Serve until standard input ends, or the process that started this one."""
    die_with_parent()
    torch.set_num_threads(1)
    plan = synthetic_plan(tokens, hidden)
    nbytes = RowLayout.of(plan).nbytes
    pool = torch.empty(pool_rows(nbytes), nbytes, dtype=torch.uint8)
    for number, row in enumerate(pool):
        row.copy_(pool_row(number, nbytes))

    def write(number: int, buffer: torch.Tensor) -> None:
        buffer.copy_(pool[number % len(pool)])

    def compute(key: RowKey, buffer: torch.Tensor) -> None:
        write(key.ordinal, buffer)

    services = [
        FeederService(endpoint, plan, synthetic_weights(plan), run=RUN)
        for endpoint in (f"ipc://{directory}/feeder.sock", "tcp://127.0.0.1:0")
    ]
    stop = threading.Event()
    serving = [threading.Thread(target=service.serve, args=(compute, stop, 1e9)) for service in services]
    for thread in serving:
        thread.start()
    unix, tcp = socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 0))
    unix.bind(f"{directory}/raw.sock")
    unix.listen()
    for server in (unix, tcp):
        threading.Thread(target=_serve_raw, args=(server, nbytes, write), daemon=True).start()
    ports = {"feeders": [service.endpoint for service in services], "tcp_port": tcp.getsockname()[1]}
    print(json.dumps(ports), flush=True)
    ring = Ring(nbytes, _BUFFERS)
    buffers = [slot.buffer for _ in range(_BUFFERS) if (slot := ring.take()) is not None]
    for line in sys.stdin:
        command, _, count = line.partition(" ")
        start = time.perf_counter()
        if command == "copy":
            for number in range(int(count)):
                write(number, buffers[number % _BUFFERS])
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "cpu": cpu_seconds()}), flush=True)
    stop.set()
    for thread in serving:
        thread.join()


def cpu_seconds() -> float:
    """CPU time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _serve_raw(server: socket.socket, nbytes: int, write: Write) -> None:
    """For each row count (8 bytes) received, send so many rows: one thread writes the next while another sends the last."""
    buffers = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(_BUFFERS)]
    connection, _ = server.accept()
    while request := connection.recv(8):
        count = int.from_bytes(request, "little")
        free, written = Buffers(), Buffers()
        for buffer in buffers:
            free.put(buffer)
        threading.Thread(target=_fill, args=(count, free, written, write), daemon=True).start()
        for _ in range(count):
            buffer = written.get()
            connection.sendall(buffer.numpy().data)
            free.put(buffer)


def _fill(count: int, free: Buffers, written: Buffers, write: Write) -> None:
    for number in range(count):
        buffer = free.get()
        write(number, buffer)
        written.put(buffer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
