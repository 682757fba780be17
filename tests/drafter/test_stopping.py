"""When a rank is asked to stop: it and the others know, whatever its main thread is doing; a second request ends it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch.distributed as dist
from process_trees import SECONDS

# After SIGTERM what follows is no longer the same request, however soon it comes. The main thread is where no Python signal handler runs: in a foreign function, as in a collective, and signals don't even interrupt it.
_BUSY = """
import ctypes, signal, sys, threading, time
import torch.distributed as dist
from dflash_mp.drafter import stopping as module

class Loud(module.Stopping):
    def _on_signal(self, number):
        super()._on_signal(number)
        print("took", number.name, flush=True)
        module.SAME_SIGNAL_SECONDS = 600.0 if number == signal.SIGINT else 0.0

stopping = Loud()
stopping.share(dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False))
stopping.training = sys.argv[2] == "training"
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
print("ready", flush=True)
ctypes.CDLL(None).sleep(600)
"""


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def busy_rank(store: dist.TCPStore, state: str) -> subprocess.Popen[str]:
    rank = subprocess.Popen([sys.executable, "-c", _BUSY, str(store.port), state], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "ready\n"
    return rank


def test_a_rank_that_is_deep_in_a_call_tells_the_others_and_ends_at_a_second_signal(store: dist.TCPStore) -> None:
    rank = busy_rank(store, "training")
    assert rank.stdout is not None
    try:
        rank.send_signal(signal.SIGINT)
        assert rank.stdout.readline() == "took SIGINT\n"
        assert int(store.get("dflash_mp/stop")) == signal.SIGINT
        rank.send_signal(signal.SIGTERM)  # a parent hands on what the whole group got
        assert rank.stdout.readline() == "took SIGTERM\n"
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(SECONDS) == 128 + signal.SIGTERM
    finally:
        rank.kill()
        rank.communicate()


def test_before_training_the_first_signal_ends_the_process(store: dist.TCPStore) -> None:
    rank = busy_rank(store, "connecting")
    try:
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(SECONDS) == 128 + signal.SIGTERM
        assert not store.check(["dflash_mp/stop"])
    finally:
        rank.kill()
        rank.communicate()


_ASKS = """
import sys, time
import torch.distributed as dist
from dflash_mp.drafter.stopping import Stopping
stopping = Stopping()
stopping.share(dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False))
print("ready", flush=True)
while stopping.anywhere() is None:
    time.sleep(0.01)
print(stopping.anywhere().number.name, stopping.requested, flush=True)
"""


def test_a_rank_that_waits_learns_that_another_was_asked(store: dist.TCPStore) -> None:
    rank = subprocess.Popen([sys.executable, "-c", _ASKS, str(store.port)], stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        store.set("dflash_mp/stop", "15")
        assert rank.communicate(timeout=SECONDS)[0] == "SIGTERM None\n"
    finally:
        rank.kill()
        rank.communicate()
