"""A row's forward pass on a CUDA device as one CUDA graph: recorded once, replayed for each row.

A small target spends most of a row's time launching kernels; a replay launches them all at once. What a graph reads and writes lies at fixed
addresses, so a row is copied in, and its features are copied out before the next row may overwrite them, on whatever stream that comes.
Memory: one row of features, and what the layers need for one row, kept for good; a recording that fails keeps none. Costs two passes to record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

# ids, positions and documents (int64 [3, T]) and the features to fill [T, K·H]; gives the last hidden state [T, H].
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class RecordedRow:
    """`forward` for rows of `inputs`' length T on one CUDA device. Raises `RuntimeError` where it can't be recorded.

    `inputs`: those of some row; `features`: what `forward` fills; both on the device and from now on this object's.
    """

    def __init__(self, forward: Forward, inputs: torch.Tensor, features: torch.Tensor) -> None:
        self._inputs, self._features = inputs, features
        self._graph = torch.cuda.CUDAGraph()
        self._copied = torch.cuda.Event()
        device = inputs.device
        # The outermost stream context: a recording that fails leaves its own stream as the current one.
        with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                forward(inputs, features)  # compiles, loads kernels and makes workspaces, which a recording can't
            torch.cuda.current_stream(device).wait_stream(side)
            torch.cuda.synchronize(device)
            # A stream of this device, without work or workspaces of its own: cuBLAS makes one for it, which lives with the graph.
            stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
            try:
                with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    self._final = forward(inputs, features)
            except BaseException:
                end_failed_recording(pool, device)
                raise
            self._copied.record(torch.cuda.current_stream(device))

    def run(self, inputs: torch.Tensor, out: torch.Tensor, last: torch.Tensor | None) -> None:
        """Fill `out` [T, K·H] and `last` [T, H], on the device, from `inputs`, int64 [3, T], pinned if not
        on the device. Queued on the current stream."""
        stream = torch.cuda.current_stream(self._inputs.device)
        stream.wait_event(self._copied)
        self._inputs.copy_(inputs, non_blocking=True)
        self._graph.replay()
        out.copy_(self._features)
        if last is not None:
            last.copy_(self._final)
        self._copied.record(stream)


def end_failed_recording(pool: tuple[int, int], device: torch.device) -> None:
    """Tell the allocator that the recording into `pool` on `device` is over, and give up its memory.

    A recording that is invalid when it ends raises before PyTorch does this itself, and while one is under way no memory that a second
    stream has used is freed.
    """
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:  # it ended in order: the memory is its graph's
        return
    torch._C._cuda_releasePool(device.index, pool)


def waiting_rotary(module: nn.Module) -> str | None:
    """The kind of rotary embedding in `module` that asks the device for the highest position, which no recording can; None: none does."""
    for each in module.modules():
        found = getattr(each, "rope_type", None)
        for kind in found.values() if isinstance(found, Mapping) else (found,):
            if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
                return kind
    return None
