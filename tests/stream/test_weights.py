"""Embedding and head are put together from chunks and never used unless their checksums hold."""

from __future__ import annotations

import pytest
import torch

from dflash_mp.bench.synthetic import synthetic_plan, synthetic_weights
from dflash_mp.errors import StreamError
from dflash_mp.stream.codec import ProtocolError
from dflash_mp.stream.messages import CHUNK_BYTES, GetWeights, Weights
from dflash_mp.stream.weights import FrozenWeights, WeightsBuilder, WeightsServer

PLAN = synthetic_plan(hidden_size=1024, vocab_size=4500)  # 9.2 MB: three chunks each
CHUNKS = 6


def deliver(server: WeightsServer, builder: WeightsBuilder, request: GetWeights, *, flip: bool = False) -> None:
    message, payload = server.chunk(request)
    place = builder.place(message)
    place[:] = payload
    if flip:
        place[7] ^= 1
    builder.digest.update(place)
    if builder.placed(place):
        builder.judge(message, builder.digest.intdigest())


def fetch(server: WeightsServer, builder: WeightsBuilder, flips: set[int] = frozenset()) -> int:
    """Deliver all that is asked for; `flips` are the deliveries that are damaged. Returns how many there were."""
    count = 0
    while requests := builder.requests(2):
        for request in requests:
            deliver(server, builder, request, flip=count in flips)
            count += 1
    return count


@pytest.fixture
def server() -> WeightsServer:
    return WeightsServer(synthetic_weights(PLAN), PLAN)


def check(builder: WeightsBuilder) -> None:
    assert builder.done
    got, right = builder.result(), synthetic_weights(PLAN)
    assert torch.equal(got.embedding, right.embedding)
    assert torch.equal(got.head, right.head)


def test_a_damaged_tensor_is_fetched_again(server: WeightsServer) -> None:
    builder = WeightsBuilder(PLAN)
    assert fetch(server, builder, flips={1}) == CHUNKS + 3
    check(builder)
    assert builder.checksum_errors == 1


def test_a_tensor_damaged_twice_is_an_error(server: WeightsServer) -> None:
    with pytest.raises(StreamError, match="the target's embedding arrived corrupted twice"):
        fetch(server, WeightsBuilder(PLAN), flips={1, 4})


def test_another_feeder_goes_on_where_one_was_lost(server: WeightsServer) -> None:
    builder = WeightsBuilder(PLAN)
    first, lost = builder.requests(2)
    deliver(server, builder, first)
    builder.forget_requests()
    assert builder.requests(1) == [lost]
    deliver(WeightsServer(synthetic_weights(PLAN), PLAN), builder, lost)
    fetch(server, builder)
    check(builder)


def test_a_chunk_that_is_not_due_is_refused_before_it_is_placed() -> None:
    builder = WeightsBuilder(PLAN)
    with pytest.raises(ProtocolError, match="was not asked for"):
        builder.place(Weights("embedding", 0, 4500 * 2048, 0))
    builder.requests(2)
    for wrong in (Weights("head", 0, 4500 * 2048, 0), Weights("embedding", CHUNK_BYTES, 4500 * 2048, 0)):
        with pytest.raises(ProtocolError, match="was not asked for"):
            builder.place(wrong)
    with pytest.raises(ProtocolError, match="says 9 bytes of embedding"):
        builder.place(Weights("embedding", 0, 9, 0))


def test_nothing_is_due_while_a_whole_tensor_waits_for_its_sum(server: WeightsServer) -> None:
    builder = WeightsBuilder(PLAN)
    for request in builder.requests(4):
        message, payload = server.chunk(request)
        builder.place(message)[:] = payload
        builder.digest.update(payload)
        whole = builder.placed(payload)
    assert whole
    nbytes = builder.bytes_received
    for lost in (False, True):
        if lost:
            builder.forget_requests()
        assert not builder.requests(4)
        with pytest.raises(ProtocolError, match="was not asked for"):
            builder.place(Weights("embedding", nbytes, nbytes, 0))
    builder.judge(message, builder.digest.intdigest())
    assert builder.requests(1) == [GetWeights("head", 0)]


def test_weights_that_are_not_the_plans_are_not_served() -> None:
    weights = synthetic_weights(PLAN)
    for wrong in (weights.head[1:], weights.head.float()):
        with pytest.raises(StreamError, match="the target's head is torch"):
            WeightsServer(FrozenWeights(weights.embedding, wrong), PLAN)
