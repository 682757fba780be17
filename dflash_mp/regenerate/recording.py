"""Passes on one CUDA device as CUDA graphs: recorded once, replayed for each step.

A recording takes what is queued on streams of its own device only, so all here happens with that device as the current one; what would be launched
elsewhere, and so neither recorded nor replayed, is a `RuntimeError`. A recording that fails leaves the current stream as it was. All graphs
of a `Recorder` share one memory pool, and so one stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Recorder:
    """Graphs on `device`, each under a number."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._graphs

    def record(self, number: int, work: Callable[[], None]) -> None:
        """Record `work`, which has run before, since a recording can neither compile nor load; it is not run. Raises what `work` does."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            # A recording that fails leaves its own stream as the current one; here it ends.
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            if not torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"the recording is not of {self._device}")
            work()
        self._graphs[number] = graph

    def replay(self, number: int) -> None:
        """Queue the graph of this number on the device's current stream."""
        with torch.cuda.device(self._device):
            self._graphs[number].replay()

    def forget(self) -> None:
        """Drop all graphs, and with them the pool: it ends with its last graph."""
        self._graphs = {}
        self._pool = torch.cuda.graph_pool_handle()
