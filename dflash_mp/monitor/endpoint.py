"""The HTTP endpoint of a feeder or a rank: `/metrics` for Prometheus, `/events` with the last warnings and errors as JSON.

It listens on `metrics.address` (loopback unless told otherwise) at a port of its own: `metrics.feeder_port` plus the feeder's index, or
`metrics.rank_port` plus the rank. A port that cannot be had is one warning, and the process does its work without an endpoint: what watches
a run must not stop it. Requests are answered by threads of this process that read counters, a millisecond each; at most `_CLIENTS` at a time, and one
that has not asked and read its answer after `_CLIENT_SECONDS` (and half a second) is cut off, however busy it looks. Only GET is answered, only figures and redacted log lines are shown.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from dflash_mp.config import RunConfig
from dflash_mp.monitor.catalogue import BY_NAME, COMMON_LABELS
from dflash_mp.monitor.events import EventLog

log = logging.getLogger(__name__)
_CLIENTS = 8
_CLIENT_SECONDS = 5.0
_TEXT = "text/plain; version=0.0.4; charset=utf-8"

Role = Literal["feeder", "drafter"]


@dataclass(frozen=True)
class Sample:
    """One value of the metric `name`, which is in the catalogue, with that metric's own labels."""

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


class MetricsEndpoint:
    """Listens from construction on, if it can; `port` is None otherwise. A context manager: leaving it closes.

    `read` gives the samples; it is called by other threads. What it raises is the answer to that request (status 500), and is logged.
    """

    def __init__(
        self, address: str, port: int, run: str, role: Role, index: int, read: Callable[[EventLog], Iterable[Sample]]
    ) -> None:
        self.events = EventLog()
        self.port: int | None = None
        self._common = (run, role, str(index))
        self._read = read
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(self._families))
        self._server = self._listen(address, port)
        if self._server is not None:
            self.port = self._server.server_address[1]
            self.events.attach()
            threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
            log.info("figures for Prometheus at http://%s/metrics", _host_and_port(address, self.port))

    @staticmethod
    def of(
        config: RunConfig, role: Role, index: int, read: Callable[[EventLog], Iterable[Sample]]
    ) -> AbstractContextManager[MetricsEndpoint | None]:
        """The endpoint of this process as configured; None where there is to be none."""
        first = config.metrics.feeder_port if role == "feeder" else config.metrics.rank_port
        if first is None:
            return nullcontext()
        return MetricsEndpoint(config.metrics.address, first + index, config.run_dir.absolute().name, role, index, read)

    def metrics(self) -> bytes:
        """The page at `/metrics`."""
        return generate_latest(self._registry)

    def close(self) -> None:
        """Listen no more. Requests under way may still be answered."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            self.events.detach()

    def __enter__(self) -> MetricsEndpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self, address: str, port: int) -> _Server | None:
        role, index = self._common[1:]
        key = "metrics.feeder_port" if role == "feeder" else "metrics.rank_port"
        try:
            return _Server(address, port, self)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            log.warning(
                "%s %s shows no figures: cannot listen on %s: %s; set %s or metrics.address, or %s to null to have none",
                role,
                index,
                _host_and_port(address, port),
                reason or error,
                key,
                key,
            )
            return None

    def _families(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sample in self._read(self.events):
            metric = BY_NAME[sample.name]
            if sample.name not in families:
                family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                labels = [*COMMON_LABELS, *metric.labels]
                families[sample.name] = family(sample.name, metric.meaning, labels=labels)
            values = [*self._common, *(sample.labels[label] for label in metric.labels)]
            families[sample.name].add_metric(values, sample.value)
        return families.values()


class _Collector:
    """What the registry asks for families."""

    def __init__(self, collect: Callable[[], Iterable[Any]]) -> None:
        self.collect = collect

    def describe(self) -> list[Any]:
        """Nothing is known before the first request."""
        return []


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: str, port: int, endpoint: MetricsEndpoint) -> None:
        if ":" in address:
            self.address_family = socket.AF_INET6
        self.endpoint = endpoint
        self._room = threading.BoundedSemaphore(_CLIENTS)
        self._ends: dict[Any, float] = {}  # connection: when it is cut off
        super().__init__((address, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            self._ends[request] = time.monotonic() + _CLIENT_SECONDS
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._ends[request]
            self._room.release()

    def service_actions(self) -> None:
        """Called about twice a second."""
        for request, end in list(self._ends.items()):
            if time.monotonic() > end:
                with suppress(OSError):  # it has ended by itself
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up or kept silent is no event."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "dflash-mp"
    sys_version = ""
    timeout = _CLIENT_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        try:
            if path == "/metrics":
                self._answer(200, _TEXT, self.server.endpoint.metrics())
            elif path == "/events":
                events = json.dumps(self.server.endpoint.events.last()).encode()
                self._answer(200, "application/json", events)
            else:
                self._answer(404, _TEXT, b"there are /metrics and /events\n")
        except OSError:  # the client is gone
            raise
        except Exception as error:
            log.exception("the figures could not be read")
            self._answer(500, _TEXT, f"{type(error).__name__}\n".encode())

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no events."""


def _host_and_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
