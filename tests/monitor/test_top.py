"""`dflash-mp top`: a real run, endpoints that do not answer or answer nonsense, and what it makes of readings."""

from __future__ import annotations

import http.server
import io
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from process_trees import SECONDS, eventually
from rich.console import Console

from dflash_mp.config import RunConfig
from dflash_mp.errors import ConfigError
from dflash_mp.monitor.scrape import Event, Reading, Scraper, endpoints_of, parse
from dflash_mp.monitor.top import picture


@contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextmanager
def dripping() -> Iterator[str]:
    """A server that sends a byte now and then, for ever: no single wait is long."""
    stop = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not stop.wait(0.05):
                connection.sendall(b"#")

    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            connection, _ = server.accept()
            drip(connection)

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            stop.set()


def test_nothing_that_an_endpoint_does_makes_it_wait_or_fail() -> None:
    with (
        answering(b"<html>a web page</html>") as page,
        answering(b"x 1\n") as other,
        answering(b"no", status=500) as broken,
        dripping() as drip,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        quiet = f"127.0.0.1:{silent.getsockname()[1]}"
        scraper = Scraper([page, other, broken, drip, quiet, "no-such-host.invalid:1"], seconds=1.0)

        def read() -> dict[str, str]:
            started = time.monotonic()
            readings = {reading.endpoint: reading.problem for reading in scraper.read()}
            assert time.monotonic() - started < 10
            assert readings[drip] == "no answer within 1 s"
            assert readings[quiet].startswith("no answer")
            assert readings["no-such-host.invalid:1"]
            return {each: readings[each] for each in (page, other, broken)}

        stranger = "it answers, but not with figures of dflash-mp"
        wanted = {page: stranger, other: stranger, broken: "it answers with status 500"}
        read()
        eventually(lambda: read() == wanted, "those that answer at once are read")


@pytest.mark.parametrize("wrong", ["nonsense", "host:", ":17400", "host:port", "host:99999"])
def test_an_address_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form HOST:PORT"):
        Scraper([wrong])


def config_of(metrics: dict[str, object], **feed: object) -> RunConfig:
    tree = {"run_dir": "r", "target": {"path": "t"}, "data": {"path": "d"}, "train": {"steps": 1, "drafters": 2}}
    return RunConfig.model_validate({**tree, "feed": feed, "metrics": metrics})


def test_the_configuration_says_whom_to_ask() -> None:
    assert endpoints_of(config_of({}, count=2)) == [f"127.0.0.1:{port}" for port in (17400, 17401, 17500, 17501)]
    tcp = {"endpoints": ["tcp://10.0.0.5:5555", "tcp://[fd00::6]:5556"]}
    ranks = ["127.0.0.1:17500", "127.0.0.1:17501"]
    assert endpoints_of(config_of({"address": "0.0.0.0"}, **tcp)) == ["10.0.0.5:17400", "[fd00::6]:17401", *ranks]
    assert endpoints_of(config_of({}, **tcp)) == ["127.0.0.1:17400", "127.0.0.1:17401", *ranks]
    assert endpoints_of(config_of({"address": "::", "feeder_port": None})) == ["[::1]:17500", "[::1]:17501"]
    with pytest.raises(ConfigError, match="shows no figures"):
        endpoints_of(config_of({"feeder_port": None, "rank_port": None}))


def reading(role: str, moment: float, lines: str, events: tuple[Event, ...] = (), start: float = 1.0) -> Reading:
    common = f'run="r",role="{role}",index="0"'
    text = f"dflash_mp_build_info{{{common}}} 1\ndflash_mp_start_time_seconds{{{common}}} {start}\n"
    text += "".join(line.replace("{", "{" + common + ",") + "\n" for line in lines.splitlines())
    return parse(f"{role}:1", moment, text, events)


def spent(computing: float, idle: float, blocked: float) -> str:
    states = {"computing": computing, "idle": idle, "blocked": blocked}
    return "\n".join(f'dflash_mp_feeder_time_seconds_total{{state="{s}"}} {v}' for s, v in states.items())


def waited(seconds: float) -> str:
    return f'dflash_mp_stream_waited_seconds_total{{x=""}} {seconds}'


def text_of(now: list[Reading], before: list[Reading], width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(picture(now, {one.endpoint: one for one in before}, width))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("feeder", "rank", "verdict"),
    [
        (
            (9.9, 0.1, 0.0),
            5.0,
            "drafters wait 50% of their time for rows, feeders 1% of theirs for drafters: the feeders",
        ),
        ((5.0, 4.0, 1.0), 0.1, "feeders 50% of theirs for drafters: the drafters are the slower side"),
        ((9.9, 0.0, 0.1), 0.1, "well balanced"),
        ((5.0, 5.0, 0.0), 5.0, "both wait"),
    ],
)
def test_it_says_who_waits(feeder: tuple[float, float, float], rank: float, verdict: str) -> None:
    before = [reading("feeder", 0.0, spent(0, 0, 0)), reading("drafter", 0.0, waited(0))]
    now = [reading("feeder", 10.0, spent(*feeder)), reading("drafter", 10.0, waited(rank))]
    assert verdict in text_of(now, before)


@pytest.mark.parametrize("width", [80, 110, 128, 180])
def test_nothing_is_cut_off_on_a_terminal_of_any_usual_width(width: int) -> None:
    figures = "\n".join(
        (
            spent(8, 1, 1),
            'dflash_mp_feeder_made_rows_total{x=""} 99',
            'dflash_mp_feeder_made_tokens_total{x=""} 999999',
            'dflash_mp_feeder_delivered_bytes_total{x=""} 2e10',
            'dflash_mp_gpu_memory_bytes{kind="reserved"} 1.2e11',
            'dflash_mp_gpu_memory_bytes{kind="total"} 1.4e11',
            'dflash_mp_resident_memory_bytes{x=""} 1e11',
        )
    )
    before = [reading("feeder", 0.0, spent(0, 0, 0)), reading("drafter", 0.0, waited(0))]
    now = [reading("feeder", 10.0, figures), reading("drafter", 10.0, waited(1))]
    text = text_of(now, before, width)
    assert "…" not in text
    assert ("feeder:1" in text) == (width >= 128)


def test_a_process_that_started_anew_has_no_rate_until_it_is_read_twice() -> None:
    before = [reading("feeder", 0.0, spent(0, 0, 0)), reading("drafter", 0.0, waited(100), start=1.0)]
    now = [reading("feeder", 10.0, spent(10, 0, 0)), reading("drafter", 10.0, waited(1), start=2.0)]
    assert "who waits: not known" in text_of(now, before)


def test_the_last_warnings_of_all_processes_are_shown_in_order_and_cannot_move_the_cursor() -> None:
    events = (Event(20.0, "error", "second"), Event(30.0, "warning", "third"))
    now = [
        reading("drafter", 1.0, waited(0), events),
        reading("feeder", 1.0, spent(0, 0, 0), (Event(10.0, "warning", "first"),)),
    ]
    text = text_of(now, [])
    assert text.index("first") < text.index("drafter 0 | error: second") < text.index("third")
    with answering(b'[{"time": 1, "level": "error", "text": "a\\u001b[2Jb"}]') as endpoint:
        from dflash_mp.monitor.scrape import _events, _get, split_endpoint

        (event,) = _events(_get(split_endpoint(endpoint), "/events", SECONDS))
        assert event.text == "a [2Jb"


def test_the_live_view_ends_in_order_at_ctrl_c() -> None:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))  # nobody else gets it, and nobody listens
    closed = f"127.0.0.1:{taken.getsockname()[1]}"
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "dflash_mp.cli", "top", "--endpoint", closed, "--seconds", "0.1"]
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env={**os.environ, "TERM": "xterm"})
    os.close(inside)
    try:
        shown = b""
        while b"Connection refused" not in shown:
            assert select.select([terminal], [], [], SECONDS)[0], shown
            shown += os.read(terminal, 65536)
        process.send_signal(signal.SIGINT)
        while select.select([terminal], [], [], SECONDS)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
        assert process.wait(SECONDS) == 0, shown
        assert b"Traceback" not in shown
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        taken.close()
