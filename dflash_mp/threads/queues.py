"""The original pipeline's shape: per drafter one thread that makes or receives hidden states, and one bounded queue of them.

`RowQueue` is a `RowSource` for one drafter. Its feeder thread takes rows from another source a few ahead, cuts them to their length and copies
them into slots of its own. A step that failed is tried again on the same rows: `rewind` gives back the rows taken since the last
`commit`. Every wait is bounded; what fails in the feeder thread is raised by `take`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import TracebackType

import torch

from dflash_mp.data.row import RowKey
from dflash_mp.drafter.rows import RowSource
from dflash_mp.errors import StreamError
from dflash_mp.stream.layout import RowLayout, RowTensors

_TICK_SECONDS = 0.2
_END_SECONDS = 10.0


class QueuedRow:
    """A row in a slot of the queue, of its own length."""

    def __init__(self, key: RowKey, slot: torch.Tensor, layout: RowLayout) -> None:
        self.key, self.slot, self._layout = key, slot, layout
        self.buffer = slot[: layout.nbytes]

    @property
    def tensors(self) -> RowTensors:
        return self._layout.views(self.buffer)

    def release(self) -> None:
        """The queue keeps the row until the step that used it is committed."""


class RowQueue:
    """Rows of one drafter, `ahead` of their use. Use it in a `with` block, which ends the feeder thread."""

    def __init__(
        self,
        source: RowSource,
        whole: RowLayout,
        layout_of: Callable[[RowKey], RowLayout],
        *,
        number: int,
        rows_per_step: int,
        ahead: int = 2,
        row_seconds: float = 300.0,
        pin: bool = False,
    ) -> None:
        self._source, self._whole, self._layout_of = source, whole, layout_of
        self._number, self._row_seconds = number, row_seconds
        self._ready: queue.Queue[QueuedRow | BaseException] = queue.Queue()
        self._free: queue.Queue[torch.Tensor] = queue.Queue()
        for _ in range(rows_per_step + ahead):
            self._free.put(torch.zeros(whole.nbytes, dtype=torch.uint8, pin_memory=pin))
        self._taken: deque[QueuedRow] = deque()  # since the last commit
        self._again: deque[QueuedRow] = deque()  # to be taken again
        self._stop = threading.Event()
        self.broken = False  # no more rows will come
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RowQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def schedule(self, keys: Iterator[RowKey]) -> None:
        """Start to feed these rows, in order. The source must have been told of the same ones."""
        if self._thread is not None:
            raise RuntimeError("rows are scheduled once")
        self._thread = threading.Thread(target=self._feed, args=(keys,), name=f"feeder {self._number}", daemon=True)
        self._thread.start()

    def take(self, key: RowKey) -> QueuedRow:
        """The row, in the order scheduled. Raises `StreamError` when it does not come in time, or what went wrong in feeding it."""
        if self._again:
            row: QueuedRow | BaseException = self._again.popleft()
        else:
            row = self._next(key)
        if isinstance(row, BaseException):
            self.broken = True
            raise row
        if row.key != key:
            raise RuntimeError(f"{key} was taken, {row.key} is next")
        self._taken.append(row)
        return row

    def rewind(self) -> None:
        """The rows taken since the last commit will be taken again."""
        self._again.extendleft(reversed(self._taken))
        self._taken.clear()

    def commit(self) -> None:
        """The rows taken so far are done with; their slots are used again."""
        while self._taken:
            self._free.put(self._taken.popleft().slot)

    def _next(self, key: RowKey) -> QueuedRow | BaseException:
        deadline = time.monotonic() + self._row_seconds
        while time.monotonic() < deadline:
            try:
                return self._ready.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                if self._thread is None or not self._thread.is_alive():
                    break
        self.broken = True
        raise StreamError(
            f"drafter {self._number}: {key} did not come in {self._row_seconds:.0f} s", "see the feeder's messages"
        )

    def _feed(self, keys: Iterator[RowKey]) -> None:
        try:
            for key in keys:
                slot = self._free_slot()
                if slot is None:
                    return
                self._ready.put(self._fill(key, slot))
        except BaseException as error:
            self._ready.put(error)

    def _free_slot(self) -> torch.Tensor | None:
        while not self._stop.is_set():
            try:
                return self._free.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                continue
        return None

    def _fill(self, key: RowKey, slot: torch.Tensor) -> QueuedRow:
        taken = self._source.take(key)
        row = QueuedRow(key, slot, self._layout_of(key))
        try:
            if row.buffer.numel() == taken.buffer.numel():
                row.buffer.copy_(taken.buffer)
            else:
                _cut(taken.tensors, row.tensors)
        finally:
            taken.release()
        return row


def _cut(row: RowTensors, out: RowTensors) -> None:
    length = len(out.input_ids)
    for field in fields(RowTensors):
        part = getattr(row, field.name)
        if part is not None:
            getattr(out, field.name).copy_(part[:length])
