"""The addresses of a run's feeders: free, taken by something else, or answered by a feeder, and then whether it goes together with this host."""

from __future__ import annotations

import errno
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dflash_mp.addresses import is_of_this_host, only_from_here
from dflash_mp.config import RunConfig
from dflash_mp.doctor.files import check_other_clock
from dflash_mp.doctor.finding import Finding, green, of_error, red, yellow
from dflash_mp.errors import StreamError
from dflash_mp.listening import who_listens
from dflash_mp.stream.endpoints import check_endpoint, ipc_path
from dflash_mp.stream.handshake import expectations, unmet
from dflash_mp.stream.inquiry import Answer, ask
from dflash_mp.stream.keys import DrafterKeys
from dflash_mp.stream.messages import Welcome
from dflash_mp.stream.roster import NAME_A_FEEDER, NO_FEEDER, named
from dflash_mp.stream.software import differences, own_software, torch_mismatch

_STREAM = StreamError.exit_code
_AT_ONCE = 16
_SAME = "install the same versions on all hosts (pip freeze on one, pip install -r on the others)"


@dataclass(frozen=True)
class Asked:
    """An endpoint, what answered there, and what was found."""

    endpoint: str
    answer: Answer
    findings: tuple[Finding, ...]


def check_feeders(config: RunConfig, seconds: float, transfer_seconds: float, trains: bool = True) -> list[Asked]:
    """Ask all feeders of the run at the same time; the drafter's keys of this host are shown where there are some. A host that `trains` needs
    to know one feeder, and can read `stream.feeders_file`.
    """
    try:
        endpoints = named(config.feeder_endpoints(), config.stream.feeders_file if trains else None)
    except StreamError as error:
        return [Asked("", Answer(), (of_error("stream.feeders_file", error),))]
    if not endpoints:
        nobody = red("feeders", NO_FEEDER, NAME_A_FEEDER, _STREAM)
        return [Asked("", Answer(), (nobody,))] if trains else []
    keys = None
    if config.stream.keys is not None and (config.stream.keys / "drafter.secret").exists():
        try:
            keys = DrafterKeys.load(config.stream.keys)
        except StreamError:
            keys = None  # said by the check of the keys
    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(endpoints))) as threads:
        found = list(threads.map(lambda e: _check_feeder(config, e, keys, seconds, transfer_seconds), endpoints))
    return [*found, *_together(found)]


def _check_feeder(
    config: RunConfig, endpoint: str, keys: DrafterKeys | None, seconds: float, transfer_seconds: float
) -> Asked:
    try:
        check_endpoint(endpoint, config.feed.insecure_no_auth, config.stream.keys is not None)
    except StreamError as error:
        return Asked(endpoint, Answer(), (of_error(endpoint, error),))
    state = _state(endpoint)
    if state == "free":
        return Asked(endpoint, Answer(), (green(endpoint, "free for a feeder"),))
    transfer = 0.0 if ipc_path(endpoint) else transfer_seconds  # rows don't go by ipc sockets where memory is shared
    answer = ask(endpoint, expectations(config), keys, seconds=seconds, transfer_seconds=transfer)
    if answer.welcome is not None:
        return Asked(endpoint, answer, tuple(_check_welcome(config, endpoint, answer, answer.welcome)))
    if answer.refusal is not None and answer.refusal.code == "full":
        return Asked(
            endpoint, answer, (yellow(endpoint, f"a feeder, but {answer.refusal.reason}", answer.refusal.remedy),)
        )
    if answer.refusal is not None:
        refusal = answer.refusal
        what = f"it refused: {refusal.reason}"
        if state == "taken":
            what = f"taken by {_owner(endpoint)}, and {what}"
        return Asked(endpoint, answer, (red(endpoint, what, refusal.remedy or "look at the feeder's log", _STREAM),))
    if state == "taken":
        remedy = "stop it, or give another address in feed.endpoints"
        what = f"taken by {_owner(endpoint)}, which doesn't answer as a feeder"
        return Asked(endpoint, answer, (red(endpoint, what, remedy, _STREAM),))
    if state == "elsewhere":
        remedy = "start its feeder (dflash-mp feed), or check the address, the firewall and stream.keys"
        return Asked(
            endpoint, answer, (yellow(endpoint, "an address of another host, and no feeder answers there", remedy),)
        )
    return Asked(endpoint, answer, (red(endpoint, state, "check feed.endpoints", _STREAM),))


def _check_welcome(config: RunConfig, endpoint: str, answer: Answer, welcome: Welcome) -> list[Finding]:
    findings = [
        green(
            endpoint,
            f"a feeder of this run answers in {1e3 * answer.round_trip:.1f} ms; it serves {welcome.plan.target.name}",
        )
    ]
    if differing := unmet(expectations(config), welcome.plan):
        what = f"its feeder serves other rows than this configuration says: {'; '.join(differing)}"
        findings = [red(endpoint, what, "use the same configuration on all hosts", _STREAM)]
    ours, theirs = own_software(), welcome.software
    about = f"versions at {endpoint}"
    if not theirs:
        findings.append(yellow(about, "it does not say which versions it runs", "install the same dflash-mp there"))
    elif (mismatch := torch_mismatch(ours, theirs)) is not None:
        findings.append(red(about, mismatch, _SAME, _STREAM))
    if others := [f"{name} {there} there, {here} here" for name, here, there in differences(ours, theirs)]:
        findings.append(yellow(about, "; ".join(others), _SAME))
    elif theirs:
        findings.append(green(about, "the same as here"))
    if answer.clock_ahead is not None:
        findings.append(check_other_clock(f"the host of {endpoint}", answer.clock_ahead, answer.round_trip))
    return findings


def roles_here(endpoints: list[str]) -> tuple[bool, bool]:
    """Whether feeders, and whether drafters run on this host, as their addresses tell: where none is of this host, only drafters; where one is that other
    hosts reach, only feeders; else both.
    """
    if not any(is_of_this_host(endpoint) for endpoint in endpoints):
        return False, True
    others_reach = any(not only_from_here(endpoint) for endpoint in endpoints)
    return True, not others_reach


def _together(asked: list[Asked]) -> list[Asked]:
    """Whether the feeders that answered serve the same rows."""
    welcomes = [(one.endpoint, one.answer.welcome) for one in asked if one.answer.welcome is not None]
    findings = []
    for endpoint, welcome in welcomes[1:]:
        first, plan = welcomes[0]
        if differing := plan.plan.differences(welcome.plan):
            what = f"they serve different rows ({first} = here): {'; '.join(differing)}"
            findings.append(
                red(f"{first} and {endpoint}", what, "start all feeders with the same configuration", _STREAM)
            )
    return [Asked("", Answer(), tuple(findings))] if findings else []


def _state(endpoint: str) -> str:
    """free, taken, elsewhere, or why a feeder could not listen there."""
    path = ipc_path(endpoint)
    if path is not None:
        return "taken" if path.exists() and _connects(str(path)) else "free"
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError) as error:
        return f"the host {host} is unknown ({error})"
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            known = {errno.EADDRINUSE: "taken", errno.EADDRNOTAVAIL: "elsewhere"}
            return known.get(error.errno or 0, f"a feeder can't listen there: {error.strerror}")
    return "free"


def _connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        return probe.connect_ex(path) == 0


def _owner(endpoint: str) -> str:
    return who_listens(endpoint) or "a process of another user"
