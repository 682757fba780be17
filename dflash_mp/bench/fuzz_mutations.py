"""Messages that are nearly right: what `dflash-mp bench fuzz` makes of the real ones.

A `Mutator` takes the frames of a real message apart and changes one or a few things: a value, a key, a type's name, the depth, the bytes
of the frame, its payload, the number of frames. Which, a seeded generator decides. About one message in twenty is made of nothing.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack

from dflash_mp.stream.messages import Message

Frames = list[bytes]
_NUMBERS = (
    -1,
    0,
    1,
    2,
    3,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 32,
    (1 << 62) + 1,
    (1 << 63) - 1,
    (1 << 64) - 1,
    -(1 << 63),
)
_ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    "",
    "x" * 300,
    "rank 0",
    "\0",
    b"",
    b"x",
    0.5,
    float("nan"),
    float("inf"),
    [],
    {},
)
_NAMES: tuple[str, ...] = (
    "HELLO",
    "WELCOME",
    "REFUSED",
    "GET",
    "ROW",
    "PLACED",
    "ROW_ERROR",
    "RELEASE",
    "GET_WEIGHTS",
    "WEIGHTS",
)
_NAMES += ("PING", "PONG", "BYE", "EVAL", "")
# Headers of arrays, maps, strings, binaries and extensions that promise more than follows.
_PROMISES: tuple[bytes, ...] = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\x7f\xff\xff\xff",
)
_PROMISES += (b"\xc9\x7f\xff\xff\xff\x01", b"\xdc\xff\xff", b"\xde\xff\xff", b"\x91" * 2000, b"\x81\xa1x" * 2000)


@dataclass
class Tally:
    """What was sent, by the type of the right message and by the change to it, and what became of it."""

    types: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def sent(self, message: Message, change: str) -> None:
        self.types[type(message).__name__] += 1
        self.changes[change] += 1

    def refused(self, code: str, reason: str) -> None:
        """Counts like reasons as one: what differs from case to case is left out."""
        text = re.sub(r"'[^']*'|\([^)]*\)|\[[^\]]*\]|-?\d[\w.+-]*|\b(nan|inf)\b", "…", f"{code}: {reason}")
        text = re.sub(
            r"(, not |unknown key|unknown message type|lacks the key|msgpack:|rank …|of type) .*", r"\1 …", text
        )
        self.reasons[re.sub(r"\b[A-Z_]{3,}(\.[a-z_.…]+)?", "…", text)[:64].strip()] += 1

    def add(self, other: Tally) -> None:
        self.types += other.types
        self.changes += other.changes
        self.reasons += other.reasons


class Mutator:
    """Makes wrong messages out of right ones; `corpus` are the frames of real messages of both sides."""

    def __init__(self, draw: random.Random, corpus: list[Frames]) -> None:
        self._draw, self._corpus = draw, corpus
        self._changes: dict[str, Callable[[Frames], Frames]] = {
            "value": self._value,
            "key": self._key,
            "type name": self._type_name,
            "depth": self._depth,
            "list": self._list,
            "bytes": self._bytes,
            "promise": self._promise,
            "payload": self._payload,
            "frames": self._frames,
            "another message": lambda frames: list(draw.choice(corpus)),
            "noise": self._noise,
        }

    def mutate(self, frames: Frames) -> tuple[str, Frames]:
        """Which change was made first, and the frames then: one to three changes."""
        kind = self._draw.choice(list(self._changes))
        frames = self._changes[kind](frames)
        for _ in range(self._draw.choice((0, 0, 0, 1, 2))):
            frames = self._changes[self._draw.choice(list(self._changes))](frames)
        return kind, frames

    # -- what a header says -------------------------------------------------------------------------------------------------------

    def _value(self, frames: Frames) -> Frames:
        return self._with_tree(frames, lambda tree: _replace(tree, self._leaf(tree), self._other))

    def _key(self, frames: Frames) -> Frames:
        def change(tree: dict[Any, Any]) -> None:
            key = self._draw.choice(list(tree))
            how = self._draw.randrange(3)
            value = tree.pop(key) if how else tree[key]
            if how != 1:
                tree[self._draw.choice(("", "x", "Type", "request", "plan", f"{key} ", 7))] = value

        return self._with_tree(frames, change)

    def _type_name(self, frames: Frames) -> Frames:
        return self._with_tree(frames, lambda tree: tree.update(type=self._draw.choice(_NAMES)))

    def _depth(self, frames: Frames) -> Frames:
        def change(tree: dict[Any, Any]) -> None:
            value: Any = self._draw.choice(_ODD)
            for _ in range(self._draw.choice((1, 3, 100, 400, 600))):
                value = [value] if self._draw.random() < 0.5 else {"x": value}
            tree[self._draw.choice(list(tree))] = value

        return self._with_tree(frames, change)

    def _list(self, frames: Frames) -> Frames:
        def change(tree: dict[Any, Any]) -> None:
            lists = [key for key, value in tree.items() if isinstance(value, list)]
            key = self._draw.choice(lists or list(tree))
            items = tree[key] if lists else [tree[key]]
            tree[key] = (items * self._draw.choice((0, 2, 5, 1000)))[:5000]

        return self._with_tree(frames, change)

    def _leaf(self, tree: dict[Any, Any]) -> list[Any]:
        """A path to a value that holds no others."""
        path: list[Any] = []
        here: Any = tree
        while isinstance(here, dict | list) and here:
            path.append(self._draw.choice(list(here) if isinstance(here, dict) else range(len(here))))
            here = here[path[-1]]
        return path

    def _other(self, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and self._draw.random() < 0.4:
            return self._draw.choice((value + 1, value - 1, value * 2, value ^ 1 << self._draw.randrange(40)))
        if isinstance(value, str) and self._draw.random() < 0.3:
            return self._draw.choice((value[1:], value + "x", value * 3, value.upper()))
        return self._draw.choice(_NUMBERS) if self._draw.random() < 0.5 else self._draw.choice(_ODD)

    def _with_tree(self, frames: Frames, change: Callable[[dict[Any, Any]], None]) -> Frames:
        try:
            tree = msgpack.unpackb(frames[0], strict_map_key=False)
            if not isinstance(tree, dict) or not tree:
                return self._bytes(frames)
            change(tree)
            return [msgpack.packb(tree), *frames[1:]]
        except (
            ValueError,
            OverflowError,
            IndexError,
            TypeError,
            msgpack.UnpackException,
        ):  # changed before into no message
            return self._bytes(frames)

    # -- bytes and frames ---------------------------------------------------------------------------------------------------------

    def _bytes(self, frames: Frames) -> Frames:
        head = bytearray(frames[0] if frames else b"")
        for _ in range(self._draw.choice((1, 1, 2, 8))):
            at = self._draw.randrange(len(head) + 1)
            how = self._draw.randrange(4)
            if how == 0:
                del head[at:]
            elif how == 1:
                head[at:at] = self._draw.randbytes(self._draw.choice((1, 4, 64)))
            elif how == 2:
                del head[at : at + self._draw.randrange(1, 9)]
            elif at < len(head):
                head[at] ^= 1 << self._draw.randrange(8)
        return [bytes(head), *frames[1:]]

    def _promise(self, frames: Frames) -> Frames:
        head = frames[0] if frames else b""
        at = self._draw.randrange(len(head) + 1)
        promise = self._draw.choice(_PROMISES)
        return [head[:at] + promise + head[at + len(promise) * self._draw.randrange(2) :], *frames[1:]]

    def _payload(self, frames: Frames) -> Frames:
        payload = frames[1] if len(frames) > 1 else b""
        choices = (
            b"",
            payload[:-1],
            payload + b"x",
            payload[1:] + payload[:1],
            payload[: len(payload) // 2],
            bytes(70_000),
        )
        return [*frames[:1], self._draw.choice(choices)]

    def _frames(self, frames: Frames) -> Frames:
        choices = (frames[:1], frames[::-1], frames * 2, [b"", *frames], [*frames, b""], frames * 40, [b""])
        return list(self._draw.choice(choices)) or [b""]

    def _noise(self, frames: Frames) -> Frames:
        return [self._draw.randbytes(self._draw.choice((1, 20, 200, 3000)))]


def _replace(tree: Any, path: list[Any], other: Callable[[Any], Any]) -> None:
    if not path:
        return
    for step in path[:-1]:
        tree = tree[step]
    tree[path[-1]] = other(tree[path[-1]])
