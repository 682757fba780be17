"""Passes on one CUDA device as CUDA graphs: recorded once, replayed for each step.

A recording takes what is queued on streams of its own device only, so all here happens with that device as the current one; what would be launched
elsewhere, and so neither recorded nor replayed, is a `RuntimeError`. A recording that fails leaves the current stream as it was. All graphs
of a `Recorder` share one memory pool, and so one stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dflash_mp.target.recorded import end_failed_recording


class Recorder:
    """Graphs on `device`, each under a number."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._graphs

    def record(self, number: int, work: Callable[[], None]) -> None:
        """Record `work`, which has run before, since a recording can neither compile nor load; it is not run. Raises what `work` does."""
        graph = torch.cuda.CUDAGraph()
        # A recording that fails leaves its own stream as the current one; in the outer context that ends.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            try:
                self._record(graph, work)
            except BaseException:
                end_failed_recording(self._pool, self._device)
                raise
        self._graphs[number] = graph

    def _record(self, graph: torch.cuda.CUDAGraph, work: Callable[[], None]) -> None:
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            if not torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"the recording is not of {self._device}")
            work()

    def replay(self, number: int) -> None:
        """Queue the graph of this number on the device's current stream."""
        with torch.cuda.device(self._device):
            self._graphs[number].replay()

    def forget(self) -> None:
        """Drop all graphs, and with them the pool: it ends with its last graph."""
        self._graphs = {}
        self._pool = torch.cuda.graph_pool_handle()
