"""Rings of row slots in memory that a feeder and one drafter share.

The feeder makes a ring for each conversation: the target writes rows into it, the drafter reads them where they lie. It is an anonymous file
(memfd), so nothing of it has a name that could be left behind, and it is sealed: neither side can shrink it under the other. The drafter's
mapping can't be written to, unless it asked for one that can, for CUDA. Memory is taken and touched when the ring is made: what is
missing is a `LaneError` then, never a bus error later. It is freed when both sides have let go of it, whichever ends first.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dflash_mp.stream.fd_passing import LaneError
from dflash_mp.stream.memory_limits import shortage
from dflash_mp.stream.ring_messages import RingOffer
from dflash_mp.stream.slots import Slot

log = logging.getLogger(__name__)
_ALIGN = 64
_STEP_BYTES = 64 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_REMEDY = "give the feeder's container or machine more memory, or lower stream.window_mib"


class Ring:
    """The feeder's side: `rows` slots. `take` and `give_back` aren't locked: their caller is."""

    def __init__(
        self,
        row_bytes: int,
        rows: int,
        *,
        writable: bool = False,
        checksums: bool = False,
        cuda_device: int | None = None,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Take the memory, telling `progress` how far it is, and register it with CUDA if a device is given. Raises `LaneError`."""
        stride = -(-row_bytes // _ALIGN) * _ALIGN
        self.rows, self.row_bytes, self.stride, self.checksums = rows, row_bytes, stride, checksums
        what = f"too little memory for a ring of {rows} rows ({rows * stride / 2**20:.1f} MiB)"
        if (missing := shortage(rows * stride)) is not None:
            raise LaneError(f"{what}: {missing}", _REMEDY)
        self.fd = os.memfd_create("dflash-mp-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            mapping = _allocate(self.fd, rows * stride, progress)
            _seal(self.fd, writable)
        except OSError as error:
            self.close_file()
            raise LaneError(f"{what}: {error.strerror or error}", _REMEDY) from None
        except BaseException:
            self.close_file()
            raise
        memory = _tensor(mapping, cuda_device)
        self._free = [_slot(memory, index, stride, row_bytes) for index in reversed(range(rows))]

    def take(self) -> Slot | None:
        """A free slot, the one freed last first; None if all are in use."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: Slot) -> None:
        self._free.append(slot)

    def close_file(self) -> None:
        """The drafter has its own descriptor, and the mapping lasts as long as this object and its slots."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class MappedRing:
    """The drafter's side of the ring that `offer` describes: `rows[i]` is slot `i`, uint8 [row_bytes], to be read only."""

    def __init__(self, fd: int, offer: RingOffer, *, cuda_device: int | None = None) -> None:
        """Map the file `fd`, which may be closed afterwards. Raises `LaneError` if it isn't what was offered, or memory runs out."""
        self.token, self.row_bytes = offer.token, offer.row_bytes
        nbytes = offer.rows * offer.stride
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if seals & _SEALS != _SEALS or os.fstat(fd).st_size < nbytes:
            raise LaneError("the memory that it offers is not sealed, or smaller than it says")
        writable = cuda_device is not None
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
        except OSError as error:
            raise LaneError(
                f"too little memory to map a ring of {nbytes / 2**20:.1f} MiB: {error.strerror or error}",
                "raise the limit on this process's address space (ulimit -v), or lower stream.window_mib",
            ) from None
        memory = _tensor(mapping, cuda_device)
        self.rows = [memory[i * offer.stride :][: offer.row_bytes] for i in range(offer.rows)]


@dataclass(frozen=True, eq=False)
class Loan:
    """A row that lies in slot `slot` of the feeder's ring until it is given back with the number of its request."""

    ring: MappedRing
    request: int
    slot: int

    @property
    def buffer(self) -> torch.Tensor:
        return self.ring.rows[self.slot]


def _allocate(fd: int, nbytes: int, progress: Callable[[int], None]) -> mmap.mmap:
    os.ftruncate(fd, nbytes)
    mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    for start in range(0, nbytes, _STEP_BYTES):
        step = min(_STEP_BYTES, nbytes - start)
        os.posix_fallocate(fd, start, step)
        np.frombuffer(mapping, np.uint8, step, start)[:: mmap.PAGESIZE].max()  # touch
        progress(start + step)
    return mapping


def _seal(fd: int, writable: bool) -> None:
    """Also forbid new writable mappings unless `writable`, where the kernel can."""
    if not writable:
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | _SEAL_FUTURE_WRITE)
            return
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def _slot(memory: torch.Tensor, index: int, stride: int, row_bytes: int) -> Slot:
    buffer = memory[index * stride :][:row_bytes]
    return Slot(index, buffer, buffer.numpy().data)


class _Mapped:
    """Owns a mapping. A weak reference to it ends before the mapping does, which isn't so for the mapping itself."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping


def _tensor(mapping: mmap.mmap, cuda_device: int | None) -> torch.Tensor:
    """All of `mapping`, which lives as long as the tensor. PyTorch has no read-only tensors: writing to one ends the process."""
    owner, address = _Mapped(mapping), np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    window: Any = (ctypes.c_uint8 * len(mapping)).from_address(address)
    window.owner = owner
    if cuda_device is not None:
        _register(owner, address, len(mapping), cuda_device)
    return torch.frombuffer(window, dtype=torch.uint8)


def _register(owner: _Mapped, address: int, nbytes: int, device: int) -> None:
    """Pin memory until `owner` ends, so that copies between it and a GPU are direct. Without it they are slower, no more."""
    with torch.cuda.device(device):
        cudart: Any = torch.cuda.cudart()
        error = int(cudart.cudaHostRegister(address, nbytes, _REGISTER_PORTABLE))
        if error != 0:
            log.warning(
                "%.1f MiB of shared memory can't be pinned (CUDA error %d): copies to the GPU will be slower",
                nbytes / 2**20,
                error,
            )
            _forget_error(device)
            return
    weakref.finalize(owner, cudart.cudaHostUnregister, address).atexit = False


def _forget_error(device: int) -> None:
    """CUDA reports a failure once more, at the next unrelated call: make that call here."""
    try:
        torch.zeros(1, device=torch.device("cuda", device))
    except RuntimeError as error:
        log.debug("reported again: %s", error)
