"""Every message survives the wire, and nothing else passes for one."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mp.bench.synthetic import synthetic_plan
from dflash_mp.data.row import RowKey
from dflash_mp.stream import messages as m
from dflash_mp.stream.codec import ProtocolError
from dflash_mp.stream.software import Package

KEY = RowKey("train", 7)
EXPECTS = m.Expectations("run", 3, 64, None, (1, 2))
EXAMPLES: list[m.Message] = [
    m.Hello(m.VERSION, "rank 0", "ab12", 0, 2, EXPECTS, synthetic_plan(), ("inband",)),
    m.Hello(m.VERSION, "rank 1", "ab12", 1, 2, m.Expectations("run", 3, 64), None, ()),
    m.Welcome(m.VERSION, "ipc:///x", synthetic_plan(tied_head=True), "inband", 4096, 3),
    m.Hello(m.VERSION, "rank 1", "ab12", 1, 2, EXPECTS, None, (), (Package("torch", "2.13.0+cu130"),)),
    m.Welcome(m.VERSION, "ipc:///x", synthetic_plan(), "inband", 4096, 3, (Package("torch", "2.11.0"),), 1.8e9),
    m.Refused("plan", "other rows", "use these"),
    m.Get((m.RowRequest(1, KEY), m.RowRequest(2, RowKey("held_out", 0)))),
    m.Row(1, KEY, 0, 0, 4096, (1 << 64) - 1),
    m.Placed(1, KEY, 3, 0),
    m.RowError(1, KEY, "out of memory", True),
    m.Release(1, 0),
    m.GetWeights("embedding", 4 << 20),
    m.Weights("head", 0, 1 << 30, 5),
    m.Ping(1, 2),
    m.Pong(1, 2, 3, KEY, 0.25),
    m.Pong(1, 2, 3, None, 0.0),
    m.Pong(1, 2, 3, None, 0.0, 12.5),
    m.Bye("stopped", "told to"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_equal(message: m.Message) -> None:
    assert m.decode(m.encode(message)) == message
    assert len(m.encode(message)) <= m.HEADER_BYTES


def test_every_message_has_an_example() -> None:
    assert {type(message) for message in EXAMPLES} == set(m.Message.__args__)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"type": "ROWS"}, "unknown message type 'ROWS'"),
        ({"type": None}, "unknown message type None"),
        ({"speed": 1}, "ROW has an unknown key 'speed'"),
        ({"slot": ...}, "ROW lacks the key 'slot'"),
        ({"slot": "0"}, "ROW.slot must be of type int, not str"),
        ({"slot": True}, "ROW.slot must be of type int, not bool"),
        ({"slot": 1.0}, "ROW.slot must be of type int, not float"),
        ({"slot": -1}, "ROW.slot must be from 0 to"),
        ({"slot": 1 << 63}, "ROW.slot must be from 0 to"),
        ({"key": ["test", 1]}, "ROW.key.split must be one of train, held_out, not 'test'"),
        ({"key": ["train", -1]}, "ordinal from 0 to"),
        ({"key": ["train"]}, "ROW.key must be of type array of 2"),
        ({"key": {"split": "train"}}, "ROW.key must be of type array of 2"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], says: str) -> None:
    tree = {**msgpack.unpackb(m.encode(m.Row(1, KEY, 0, 0, 4096, 9))), **change}
    with pytest.raises(ProtocolError) as caught:
        m.decode(msgpack.packb({key: value for key, value in tree.items() if value is not ...}))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("plan", "target", "layer_ids"), [1, 9], "names layer 9 of a target of 4 layers"),
        (("plan", "target", "layer_ids"), [], "layer_ids (how many)"),
        (("plan", "target", "dtype"), "int8", "target.dtype must be one of"),
        (("plan", "target", "wire_dtype"), "int4", "target.wire_dtype must be one of auto, fp8, not 'int4'"),
        (("plan", "target", "name"), "a\x1b[2J", "target.name must be printable, not 'a\\x1b[2J'"),
        (("plan", "target", "hidden_size"), 0, "target.hidden_size must be from 1"),
        (("plan", "target", "rope_theta"), float("inf"), "WELCOME.plan.target.rope_theta must be finite"),
        (("plan", "data", "row_tokens"), 1 << 40, "data.row_tokens must be from 1"),
        (("plan", "data"), None, "WELCOME.plan.data must be of type map"),
        (("row_bytes",), 0, "WELCOME.row_bytes must be from 1"),
    ],
)
def test_a_plan_is_checked_before_anything_is_allocated(path: tuple[str, ...], value: object, says: str) -> None:
    tree = msgpack.unpackb(m.encode(m.Welcome(m.VERSION, "x", synthetic_plan(), "inband", 4096, 3)))
    place = tree
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(ProtocolError) as caught:
        m.decode(msgpack.packb(tree))
    assert says in str(caught.value)


def test_fields_that_came_later_may_be_missing_and_are_not_sent_at_their_defaults() -> None:
    """An older peer's messages are read, and it is sent none that it could not read."""
    for message in (
        EXAMPLES[0],
        m.Welcome(m.VERSION, "x", synthetic_plan(), "inband", 4096, 3),
        m.Pong(1, 2, 3, KEY, 0.25),
    ):
        tree = msgpack.unpackb(m.encode(message))
        assert not {"software", "clock", "computing_seconds"} & set(tree)
        assert m.decode(msgpack.packb(tree)) == message
    with pytest.raises(ProtocolError, match="PONG lacks the key 'busy_seconds'"):
        m.decode(msgpack.packb({k: v for k, v in tree.items() if k != "busy_seconds"}))


@pytest.mark.parametrize(
    "message",
    [
        m.Refused("plan", "a\x1b[2Jb\nc", "ä\x1b[2Jb\n"),
        m.RowError(1, KEY, "a\x1b[2Jb\nc", True),
        m.Bye("failed", "a\x1b[2Jb\nc"),
        m.Welcome(m.VERSION, "x", synthetic_plan(), "inband", 4096, 3, (Package("torch\r", "2\x1b[2J.13"),), 1.0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_text_for_people_is_read_without_what_a_terminal_would_obey(message: m.Message) -> None:
    read = repr(m.decode(m.encode(message)))
    assert read == repr(message).replace("\\", "\\\\")


def test_another_version_is_named_before_its_unknown_keys() -> None:
    tree = {**msgpack.unpackb(m.encode(EXAMPLES[0])), "version": 2, "new": 1}
    with pytest.raises(m.VersionError, match="speaks protocol version 2, this side version 1"):
        m.decode(msgpack.packb(tree))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x93",
        b"\x01\x02",
        b"\xdd\xff\xff\xff\xff",
        b"\x81\xc4\x01a\x01",
        b"\x91" * 4000,
        bytes(70000),
    ],
)
def test_bytes_that_are_no_message_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        m.decode(frame)


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_protocol_errors(frame: bytes) -> None:
    _decode_or_refuse(frame)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300)
@given(st.data())
def test_mutated_messages_raise_only_protocol_errors(data: st.DataObject) -> None:
    tree = msgpack.unpackb(m.encode(data.draw(st.sampled_from(EXAMPLES))))
    place: Any = tree
    while isinstance(place, dict | list) and place:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or data.draw(st.booleans()):
            place[key] = data.draw(VALUES)
            break
        place = place[key]
    frame = bytearray(msgpack.packb(tree))
    if data.draw(st.booleans()):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    _decode_or_refuse(bytes(frame))


def _decode_or_refuse(frame: bytes) -> None:
    try:
        message = m.decode(frame)
    except ProtocolError:
        return
    assert m.decode(m.encode(message)) == message  # what passes is a message
    assert dataclasses.is_dataclass(message)
