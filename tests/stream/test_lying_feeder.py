"""A feeder that breaks the protocol is not used, and its rows come from an honest one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
import zmq
from feeder_process import FeederProcess, feeders, until
from stream_client import PATIENT, client_of, keys, take_all
from test_stream import ipc

from dflash_mp.bench.synthetic import synthetic_plan
from dflash_mp.errors import StreamError
from dflash_mp.stream import dealing
from dflash_mp.stream import messages as m
from dflash_mp.stream.layout import RowLayout

PLAN = synthetic_plan()
ROW = RowLayout.of(PLAN).nbytes
Answer = Callable[[m.RowRequest], list[bytes]]


class Liar:
    """Welcomes everybody with `welcome`; answers each row asked for with the frames that `answer` makes."""

    def __init__(self, endpoint: str, answer: Answer, welcome: m.Message) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(endpoint)
        self._answer, self._welcome, self._done = answer, welcome, threading.Event()
        self.asked = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._done.is_set():
            if not self._router.poll(20):
                continue
            identity, frame = self._router.recv_multipart()
            message = m.decode(frame)
            if isinstance(message, m.Hello):
                self._router.send_multipart([identity, m.encode(self._welcome)])
            elif isinstance(message, m.Get):
                for request in message.requests:
                    self.asked += 1
                    self._router.send_multipart([identity, *self._answer(request)])
        self._context.destroy(linger=0)

    def close(self) -> None:
        self._done.set()
        self._thread.join()


def row(asked: m.RowRequest, /, **lies: object) -> bytes:
    truth = m.Row(asked.request, asked.key, 0, 0, ROW, xxhash.xxh3_64_intdigest(bytes(ROW)))
    return m.encode(replace(truth, **lies))  # type: ignore[arg-type]


WELCOME = m.Welcome(m.VERSION, "liar", PLAN, "inband", ROW, 3)
LIES: dict[str, tuple[Answer, str]] = {
    "payload too short": (lambda r: [row(r), bytes(ROW - 1)], f"a payload of {ROW - 1} bytes where {ROW} are due"),
    "payload too long": (lambda r: [row(r), bytes(ROW + 1)], f"a payload of {ROW + 1} bytes where {ROW} are due"),
    "no payload": (lambda r: [row(r)], "wrong number of frames"),
    "one frame too many": (lambda r: [row(r), bytes(ROW), b"x"], "bytes where"),
    "payload after a pong": (lambda r: [m.encode(m.Pong(1, 0, 0, None, 0.0)), b"x"], "wrong number of frames"),
    "another row": (lambda r: [row(r, key=r.key._replace(ordinal=99)), bytes(ROW)], "of train row 99"),
    "another size": (lambda r: [row(r, nbytes=1 << 50), bytes(ROW)], f"of {1 << 50} of"),
    "a chunk out of order": (lambda r: [row(r, offset=64), bytes(ROW)], "ROW brings byte 64"),
    "a row not asked for": (lambda r: [row(r, request=10**9), bytes(ROW)], "which was not made"),
    "an error not asked for": (lambda r: [m.encode(m.RowError(10**9, r.key, "", True))], "which was not made"),
    "weights not asked for": (lambda r: [m.encode(m.Weights("head", 0, 1, 1)), b"x"], "which were not asked for"),
    "a second welcome": (lambda r: [m.encode(WELCOME)], "though not greeted"),
    "a drafter's message": (lambda r: [m.encode(m.Ping(1, 1))], "Ping is not for a drafter"),
    "no message": (lambda r: [b"\xc1"], "not msgpack"),
}


@pytest.fixture
def honest(tmp_path: Path) -> Iterator[FeederProcess]:
    with feeders(FeederProcess(ipc(tmp_path, "honest"), PLAN)) as (feeder,):
        yield feeder


@pytest.mark.parametrize("lie", LIES)
def test_rows_come_from_the_honest_one(
    lie: str, honest: FeederProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer, says = LIES[lie]
    liar = Liar(ipc(tmp_path, "liar"), answer, WELCOME)
    try:
        with client_of([ipc(tmp_path, "liar"), honest.endpoint], PLAN) as client:
            client.connect()
            until(lambda: len(client._io.live()) == 2)
            client.schedule(iter(keys(0, 12)))
            assert len(list(take_all(client, keys(0, 12)))) == 12
            assert client.stats.rows_by_feeder == {ipc(tmp_path, "liar"): 0, honest.endpoint: 12}
            # It may lie when all rows have come already, and is tried again some seconds after it was refused.
            until(lambda: f"{ipc(tmp_path, 'liar')} broke the protocol: " in caplog.text)
            assert says in caplog.text
    finally:
        liar.close()
    assert liar.asked


def test_rows_of_zeros_with_a_wrong_checksum_are_never_handed_out(
    honest: FeederProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealing, "_SLACK_SECONDS", PATIENT)  # none is late, so asked of the honest one and dropped
    liar = Liar(ipc(tmp_path, "liar"), lambda r: [row(r, checksum=1), bytes(ROW)], WELCOME)
    try:
        with client_of([ipc(tmp_path, "liar"), honest.endpoint], PLAN) as client:
            client.connect()
            until(lambda: len(client._io.live()) == 2)
            client.schedule(iter(keys(0, 12)))
            assert len(list(take_all(client, keys(0, 12)))) == 12
            assert liar.asked
            until(lambda: client.stats.checksum_errors == liar.asked)
    finally:
        liar.close()


@pytest.mark.parametrize(
    "welcome", [replace(WELCOME, row_bytes=ROW - 1), replace(WELCOME, lane="carrier pigeon")], ids=["size", "lane"]
)
def test_an_offer_that_does_not_fit_is_not_accepted(welcome: m.Message, tmp_path: Path) -> None:
    liar = Liar(ipc(tmp_path, "liar"), lambda r: [], welcome)
    try:
        with client_of([ipc(tmp_path, "liar")], PLAN, connect_seconds=30) as client:
            until(lambda: client._io.links[0].state == "connecting")
            with pytest.raises(StreamError, match="it broke the protocol: WELCOME offers"):
                client.connect()
    finally:
        liar.close()


@pytest.mark.parametrize(("code", "remedy"), [("malformed", "update feeders first"), ("run", "")])
def test_a_feeder_that_does_not_understand_hello_may_be_older(tmp_path: Path, code: m.RefusalCode, remedy: str) -> None:
    refusal = m.Refused(code, "HELLO has an unknown key running_checksums")
    liar = Liar(ipc(tmp_path), lambda request: [], refusal)
    try:
        with client_of([ipc(tmp_path)], PLAN) as client, pytest.raises(StreamError, match="unknown key") as caught:
            client.connect()
        assert caught.value.remedy.endswith(remedy) if remedy else not caught.value.remedy
    finally:
        liar.close()
