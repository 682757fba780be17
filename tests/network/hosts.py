"""Several "hosts" on this machine, for tests: network namespaces on one wire that can be slow, lossy or cut.

    from hosts import network

    def test_something() -> None:
        with network("feeder", "trainer") as (wire, feeder, trainer):  # skips, with the reason, where this can't be had
            service = feeder.popen(["dflash-mp", "feed", "--set", f"feed.endpoints=[tcp://{feeder.address}:5555]", …])
            trainer.run(["ping", "-c1", feeder.address])               # also feeder.address6, for [brackets]
            wire.shape(delay=0.05, loss=0.01)                          # seconds each way; share of lost frames, seeded
            wire.cut(feeder, trainer); …; wire.mend()                  # a partition, and its end
            feeder.move("10.77.0.9")                                   # the host's address changes (IPv4; old connections go dead)
            trainer.knows("feeder", feeder.address)                    # its /etc/hosts; say so before the first popen

A host has its own interfaces, addresses, ports, and loopback; files and processes are shared. `popen` and `run` take what `subprocess.Popen` and
`subprocess.run` take; what they start belongs to the caller (kill it before the end). `entered` puts the calling thread, and the
threads that it starts meanwhile, on a host; `enter` does that for good, in a process of its own. Commands that look for an interface by name find
`eth0` (`GLOO_SOCKET_IFNAME=eth0` for torchrun over several hosts). Needs root, iproute2 (`apt-get install iproute2`) and /dev/net/tun.
After kill -9 the namespaces of a test stay; the next `network` removes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

_NAMESPACES = Path("/run/netns")
_NAMES = Path("/etc/netns")  # `ip netns exec` lays what is there over /etc
_PREFIX = "dflash-test"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


class Host:
    """A network namespace with one interface, `eth0`."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.namespace = f"{_PREFIX}-{os.getpid()}-{name}"
        self.path = _NAMESPACES / self.namespace
        self.address = f"10.77.0.{number + 1}"
        self.address6 = f"fd77::{number + 1}"

    def command(self, command: Sequence[str]) -> list[str]:
        """`command`, run on this host. It replaces `ip`, so the process started is the command's own."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(self.command(command), **options)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        return subprocess.run(self.command(command), **{"check": True, **options})

    def move(self, address: str) -> None:
        """Give the host another IPv4 address in place of its own."""
        self.run(["ip", "address", "del", f"{self.address}/16", "dev", "eth0"])
        self.run(["ip", "address", "add", f"{address}/16", "dev", "eth0"])
        self.address = address

    def move6(self, address: str) -> None:
        """Give the host another IPv6 address in place of its own."""
        self.run(["ip", "-6", "address", "del", f"{self.address6}/64", "dev", "eth0"])
        self.run(["ip", "-6", "address", "add", f"{address}/64", "dev", "eth0", "nodad"])
        self.address6 = address

    def knows(self, name: str, address: str) -> None:
        """Have `name` mean `address` to what `popen` and `run` start here, from now on also if it runs already."""
        file = _NAMES / self.namespace / "hosts"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"127.0.0.1 localhost\n{address} {name}\n", encoding="utf-8")

    def enter(self) -> None:
        """Put the calling thread on this host, for good."""
        enter_namespace(self.path)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Put the calling thread on this host for a while."""
        back = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self.enter()
        try:
            yield
        finally:
            enter_namespace(Path(f"/proc/self/fd/{back}"))
            os.close(back)


class Wire:
    """What connects the hosts. Every change holds when the call returns, for frames already under way also."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        taps = [_tap(host) for host in hosts]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("switch.py")), *map(str, taps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=taps,
        )
        for tap in taps:
            os.close(tap)
        self._now: dict[str, Any] = {"delay": 0.0, "loss": 0.0, "seed": 0, "cut": []}

    def shape(self, *, delay: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        """From now on each frame takes `delay` seconds and a share `loss` of them gets lost."""
        self._tell(delay=delay, loss=loss, seed=seed)

    def cut(self, one: Host, other: Host) -> None:
        """Nothing passes between the two, and nobody is told."""
        self._tell(cut=[*self._now["cut"], [one.number, other.number]])

    def mend(self) -> None:
        """End all partitions."""
        self._tell(cut=[])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _tell(self, **change: Any) -> None:
        self._now.update(change)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(self._now) + "\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError("the switch has ended")


@contextlib.contextmanager
def network(*names: str) -> Iterator[tuple[Any, ...]]:
    """The wire, and a host for each of `names`. Skips the test, with the reason, where hosts can't be made."""
    if why := unavailable():
        pytest.skip(why)
    _remove_stale()
    hosts = [Host(number, name) for number, name in enumerate(names)]
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        wire = Wire(hosts)
        try:
            for host in hosts:
                _bring_up(host)
            yield (wire, *hosts)
        finally:
            wire.close()
    finally:
        for host in hosts:
            _remove(host.namespace)


def unavailable() -> str | None:
    """Why hosts can't be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2 (apt-get install iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "the wire between network namespaces needs /dev/net/tun"
    probe = f"{_PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return None if made.returncode == 0 else f"no network namespace can be made here: {made.stderr.strip()}"


def _bring_up(host: Host) -> None:
    commands = [
        "link set lo up",
        f"link set eth0 address 02:00:00:00:00:{host.number:02x}",  # the switch knows hosts by this
        "link set eth0 up",
        f"address add {host.address}/16 dev eth0",
        f"-6 address add {host.address6}/64 dev eth0 nodad",
    ]
    for command in commands:
        _ip("-n", host.namespace, *command.split())


def _tap(host: Host) -> int:
    """A TAP device that is `eth0` in the host's namespace; it goes when the descriptor is closed."""
    with host.entered():
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", b"eth0", _IFF_TAP | _IFF_NO_PI))
    return tap


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def enter_namespace(path: Path) -> None:
    """Put the calling thread there (`os.setns` of Python 3.12)."""
    namespace = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {path}")
    finally:
        os.close(namespace)


def _remove_stale() -> None:
    """Namespaces of tests that were killed."""
    for path in _NAMESPACES.glob(f"{_PREFIX}-*"):
        pid = path.name[len(_PREFIX) + 1 :].partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            _remove(path.name)


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
    shutil.rmtree(_NAMES / namespace, ignore_errors=True)
