"""Where the rows of a comparison come from: made from their key, taken from feeders, or computed by a target in this process.

All three give the same interface, one `RowSource` per drafter. Synthetic rows are learnable: two documents that count upwards from a random
token, with the tokens' own embeddings as features, so a row costs one gather and nothing needs to be stored.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dflash_mp.data.row import RowKey
from dflash_mp.drafter.rows import RowSource, TakenRow
from dflash_mp.errors import ConfigError
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.feeder import Compute
from dflash_mp.stream.layout import FLOAT_TYPES, RowLayout, RowTensors
from dflash_mp.stream.plan import StreamPlan
from dflash_mp.threads.work import Work

_WEIGHTS_SEED = 7


@dataclass
class Rows:
    """The rows of the drafters `sources` was opened for, and the target's frozen side."""

    plan: StreamPlan
    embedding: torch.Tensor
    head: torch.Tensor
    sources: dict[int, RowSource]


@contextlib.contextmanager
def open_rows(work: Work, numbers: list[int]) -> Iterator[Rows]:
    """Rows for the drafters `numbers`. Raises `DflashError` when a feeder, a dataset or a target cannot be used."""
    if work.rows == "synthetic":
        if work.plan is None:
            raise ConfigError("synthetic rows need a plan", "use --rows stream, or compare at a scale")
        maker = SyntheticRows(work.plan)
        yield _made_here(work.plan, maker.embedding, maker.embedding, maker.make, numbers)
    elif work.rows == "stream":
        with contextlib.ExitStack() as stack:
            yield _from_feeders(work, numbers, stack)
    else:
        yield _from_target(work, numbers)


class SyntheticRows:
    """Makes the rows of a plan that has no target."""

    def __init__(self, plan: StreamPlan) -> None:
        random = torch.Generator().manual_seed(_WEIGHTS_SEED)
        self._plan, self._layout = plan, RowLayout.of(plan)
        size = (plan.target.vocab_size, plan.target.hidden_size)
        self.embedding = (torch.randn(size, generator=random) * 0.5).to(FLOAT_TYPES[plan.target.dtype])

    def make(self, key: RowKey, buffer: torch.Tensor) -> None:
        """Fill `buffer` with the row of `key`."""
        random = torch.Generator().manual_seed(key.ordinal * 2 + (key.split == "held_out"))
        row, tokens, words = self._layout.views(buffer), self._plan.data.row_tokens, self._plan.target.vocab_size - 2
        half, place = tokens // 2, torch.arange(tokens, dtype=torch.int32)
        first = torch.randint(0, words, (2,), generator=random, dtype=torch.int32)
        second = (place >= half).int()
        row.position_ids.copy_(place - half * second)
        row.document_ids.copy_(1 + second)
        row.input_ids.copy_((first[second.long()] + row.position_ids) % words)
        row.loss_mask.fill_(1)
        taps = row.features.view(tokens, -1, self._plan.target.hidden_size)
        for tap in range(taps.shape[1]):
            ids = (row.input_ids.long() - tap).remainder(words)
            taps[:, tap].copy_(self.embedding[ids])


class _MadeRow:
    def __init__(self, buffer: torch.Tensor, layout: RowLayout) -> None:
        self.buffer, self._layout = buffer, layout

    @property
    def tensors(self) -> RowTensors:
        return self._layout.views(self.buffer)

    def release(self) -> None:
        """Nothing is lent."""


class _MadeHere:
    """A `RowSource` that computes each row when it is taken."""

    def __init__(self, make: Compute, layout: RowLayout) -> None:
        self._make, self._layout = make, layout
        self._buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)

    def schedule(self, keys: Iterator[RowKey]) -> None:
        """Rows are made on demand."""

    def take(self, key: RowKey) -> TakenRow:
        """The row, until the next is taken."""
        self._make(key, self._buffer)
        return _MadeRow(self._buffer, self._layout)


def _made_here(
    plan: StreamPlan, embedding: torch.Tensor, head: torch.Tensor, make: Compute, numbers: list[int]
) -> Rows:
    layout = RowLayout.of(plan)
    return Rows(plan, embedding, head, {number: _MadeHere(make, layout) for number in numbers})


def _from_feeders(work: Work, numbers: list[int], stack: contextlib.ExitStack) -> Rows:
    clients = {}
    for number in numbers:
        client = RowClient.of(work.config, number, work.drafters)
        clients[number] = stack.enter_context(client)
    plans = [client.connect() for client in clients.values()]
    weights = clients[numbers[0]].fetch_weights()
    return Rows(plans[0], weights.embedding, weights.head, dict(clients))


def _from_target(work: Work, numbers: list[int]) -> Rows:
    """One target of this process, as in the original pipeline; the drafters' feeder threads take turns on it."""
    from dflash_mp.target.capture import Capture
    from dflash_mp.target.feed import make_plan, open_dataset, row_maker
    from dflash_mp.target.load import load_target

    dataset = open_dataset(work.config)
    target = load_target(work.config.target)
    if target.attention == "auto":
        target.attention = (
            "sdpa"  # transformers' own: packed attention compiles on CUDA, beside the drafters' threads that do
        )
    plan = make_plan(work.config, dataset, target)
    capture, turn = Capture(target, last_hidden=plan.target.last_hidden), threading.Lock()
    capture.self_check(dataset.row("train", 0))
    make = row_maker(dataset, capture, plan)

    def one_at_a_time(key: RowKey, buffer: torch.Tensor) -> None:
        with turn:
            if (arrival := make(key, buffer)) is not None:
                arrival.synchronize()

    return _made_here(plan, target.embedding, target.head, one_at_a_time, numbers)
