"""The short version of `dflash-mp bench fuzz`, and that it would notice."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest

from dflash_mp.bench import fuzz as fuzzing
from dflash_mp.bench.fuzz_drafter import DrafterFuzz
from dflash_mp.bench.fuzz_feeder import FeederFuzz
from dflash_mp.bench.fuzz_mutations import Frames, Mutator, Tally
from dflash_mp.bench.synthetic import synthetic_plan
from dflash_mp.data.row import RowKey
from dflash_mp.errors import DflashError
from dflash_mp.stream import messages as m
from dflash_mp.stream.client_link import Link
from dflash_mp.stream.codec import ProtocolError
from dflash_mp.stream.feeder_io import FeederIo
from dflash_mp.stream.feeder_peer import Peer
from dflash_mp.stream.feeder_peers import Peers
from dflash_mp.stream.inband_rows import InbandRows
from dflash_mp.stream.window import Request, Window

PLAN = synthetic_plan(row_tokens=16, hidden_size=16)
CORPUS: list[Frames] = [
    [m.encode(m.Ping(1, 2))],
    [m.encode(m.Get((m.RowRequest(1, RowKey("train", 3)),)))],
    [m.encode(m.Row(1, RowKey("train", 3), 0, 0, 704, 7)), bytes(704)],
]


def test_nearly_right_messages_disturb_nobody() -> None:
    report = fuzzing.fuzz(3000, seed=5)
    assert report.messages >= 3000
    assert report.by_sockets >= 300
    assert report.rows > 200
    for tally in (report.feeder, report.drafter):
        assert len(tally.changes) == 13
        assert tally.reasons.total() > 200
        assert len(tally.reasons) > 10


def test_a_corpus_is_a_conversation_with_every_kind_of_message(tmp_path: Path) -> None:
    kinds = {type(m.decode(frames[0])).__name__ for frames in fuzzing.record(tmp_path, PLAN)}
    assert kinds == {
        *("Hello", "Welcome", "Get", "Row", "Release", "RowError", "GetWeights", "Weights", "Ping", "Pong", "Bye"),
        "Refused",
    }


def test_the_same_seed_makes_the_same_messages() -> None:
    def some(seed: int) -> list[tuple[str, Frames]]:
        mutator = Mutator(random.Random(seed), CORPUS)
        return [mutator.mutate(frames) for frames in CORPUS * 50]

    assert some(1) == some(1)
    assert some(1) != some(2)


def test_a_seed_repeats_everything_on_a_machine_that_stalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def course(name: str) -> list[object]:
        feeder, drafter = FeederFuzz(f"ipc://{tmp_path}/{name}", PLAN, 3, CORPUS), DrafterFuzz(PLAN, 3, CORPUS)
        steps(feeder, 1500)
        steps(drafter, 1500)
        return [feeder.tally, feeder.rows, drafter.tally, drafter.rows, drafter.drafters]

    before, monotonic, looks = course("quick"), time.monotonic, itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + next(looks) // 50)
    assert course("stalls") == before
    assert next(looks) > 0


def test_like_reasons_are_counted_as_one() -> None:
    tally = Tally()
    for number in (7, -1, 1 << 63):
        tally.refused("malformed", f"PING.rows must be from 0 to 4611686018427387904, not {number}")
        tally.refused("malformed", f"GET uses the request number {number} twice")
    assert list(tally.reasons.values()) == [3, 3]


def steps(fuzz: FeederFuzz | DrafterFuzz, count: int = 3000) -> None:
    try:
        for _ in range(count):
            fuzz.step()
    finally:
        fuzz.close()


def test_a_feeder_that_crashes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: Peers, peer: Peer, message: m.Release) -> None:
        raise KeyError(message.request)

    monkeypatch.setattr(Peers, "release", crash)
    fuzz = FeederFuzz(f"ipc://{tmp_path}/f", PLAN, 1, CORPUS)
    with pytest.raises(KeyError):
        steps(fuzz)


def test_a_feeder_that_lets_one_peer_suffer_for_another_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reject = FeederIo._reject

    def reject_all(self: FeederIo, identity: bytes, error: ProtocolError) -> None:
        for peer in self._peers.all():
            reject(self, peer.identity, error)

    monkeypatch.setattr(FeederIo, "_reject", reject_all)
    fuzz = FeederFuzz(f"ipc://{tmp_path}/f", PLAN, 1, CORPUS)
    with pytest.raises(DflashError, match="an honest drafter was refused"):
        steps(fuzz)


def test_a_drafter_that_does_not_compare_checksums_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def trust(self: InbandRows, link: Link, request: Request, window: Window, right: int, found: int) -> None:
        window.ready(request)

    monkeypatch.setattr(InbandRows, "_judge", trust)
    fuzz = DrafterFuzz(PLAN, 1, CORPUS)
    with pytest.raises(DflashError, match="a drafter got wrong bits for train row"):
        steps(fuzz)
