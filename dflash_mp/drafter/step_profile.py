"""A profile of some training steps: what ran when, and on CUDA what memory was allocated by whom.

`RUN/profile/rank-0-steps-10-15.trace.json.gz` is a Chrome trace (Perfetto, chrome://tracing) of the CPU and CUDA activity of these steps, with the
spans named in `SPANS`; `….memory.pickle` a snapshot of PyTorch's CUDA allocator (pytorch.org/memory_viz). A directory that cannot be made is
an error at the start; a file that cannot be written later is logged, and training goes on. `span` costs nothing but a
test of a boolean while no profile is being taken.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from dflash_mp import logs
from dflash_mp.errors import DflashError
from dflash_mp.profiling import ProfileRequest

SPANS = ("data wait", "forward", "backward", "reduce", "optimizer")
_MEMORY_EVENTS = 200_000

log = logging.getLogger(__name__)
_off = contextlib.nullcontext()
_recording = False


def span(name: str) -> contextlib.AbstractContextManager[object]:
    """A named stretch of time in the trace, one of `SPANS`."""
    return torch.profiler.record_function(name) if _recording else _off


class StepProfile:
    """Takes the profile that `request` asks for on this rank; with None, or on another rank, it does nothing."""

    def __init__(self, request: ProfileRequest | None, run_dir: Path, rank: int, device: torch.device) -> None:
        self._request = request if request is not None and rank in request.ranks else None
        self._directory, self._rank, self._cuda = run_dir / "profile", rank, device.type == "cuda"
        self._profiler: torch.profiler.profile | None = None
        self._first = 0  # step of the profile that is being taken
        if self._request is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DflashError(
                    f"cannot make {self._directory}: {error.strerror}", "free space or permissions there"
                ) from None

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Around optimizer step number `step`, counted from 1. The files are written after the last one, or when it raises."""
        request = self._request
        if request is None or not request.first <= step <= request.last:
            yield
            return
        if self._profiler is None:
            self._begin(step)
        goes_on = False
        try:
            with torch.profiler.record_function(f"step {step}"):
                yield
            goes_on = step < request.last
        finally:
            if not goes_on:
                self._end(step)

    def close(self, step: int) -> None:
        """End and write a profile that is still being taken after step `step`."""
        if self._profiler is not None:
            self._end(step)

    def _begin(self, step: int) -> None:
        global _recording
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self._first = step
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()
        _recording = True
        log.info("profiling from step %d on", step, extra=logs.facts("profile_begins", step=step))

    def _end(self, step: int) -> None:
        global _recording
        _recording = False
        profiler, self._profiler = self._profiler, None
        self._request = None
        if profiler is None:
            return
        profiler.stop()
        stem = f"rank-{self._rank}-steps-{self._first}-{step}"
        try:
            self._write(profiler, stem)
        except (OSError, RuntimeError) as error:
            log.error("the profile could not be written to %s: %s", self._directory, error)
        finally:
            if self._cuda:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, profiler: torch.profiler.profile, stem: str) -> None:
        trace = self._directory / f"{stem}.trace.json.gz"
        profiler.export_chrome_trace(str(trace))
        written = [trace]
        if self._cuda:
            written.append(self._directory / f"{stem}.memory.pickle")
            torch.cuda.memory._dump_snapshot(str(written[-1]))
        for file in written:
            if not file.is_file():
                raise OSError(f"{file.name} is missing")
            log.info("profile: %s", file, extra=logs.facts("profile", file=str(file)))
