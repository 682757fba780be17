"""One rank of a machine compiles first."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dflash_mp.drafter.compile_order import one_first
from dflash_mp.drafter.world import World


def ranks(count: int) -> list[World]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    cpu = torch.device("cpu")
    stores = [store, *(dist.TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(count - 1))]
    return [World(rank, count, rank, count, cpu, each) for rank, each in enumerate(stores)]


def test_one_rank_compiles_and_the_others_go_on_when_it_has() -> None:
    compiling, allowed = threading.Event(), threading.Event()
    order: list[str] = []

    def compile_here() -> None:
        compiling.set()
        assert allowed.wait(30)
        order.append("compiled")

    def rank(world: World) -> None:
        one_first(world, compile_here)
        order.append("goes on")

    worlds = ranks(3)
    first, *others = [threading.Thread(target=rank, args=(world,)) for world in worlds]
    first.start()
    assert compiling.wait(30)
    for thread in others:
        thread.start()
        thread.join(0.3)  # it waits: a time-out here is what is right
        assert thread.is_alive()
    allowed.set()
    for thread in (first, *others):
        thread.join(30)
    assert order == ["compiled", "goes on", "goes on", "goes on"]


def test_a_rank_that_compiles_for_too_long_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    first, second = ranks(2)
    compiling, released = threading.Event(), threading.Event()

    def compile_here() -> None:
        compiling.set()
        released.wait(30)

    thread = threading.Thread(target=one_first, args=(first, compile_here))
    thread.start()
    assert compiling.wait(30)
    with caplog.at_level(logging.WARNING):
        one_first(second, lambda: None, wait_seconds=0.2)
    assert "compiles for more than 0.2 s" in caplog.text
    released.set()
    thread.join(30)


def test_alone_nothing_is_compiled_ahead() -> None:
    one_first(World(0, 1, 0, 1, torch.device("cpu")), lambda: pytest.fail("nobody waits for it"))
