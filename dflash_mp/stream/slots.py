"""Memory that rows live in: allocated once, reused for ever, 64-byte aligned, pinned when asked.

Reuse is not a nicety: memory that the kernel has to map afresh for each row costs several times the copy into it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_mp.errors import StreamError

_ALIGN = 64


@dataclass(frozen=True, eq=False)
class Slot:
    """Room for one row: `buffer` (uint8 on the CPU) and `view`, the same bytes for sockets and checksums."""

    index: int
    buffer: torch.Tensor
    view: memoryview


def make_slots(first_index: int, count: int, nbytes: int, *, pin: bool, remedy: str) -> list[Slot]:
    """`count` slots of `nbytes` bytes in one allocation. `StreamError` with `remedy` if there is too little memory.

    They start as zeros: the gaps between a row's parts are sent too, and must not tell what was in this memory before.
    """
    stride = -(-nbytes // _ALIGN) * _ALIGN
    try:
        slab = torch.zeros(count * stride + _ALIGN, dtype=torch.uint8, pin_memory=pin and torch.cuda.is_available())
    except RuntimeError as error:
        raise StreamError(
            f"no memory for {count} rows of {nbytes / 2**20:.1f} MiB: {str(error).splitlines()[0]}", remedy
        ) from None
    start = -slab.data_ptr() % _ALIGN
    buffers = [slab[start + i * stride : start + i * stride + nbytes] for i in range(count)]
    return [Slot(first_index + i, buffer, buffer.numpy().data) for i, buffer in enumerate(buffers)]


class DeferredSlots:
    """`count` slots whose memory is taken all at once when one of them is first used: most drafters of one machine never need it."""

    def __init__(self, count: int, nbytes: int, *, pin: bool, remedy: str) -> None:
        self._count, self._nbytes, self._pin, self._remedy = count, nbytes, pin, remedy
        self._made: list[Slot] = []
        self.slots = [DeferredSlot(index, self) for index in range(count)]

    def make(self) -> list[Slot]:
        """Take the memory now, if it has not been taken. `StreamError` if there is too little. Not locked."""
        if not self._made:
            self._made = make_slots(0, self._count, self._nbytes, pin=self._pin, remedy=self._remedy)
        return self._made


@dataclass(frozen=True, eq=False)
class DeferredSlot:
    """One of them; used like a `Slot`."""

    index: int
    owner: DeferredSlots

    @property
    def buffer(self) -> torch.Tensor:
        return self.owner.make()[self.index].buffer

    @property
    def view(self) -> memoryview:
        return self.owner.make()[self.index].view


class SlotPool:
    """Slots made when first needed, up to `capacity`. Not locked: its owner is."""

    def __init__(self, capacity: int, nbytes: int, *, pin: bool) -> None:
        self.capacity = capacity
        self.made = self._numbers = 0
        self._nbytes = nbytes
        self._pin = pin
        self._free: list[Slot] = []

    def take(self) -> Slot | None:
        """A free slot, the one freed last first (its memory is the warmest); None if all are in use."""
        if not self._free and self.made < self.capacity:
            self._free = make_slots(self._numbers, 1, self._nbytes, pin=self._pin, remedy="lower feed.memory_mib")
            self.made, self._numbers = self.made + 1, self._numbers + 1
        return self._free.pop() if self._free else None

    def give_back(self, slot: Slot) -> None:
        self._free.append(slot)

    @property
    def used(self) -> int:
        """Slots that are not free."""
        return self.made - len(self._free)

    def trim(self, keep: int) -> None:
        """Let go of free slots, as long as there are more than `keep` in all: their memory may go to something else."""
        while self._free and self.made > keep:
            self._free.pop(0)
            self.made -= 1
