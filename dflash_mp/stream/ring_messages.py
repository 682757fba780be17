"""What is said on a lane's socket: the drafter's one request and the feeder's answer.

RingRequest → RingProgress… → RingOffer, which a file descriptor accompanies, or RingDenied. One packet each, read as strictly as the
stream's messages. The offer's token is then shown in the stream's HELLO: that ties the memory to a conversation that was let in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgpack

from dflash_mp.stream.codec import ProtocolError, between, plain, reader
from dflash_mp.stream.fd_passing import MESSAGE_BYTES
from dflash_mp.stream.messages import Count, Name, Reason

VERSION = 1  # of these messages


@dataclass(frozen=True)
class RingRequest:
    """Drafter: a ring of as many rows as `window_bytes` hold, at least `least` rows."""

    version: Count
    peer: Name
    world: Annotated[int, between(1, 1 << 20)]
    window_bytes: Count
    least: Annotated[int, between(1, 1 << 16)]
    writable: bool  # to be registered with CUDA, which needs a writable mapping
    checksums: bool  # the feeder takes each row's checksum


@dataclass(frozen=True)
class RingProgress:
    """Feeder: it is taking the memory; so many bytes are there."""

    nbytes: Count


@dataclass(frozen=True)
class RingOffer:
    """Feeder: `rows` slots, each of `row_bytes` bytes, `stride` bytes apart, in the file that comes with this."""

    token: Name
    rows: Annotated[int, between(1, 1 << 32)]
    row_bytes: Annotated[int, between(1, 1 << 40)]
    stride: Annotated[int, between(1, 1 << 40)]

    def __post_init__(self) -> None:
        if self.stride < self.row_bytes or self.rows * self.stride > 1 << 44:
            raise ValueError(f"{self.rows} rows of {self.row_bytes} bytes, {self.stride} apart")


@dataclass(frozen=True)
class RingDenied:
    """Feeder: no ring for this drafter, and why."""

    reason: Reason
    remedy: Reason


RingMessage = RingRequest | RingProgress | RingOffer | RingDenied
_TYPES: dict[str, type] = {
    "RING_REQUEST": RingRequest,
    "RING_PROGRESS": RingProgress,
    "RING_OFFER": RingOffer,
    "RING_DENIED": RingDenied,
}
_NAMES = {kind: name for name, kind in _TYPES.items()}
_READERS = {name: reader(kind) for name, kind in _TYPES.items()}


def encode(message: RingMessage) -> bytes:
    frame: bytes = msgpack.packb({"type": _NAMES[type(message)], **plain(message)})
    return frame


def decode(frame: bytes) -> RingMessage:
    """The message in `frame`. Raises `ProtocolError` unless it is one, whole and within its rules."""
    try:
        tree = msgpack.unpackb(frame, use_list=False, max_str_len=MESSAGE_BYTES, max_bin_len=0, max_ext_len=0)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not msgpack: {str(error) or type(error).__name__}") from None
    name = tree.pop("type", None) if isinstance(tree, dict) else None
    if not isinstance(name, str) or name not in _READERS:
        raise ProtocolError("an unknown message on the lane's socket")
    message: RingMessage = _READERS[name](tree, name)
    return message
