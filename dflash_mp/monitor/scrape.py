"""Reading metrics endpoints from elsewhere: all at once, in bounded time, trusting nothing that comes back.

`Scraper.read` returns within its time-out whatever the other sides do: each endpoint is asked by a thread of its own, and one that is slow is
reported as such and not asked again before its thread is done. An answer is cut off at `_MOST_BYTES`; text is made printable.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from dflash_mp.addresses import in_url, is_loopback
from dflash_mp.config import RunConfig
from dflash_mp.errors import ConfigError

_MOST_BYTES = 4 << 20
_EVENTS_SHOWN = 50
_STRANGER = "it answers, but not with figures of dflash-mp"


@dataclass(frozen=True)
class Event:
    """A warning or an error that a process logged. `time`: seconds since the epoch."""

    time: float
    level: str
    text: str


@dataclass(frozen=True)
class Reading:
    """What one endpoint said at `moment` (monotonic). `problem`: why it said nothing."""

    endpoint: str
    moment: float
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)
    run: str = ""
    role: str = ""
    index: int = 0
    events: tuple[Event, ...] = ()
    problem: str = ""

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of the metric's samples that have these labels; None when there is none."""
        wanted = set(labels.items())
        found = [value for (of, has), value in self.samples.items() if of == name and wanted <= has]
        return sum(found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The metric's samples by the value of one of its labels."""
        return {
            dict(has)[label]: value for (of, has), value in self.samples.items() if of == name and label in dict(has)
        }


def endpoints_of(config: RunConfig) -> list[str]:
    """Those of the run's feeders and of this host's ranks. Raises `ConfigError` if there are none.

    Feeders are looked for on this host, and at the address of their tcp endpoint where `metrics.address` lets other hosts read.
    """
    metrics = config.metrics
    here = in_url(metrics.address)
    found = []
    if metrics.feeder_port is not None:
        for index, endpoint in enumerate(config.feeder_endpoints()):
            tcp = re.fullmatch(r"tcp://(.+):\d+", endpoint)
            elsewhere = tcp is not None and not is_loopback(metrics.address)
            found.append(f"{tcp[1] if tcp is not None and elsewhere else here}:{metrics.feeder_port + index}")
    if metrics.rank_port is not None:
        found += [f"{here}:{metrics.rank_port + r}" for r in range(config.train.drafters)]
    if not found:
        raise ConfigError(
            "metrics.feeder_port and metrics.rank_port are null: this run shows no figures",
            "set a port and start the run again, or name endpoints with --endpoint",
        )
    return found


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT" or "[v6]:PORT". Raises `ConfigError`."""
    host, colon, port = endpoint.removeprefix("http://").removesuffix("/metrics").rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{endpoint!r} is not of the form HOST:PORT", "for example --endpoint 10.0.0.5:17400")
    return host.strip("[]"), int(port)


class Scraper:
    """Reads `endpoints`. Raises `ConfigError` if one is no address."""

    def __init__(self, endpoints: Sequence[str], seconds: float = 2.0) -> None:
        self._addresses = {endpoint: split_endpoint(endpoint) for endpoint in dict.fromkeys(endpoints)}
        self._seconds = seconds
        self._asking: dict[str, threading.Thread] = {}

    def read(self) -> list[Reading]:
        """One reading of each endpoint, in their order, after at most the time-out."""
        answers: dict[str, Reading] = {}
        for endpoint, address in self._addresses.items():
            if not (endpoint in self._asking and self._asking[endpoint].is_alive()):
                ask = threading.Thread(target=self._ask, args=(endpoint, address, answers), daemon=True)
                self._asking[endpoint] = ask
                ask.start()
        deadline = time.monotonic() + self._seconds
        for thread in self._asking.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        late = f"no answer within {self._seconds:g} s"
        return [
            answers.get(endpoint, Reading(endpoint, time.monotonic(), problem=late)) for endpoint in self._addresses
        ]

    def _ask(self, endpoint: str, address: tuple[str, int], answers: dict[str, Reading]) -> None:
        try:
            reading = parse(endpoint, time.monotonic(), _get(address, "/metrics", self._seconds))
            events = tuple(_events(_get(address, "/events", self._seconds)))
            answers[endpoint] = replace(reading, events=events)
        except (OSError, http.client.HTTPException, ValueError) as error:
            answers[endpoint] = Reading(endpoint, time.monotonic(), problem=_reason(error))


def parse(endpoint: str, moment: float, text: str, events: Iterable[Event] = ()) -> Reading:
    """The reading in the page `text`. Raises ValueError if it isn't a page of this program."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        samples = {
            (sample.name, frozenset((name, printable(value)) for name, value in sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except (ValueError, LookupError):
        raise ValueError(_STRANGER) from None
    known = next((dict(labels) for name, labels in samples if name == "dflash_mp_build_info"), None)
    if known is None:
        raise ValueError(_STRANGER)
    return Reading(
        endpoint,
        moment,
        samples,
        run=known.get("run", ""),
        role=known.get("role", ""),
        index=int(known.get("index", "0")),
        events=tuple(events),
    )


def printable(text: str) -> str:
    """`text` without what a terminal would obey."""
    return "".join(character if character.isprintable() else " " for character in text)


def _get(address: tuple[str, int], path: str, seconds: float) -> str:
    connection = http.client.HTTPConnection(*address, timeout=seconds)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read(_MOST_BYTES)
        if response.status != 200:
            raise ValueError(f"it answers with status {response.status}")
        return body.decode(errors="replace")
    finally:
        connection.close()


def _events(text: str) -> list[Event]:
    try:
        return [Event(float(e["time"]), str(e["level"]), printable(str(e["text"]))) for e in json.loads(text)][
            -_EVENTS_SHOWN:
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(_STRANGER) from error


def _reason(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "the host's name is not known"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return printable(str(error)) or type(error).__name__
