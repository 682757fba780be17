"""Every message of the stream, and the only code that turns one into bytes or back.

A message is one frame: a msgpack map with the key "type" and the fields of its dataclass. `Row` and `Weights` are followed by one
frame of raw bytes. `decode` raises `ProtocolError` for anything else, naming what is wrong: it never returns a message that
isn't fully checked, never runs code from the wire, and allocates no more than a small multiple of the frame.

Fields marked LATER came after version 1 was first spoken. A feeder sends them only to a drafter whose Hello has one, so an older drafter is
served as before; a drafter needs a feeder that is at least as new as itself.

The conversation: Hello → Welcome or Refused; then, at any time, Get → Row… or Placed or RowError per row asked, Release when a row's
chunks have all arrived, or a placed row is needed no longer; GetWeights → Weights; Ping → Pong; Bye from either side, answered by Bye.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgpack

from dflash_mp.data.row import RowKey
from dflash_mp.stream.codec import FOR_PEOPLE, LATER, ProtocolError, Rule, at_most, between, plain, reader, shown
from dflash_mp.stream.plan import DTYPES, WIRE_DTYPES, StreamPlan
from dflash_mp.stream.software import Software

VERSION = 1
HEADER_BYTES = 1 << 16  # the largest message frame
CHUNK_BYTES = 4 << 20  # the largest frame of raw bytes
_REASON_CHARACTERS = 4000

_LARGE = 1 << 62
Count = Annotated[int, between(0, _LARGE)]
Checksum = Annotated[int, between(0, (1 << 64) - 1)]  # xxh3_64
Name = Annotated[str, at_most(256)]
Reason = Annotated[str, at_most(_REASON_CHARACTERS), FOR_PEOPLE]
Seconds = Annotated[float, between(0, 1e12)]
Key = Annotated[RowKey, Rule(f"a row with an ordinal from 0 to {_LARGE}", lambda key: 0 <= key.ordinal <= _LARGE)]
RefusalCode = Literal["version", "malformed", "run", "plan", "full", "stranger", "replaced", "key"]


class VersionError(ProtocolError):
    """The peer speaks another version of the protocol."""


@dataclass(frozen=True)
class Expectations:
    """What a drafter's own configuration says of the rows; None where it doesn't say."""

    run: Name  # name of the run's directory
    seed: Count
    row_tokens: Count
    dataset: Name | None = None  # fingerprint of the prepared dataset
    layer_ids: Annotated[tuple[int, ...], at_most(256)] | None = None
    wire_dtype: Name = field(default="auto", metadata=LATER)


@dataclass(frozen=True)
class Hello:
    """Drafter, first on every connection. `peer` names the drafter within the run, `incarnation` its process."""

    version: Count
    peer: Name
    incarnation: Name
    rank: Count
    world: Annotated[int, between(1, 1 << 20)]
    expects: Expectations
    plan: StreamPlan | None  # what its checkpoint was trained on, if it resumes or has met another feeder
    lanes: Annotated[tuple[Name, ...], at_most(8)]  # ways it can take payload, best first
    software: Software = field(default=(), metadata=LATER)  # with it, the answers have the fields that came later
    running_checksums: bool = field(default=False, metadata=LATER)  # it takes checksums of what was sent so far

    def __post_init__(self) -> None:
        if self.rank >= self.world:
            raise ValueError(f"rank {self.rank} of a world of {self.world}")
        if self.plan is not None:
            check_plan(self.plan)


@dataclass(frozen=True)
class Welcome:
    """Feeder: what it serves, and how. `outstanding` rows may be asked for at once."""

    version: Count
    feeder: Name  # random: names this feeder process
    plan: StreamPlan
    lane: Name
    row_bytes: Annotated[int, between(1, 1 << 40)]
    outstanding: Annotated[int, between(1, 1 << 16)]
    software: Software = field(default=(), metadata=LATER)
    clock: Seconds = field(default=0.0, metadata=LATER)  # its time of day, since 1970

    def __post_init__(self) -> None:
        check_plan(self.plan)


@dataclass(frozen=True)
class Refused:
    """Feeder: it will not serve this peer. After `stranger` (it has forgotten the peer, or never met it) a new Hello may help."""

    code: RefusalCode
    reason: Reason
    remedy: Reason = ""


@dataclass(frozen=True)
class RowRequest:
    """One row asked for. `request` is unique on its connection."""

    request: Count
    key: Key


@dataclass(frozen=True)
class Get:
    """Drafter: the rows wanted next, in order."""

    requests: Annotated[tuple[RowRequest, ...], at_most(1024)]


@dataclass(frozen=True)
class Row:
    """Feeder: bytes `offset` … of a row of `nbytes`, in the frame that follows. A row's chunks come in order."""

    request: Count
    key: Key
    slot: Count
    offset: Count
    nbytes: Count
    checksum: Checksum  # of the row up to the end of this frame, so the last is the whole row's; of the whole row always, unless Hello
    # has `running_checksums`


@dataclass(frozen=True)
class Placed:
    """Feeder, on the shared-memory lane instead of `Row`: the row lies in this slot of the ring, until its release."""

    request: Count
    key: Key
    slot: Count
    checksum: Checksum  # 0 where the drafter didn't ask for it


@dataclass(frozen=True)
class RowError:
    """Feeder: it could not make the row. `retryable`: another attempt, best by another feeder, may succeed."""

    request: Count
    key: Key
    reason: Reason
    retryable: bool


@dataclass(frozen=True)
class Release:
    """Drafter: all chunks of this request have arrived, or its row in the ring is needed no longer: the slot is free again."""

    request: Count
    slot: Count


@dataclass(frozen=True)
class GetWeights:
    """Drafter: the bytes from `offset` on of one of the target's frozen tensors, at most a chunk."""

    tensor: Literal["embedding", "head"]
    offset: Count


@dataclass(frozen=True)
class Weights:
    """Feeder: those bytes, in the frame that follows."""

    tensor: Literal["embedding", "head"]
    offset: Count
    nbytes: Count  # of the whole tensor
    checksum: Checksum  # of the whole tensor


@dataclass(frozen=True)
class Ping:
    """Drafter: it lives, and has taken `rows` rows from this feeder."""

    sequence: Count
    rows: Count


@dataclass(frozen=True)
class Pong:
    """Feeder: it lives. `busy` is the row in the making, since `busy_seconds`; `queued` rows wait, for all drafters."""

    sequence: Count
    rows: Count
    queued: Count
    busy: Key | None
    busy_seconds: Seconds
    computing_seconds: Seconds = field(default=0.0, metadata=LATER)  # that it took to make its `rows`


@dataclass(frozen=True)
class Bye:
    """Either side leaves. The other answers with Bye if it has not said it yet."""

    code: Literal["done", "stopped", "failed"]
    reason: Reason


Message = Hello | Welcome | Refused | Get | Row | Placed | RowError | Release | GetWeights | Weights | Ping | Pong | Bye

_TYPES: dict[str, type] = {
    "HELLO": Hello,
    "WELCOME": Welcome,
    "REFUSED": Refused,
    "GET": Get,
    "ROW": Row,
    "PLACED": Placed,
    "ROW_ERROR": RowError,
    "RELEASE": Release,
    "GET_WEIGHTS": GetWeights,
    "WEIGHTS": Weights,
    "PING": Ping,
    "PONG": Pong,
    "BYE": Bye,
}
_NAMES = {kind: name for name, kind in _TYPES.items()}
_READERS = {name: reader(kind) for name, kind in _TYPES.items()}


def encode(message: Message) -> bytes:
    """The frame of `message`."""
    frame: bytes = msgpack.packb({"type": _NAMES[type(message)], **plain(message)})
    return frame


def decode(frame: bytes | memoryview) -> Message:
    """The message in `frame`. Raises `ProtocolError` unless it is one, whole and within its rules."""
    tree = _unpack(frame)
    if not isinstance(tree, dict):
        raise ProtocolError(f"a message must be a map, not {type(tree).__name__}")
    name = tree.pop("type", None)
    if not isinstance(name, str) or name not in _READERS:
        raise ProtocolError(f"unknown message type {shown(name)}")
    if name in ("HELLO", "WELCOME"):
        _check_version(tree.get("version"), name)
    message: Message = _READERS[name](tree, name)
    return message


def reason(text: str) -> str:
    """`text`, shortened to what a message may carry."""
    return text if len(text) <= _REASON_CHARACTERS else f"{text[: _REASON_CHARACTERS - 1]}…"


def check_plan(plan: StreamPlan) -> None:
    """ValueError if the plan's sizes cannot be: they decide what a peer allocates."""
    data, target = plan.data, plan.target
    sizes = {
        "data.seed": (data.seed, 0, (1 << 63) - 1),
        "data.row_tokens": (data.row_tokens, 1, 1 << 24),
        "data.rows": (data.rows, 0, _LARGE),
        "data.held_out_rows": (data.held_out_rows, 0, _LARGE),
        "target.num_layers": (target.num_layers, 1, 1 << 16),
        "target.hidden_size": (target.hidden_size, 1, 1 << 20),
        "target.vocab_size": (target.vocab_size, 1, 1 << 24),
        "target.layer_ids (how many)": (len(target.layer_ids), 1, 256),
    }
    for name, (value, low, high) in sizes.items():
        if not low <= value <= high:
            raise ValueError(f"{name} must be from {low} to {high}, not {value}")
    if target.dtype not in DTYPES:
        raise ValueError(f"target.dtype must be one of {', '.join(DTYPES)}, not {shown(target.dtype)}")
    if target.wire_dtype not in WIRE_DTYPES:
        raise ValueError(f"target.wire_dtype must be one of {', '.join(WIRE_DTYPES)}, not {shown(target.wire_dtype)}")
    if not target.name.isprintable():
        raise ValueError(f"target.name must be printable, not {shown(target.name)}")
    if wrong := [i for i in target.layer_ids if not 0 <= i < target.num_layers]:
        raise ValueError(f"target.layer_ids names layer {wrong[0]} of a target of {target.num_layers} layers")


def _unpack(frame: bytes | memoryview) -> Any:
    if len(frame) > HEADER_BYTES:
        raise ProtocolError(f"a message of {len(frame)} bytes is longer than {HEADER_BYTES}")
    try:
        return msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            use_list=False,
            max_str_len=2 * HEADER_BYTES,
            max_bin_len=0,
            max_ext_len=0,
            max_array_len=4096,
            max_map_len=64,
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not msgpack: {str(error) or type(error).__name__}") from None


def _check_version(version: object, name: str) -> None:
    if type(version) is int and version != VERSION:
        raise VersionError(
            f"{name} speaks protocol version {version}, this side version {VERSION}",
            "install the same version of dflash-mp on both sides",
        )
