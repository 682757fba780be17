"""Recording passes on one of several devices, on a stand-in for `torch.cuda`: which device and stream are current when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_mp.regenerate import recording
from dflash_mp.regenerate.recording import Recorder


@dataclass
class Cuda:
    """Two devices; a recording is of one stream and, as in PyTorch, leaves it current if it fails."""

    device_now: int = 0
    streams: list[str] = field(default_factory=lambda: ["0 default", "1 default"])
    recorded: str = ""
    pools: int = 0
    replayed_on: list[int] = field(default_factory=list)
    given_up: list[tuple[int, torch.device]] = field(default_factory=list)

    def Stream(self, device: torch.device) -> str:
        return f"{device.index} side"

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.replayed_on.append(self.device_now))

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def current_stream(self, device: torch.device) -> str:
        return self.streams[device.index]

    def is_current_stream_capturing(self) -> bool:
        return self.streams[self.device_now] == self.recorded

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.device_now = self.device_now, device.index
        try:
            yield
        finally:
            self.device_now = before

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        place = int(stream[0])
        before, self.streams[place] = self.streams[place], stream
        try:
            yield
        finally:
            self.streams[place] = before

    @contextmanager
    def graph(self, _graph: Any, pool: int, stream: str, capture_error_mode: str) -> Iterator[None]:
        assert (pool, capture_error_mode) == (self.pools, "thread_local")
        before = self.streams[int(stream[0])]
        self.streams[int(stream[0])] = self.recorded = stream
        try:
            yield
        finally:
            self.recorded = ""
        self.streams[int(stream[0])] = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stand_in = Cuda()
    monkeypatch.setattr(recording, "torch", SimpleNamespace(cuda=stand_in, device=torch.device))
    monkeypatch.setattr(recording, "end_failed_recording", lambda *given: stand_in.given_up.append(given))
    return stand_in


def test_a_recording_is_of_its_own_device_whichever_is_current(cuda: Cuda) -> None:
    recorder = Recorder(torch.device("cuda:1"))
    seen: list[tuple[int, list[str]]] = []
    recorder.record(128, lambda: seen.append((cuda.device_now, list(cuda.streams))))
    assert seen == [(1, ["0 default", "1 side"])]
    assert (cuda.device_now, cuda.streams) == (0, ["0 default", "1 default"])
    assert 128 in recorder
    recorder.replay(128)
    assert cuda.replayed_on == [1]


def test_a_recording_that_fails_leaves_device_and_stream_as_they_were(cuda: Cuda) -> None:
    def work() -> None:
        raise ValueError("a wait for the device")

    recorder = Recorder(torch.device("cuda:1"))
    with pytest.raises(ValueError, match="a wait for the device"):
        recorder.record(128, work)
    assert (cuda.device_now, cuda.streams) == (0, ["0 default", "1 default"])
    assert 128 not in recorder
    assert cuda.given_up == [(1, torch.device("cuda:1"))]


def test_what_would_not_be_recorded_is_not_run(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "Stream", lambda device: "0 side")
    recorder = Recorder(torch.device("cuda:1"))
    with pytest.raises(RuntimeError, match="the recording is not of cuda:1"):
        recorder.record(128, lambda: pytest.fail("was run"))


def test_recordings_that_are_dropped_leave_their_memory_pool(cuda: Cuda) -> None:
    recorder = Recorder(torch.device("cuda:0"))
    recorder.record(128, lambda: None)
    recorder.forget()
    assert 128 not in recorder
    assert cuda.pools == 2
    recorder.record(128, lambda: None)  # in the new pool
