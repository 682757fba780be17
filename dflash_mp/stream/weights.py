"""The target's frozen embedding and head: how a feeder serves them and a drafter puts them together.

Sent in chunks that the drafter asks for, so a slow reader costs the feeder nothing, and any feeder of the same plan can go on where another
stopped. A checksum over each whole tensor is verified before it is used. A tied head is the embedding and is sent once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import xxhash

from dflash_mp.errors import StreamError
from dflash_mp.stream.codec import ProtocolError
from dflash_mp.stream.layout import FLOAT_TYPES
from dflash_mp.stream.messages import CHUNK_BYTES, GetWeights, Weights
from dflash_mp.stream.plan import StreamPlan

TensorName = Literal["embedding", "head"]


@dataclass(frozen=True)
class FrozenWeights:
    """`embedding` and `head`, each [V, H]. One tensor if the head is tied. In a stream they are on the CPU, in the target's dtype."""

    embedding: torch.Tensor
    head: torch.Tensor


class WeightsServer:
    """A feeder's side: chunks of the two tensors, without a copy. Read-only after construction."""

    def __init__(self, weights: FrozenWeights, plan: StreamPlan) -> None:
        tensors: dict[TensorName, torch.Tensor] = {"embedding": weights.embedding}
        if not plan.target.tied_head:
            tensors["head"] = weights.head
        self._parts: dict[TensorName, tuple[memoryview, int]] = {}
        for name, tensor in tensors.items():
            wanted = (plan.target.vocab_size, plan.target.hidden_size)
            if tuple(tensor.shape) != wanted or tensor.dtype != FLOAT_TYPES[plan.target.dtype]:
                raise StreamError(
                    f"the target's {name} is {tensor.dtype} {tuple(tensor.shape)}, its plan says {plan.target.dtype} {wanted}"
                )
            view = _bytes_of(tensor.detach().cpu().contiguous())
            self._parts[name] = view, xxhash.xxh3_64_intdigest(view)

    def check(self, request: GetWeights) -> None:
        """Raises `ProtocolError` if `request` asks for what there is not."""
        if request.tensor not in self._parts:
            raise ProtocolError(f"the {request.tensor} is not sent: it is tied to the embedding")
        nbytes = len(self._parts[request.tensor][0])
        if request.offset >= nbytes:
            raise ProtocolError(f"GET_WEIGHTS asks for byte {request.offset} of {nbytes}")

    def chunk(self, request: GetWeights) -> tuple[Weights, memoryview]:
        """The answer to a `request` that was checked."""
        view, checksum = self._parts[request.tensor]
        payload = view[request.offset : request.offset + CHUNK_BYTES]
        return Weights(request.tensor, request.offset, len(view), checksum), payload


class WeightsBuilder:
    """A drafter's side: memory for the tensors, what to ask for next, and the final check."""

    def __init__(self, plan: StreamPlan) -> None:
        shape, dtype = (plan.target.vocab_size, plan.target.hidden_size), FLOAT_TYPES[plan.target.dtype]
        names: list[TensorName] = ["embedding"] if plan.target.tied_head else ["embedding", "head"]
        try:
            self._tensors = {name: torch.empty(shape, dtype=dtype) for name in names}
        except RuntimeError as error:
            raise StreamError(f"no memory for the target's frozen weights: {str(error).splitlines()[0]}") from None
        self._views = {name: _bytes_of(tensor) for name, tensor in self._tensors.items()}
        self._names = names
        self.checksum_errors = 0
        self._received = self._asked = 0  # bytes of the tensor that is under way
        self._start(0)

    @property
    def done(self) -> bool:
        return self._current == len(self._names)

    @property
    def bytes_received(self) -> int:
        return sum(len(self._views[name]) for name in self._names[: self._current]) + self._received

    def requests(self, pipelined: int) -> list[GetWeights]:
        """What to ask for so that `pipelined` chunks are on their way."""
        asked: list[GetWeights] = []
        if self.done:
            return asked
        name = self._names[self._current]
        limit = min(len(self._views[name]), self._received + pipelined * CHUNK_BYTES)
        while self._asked < limit:
            asked.append(GetWeights(name, self._asked))
            self._asked += CHUNK_BYTES
        return asked

    def forget_requests(self) -> None:
        """The feeder that was asked is gone: ask again from what has been received."""
        self._asked = self._received

    def place(self, message: Weights) -> memoryview:
        """Where the payload of `message` belongs. Raises `ProtocolError` if it isn't what comes next."""
        name = None if self.done else self._names[self._current]
        if message.tensor != name or message.offset != self._received or message.offset >= self._asked or self._whole:
            raise ProtocolError(
                f"WEIGHTS brought byte {message.offset} of the {message.tensor}, which was not asked for"
            )
        view = self._views[name]
        if message.nbytes != len(view):
            raise ProtocolError(f"WEIGHTS says {message.nbytes} bytes of {name}, the plan says {len(view)}")
        return view[message.offset : message.offset + CHUNK_BYTES]

    def placed(self, place: memoryview) -> bool:
        """The payload is in its `place`, and `digest` will take it in. Whether it was the tensor's last: then `judge` is to follow."""
        self._received += len(place)
        return self._whole

    def judge(self, message: Weights, checksum: int) -> None:
        """The `checksum` of a whole tensor, whose last `message` says what it should be. On a mismatch start it again, once."""
        if checksum == message.checksum:
            self._start(self._current + 1)
            return
        self.checksum_errors += 1
        if self.checksum_errors > 1:
            raise StreamError(
                f"the target's {message.tensor} arrived corrupted twice",
                "check the network and the feeder's memory; then start again",
            )
        self._start(self._current)

    def result(self) -> FrozenWeights:
        embedding = self._tensors["embedding"]
        return FrozenWeights(embedding, self._tensors.get("head", embedding))

    @property
    def _whole(self) -> bool:
        """Whether all of the tensor that is under way has come: it waits for its sum."""
        return not self.done and self._received == len(self._views[self._names[self._current]])

    def _start(self, index: int) -> None:
        self._current = index
        self._received = self._asked = 0
        self.digest = xxhash.xxh3_64()  # takes in the tensor's bytes, in order; whoever calls `placed` sees to that


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).reshape(-1).numpy().data
