"""Addresses: which are allowed, how a feeder takes one, and the options of every socket.

Allowed are `ipc://PATH` and `tcp://HOST:PORT` on this machine's loopback; another host only with keys (`stream.keys`) or
`feed.insecure_no_auth`, because whoever can reach an unauthenticated feeder can ask for its rows and weights. `bind` never takes an
address from a live feeder and says which address is taken; a socket file that a dead feeder left behind is replaced. All failures are
`StreamError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

import zmq

from dflash_mp.addresses import is_loopback
from dflash_mp.errors import StreamError
from dflash_mp.stream.messages import CHUNK_BYTES, HEADER_BYTES

LONGEST_IPC_PATH = 107  # bytes: sun_path of a Unix socket
_IPC_SEND_BYTES = 256 << 10  # the kernel takes it twice, or twice net.core.wmem_max if that is less
_TAKEN = "stop the other feeder or program that uses it, or give another address in feed.endpoints"

_ELSEWHERE = "a feeder listens on the machine that it runs on: give an address of this one in feed.endpoints"


def check_endpoint(endpoint: str, insecure_no_auth: bool, keyed: bool = False) -> None:
    """Raise `StreamError` unless `endpoint` is well formed and may be used; `keyed`: only who has a listed key gets in."""
    scheme, separator, address = endpoint.partition("://")
    if not separator or scheme not in ("ipc", "tcp"):
        raise StreamError(
            f"{endpoint!r} is no feeder address", "use ipc:///path/to/socket or tcp://host:port in feed.endpoints"
        )
    if scheme == "ipc":
        _check_ipc(endpoint, address)
    elif not _leads_here(endpoint, address) and not (insecure_no_auth or keyed):
        raise StreamError(
            f"{endpoint} can be reached from other hosts, and nothing authenticates who connects",
            "make keys (dflash-mp keygen DIR) and set stream.keys, or use ipc:// or tcp://127.0.0.1; "
            "on a network that you trust wholly: --set feed.insecure_no_auth=true",
        )


def claim(endpoint: str, insecure_no_auth: bool, keyed: bool = False) -> None:
    """To be called before `bind`: raise `StreamError` unless `endpoint` may be used (`check_endpoint`) and, by ipc, nobody listens there."""
    check_endpoint(endpoint, insecure_no_auth, keyed)
    path = ipc_path(endpoint)
    if path is not None:
        _prepare_directory(path)
        _check_nobody_listens(path, endpoint)


def bind(router: zmq.Socket[bytes], endpoint: str) -> str:
    """Listen on `endpoint`, which was claimed, and return the address got (port 0 is resolved)."""
    allow_ipv6(router, endpoint)
    path = ipc_path(endpoint)
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        remedy = _TAKEN if error.errno == errno.EADDRINUSE else _ELSEWHERE
        raise StreamError(f"cannot listen on {endpoint}: {error.strerror}", remedy) from None
    if path is not None:
        path.chmod(0o600)
    return router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


def check_available(endpoint: str, insecure_no_auth: bool, keyed: bool = False) -> None:
    """Raise `StreamError` if a feeder could not listen on `endpoint` now. For finding out before a target is loaded."""
    context = zmq.Context()
    try:
        path = ipc_path(endpoint)
        router = context.socket(zmq.ROUTER)
        if keyed:  # a drafter that connects just now must not take this for a feeder without keys
            router.curve_server, router.curve_secretkey = 1, zmq.curve_keypair()[1]
        claim(endpoint, insecure_no_auth, keyed)
        bind(router, endpoint)
        if path is not None:
            path.unlink(missing_ok=True)
    finally:
        context.destroy(linger=0)


def ipc_path(endpoint: str) -> Path | None:
    """The socket file of an ipc endpoint; None for tcp."""
    return Path(endpoint[len("ipc://") :]) if endpoint.startswith("ipc://") else None


def allow_ipv6(any_socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Before binding or connecting; only for IPv6 addresses and names, since it makes libzmq write IPv4 ones in IPv6 form."""
    host = endpoint.partition("://")[2].rpartition(":")[0]
    any_socket.ipv6 = "[" in endpoint or (ipc_path(endpoint) is None and _is_name(host))


def set_feeder_options(router: zmq.Socket[bytes]) -> None:
    """Bounds and liveness of a feeder's ROUTER socket."""
    _set_common_options(router)
    router.router_mandatory = 1  # a full or vanished peer is an error of that send, not a lost message
    router.maxmsgsize = HEADER_BYTES
    router.sndhwm = 16  # messages per peer: chunks in it are views of slots, so this costs no memory
    router.rcvhwm = 64


def widen(descriptor: int) -> None:
    """Give a connection that a feeder accepted by ipc room in the kernel: before this, sender and receiver take turns.

    A full Unix socket isn't writable again until three quarters of its buffer have been read, and libzmq, which never blocks, waits
    for that: with the kernel's usual 208 KiB that leaves half of the speed. libzmq has no such option for ipc. Nothing if it is closed.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as same:
        if same.family == socket.AF_UNIX:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _IPC_SEND_BYTES)


def set_drafter_options(dealer: zmq.Socket[bytes]) -> None:
    """Bounds and liveness of a drafter's DEALER socket."""
    _set_common_options(dealer)
    dealer.maxmsgsize = CHUNK_BYTES
    dealer.sndhwm = 256
    dealer.rcvhwm = 4  # chunks that may wait in memory outside the window: few enough to stay in the processor's cache
    dealer.immediate = 1  # queue nothing for a feeder that isn't there
    dealer.reconnect_ivl = 100
    dealer.reconnect_ivl_max = 1000
    dealer.connect_timeout = 5000


def _set_common_options(any_socket: zmq.Socket[bytes]) -> None:
    any_socket.linger = 0
    any_socket.handshake_ivl = 10_000
    any_socket.heartbeat_ivl = 2000
    any_socket.heartbeat_timeout = 10_000  # must outlast one chunk on the slowest link
    any_socket.heartbeat_ttl = 20_000
    any_socket.tcp_keepalive = 1
    any_socket.tcp_keepalive_idle = 30
    any_socket.tcp_keepalive_intvl = 10
    any_socket.tcp_keepalive_cnt = 3


def _check_ipc(endpoint: str, path: str) -> None:
    if not path.startswith("/"):
        raise StreamError(f"{endpoint}: the path of an ipc address must be absolute", "use ipc:///path/to/socket")
    if len(os.fsencode(path)) > LONGEST_IPC_PATH:
        raise StreamError(
            f"{endpoint}: the path has {len(os.fsencode(path))} bytes; a Unix socket's may have {LONGEST_IPC_PATH}",
            "use a shorter path in feed.endpoints, for example under /tmp",
        )


def _leads_here(endpoint: str, address: str) -> bool:
    host, colon, port = address.rpartition(":")
    if not colon or not (port == "*" or (port.isdecimal() and int(port) < 1 << 16)):
        raise StreamError(f"{endpoint} names no port", "use tcp://host:port in feed.endpoints")
    return is_loopback(host)


def _is_name(host: str) -> bool:
    """Whether `host` is looked up, which may find IPv6 addresses. (`localhost` stays what it was: IPv4.)"""
    return host not in ("localhost", "*") and any(letter.isalpha() for letter in host)


def _prepare_directory(path: Path) -> None:
    """Make the socket's directory, for this user only; refuse one in which others could replace the socket."""
    try:
        for directory in (path.parent.parent, path.parent):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.stat()
            others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
            others_own = os.getuid() != 0 and status.st_uid not in (0, os.getuid())
            if others_write or others_own:
                raise StreamError(
                    f"other users can change what is in {directory}, so they could take the feeder's place",
                    f"chmod 700 {directory}, or put the socket elsewhere with feed.endpoints",
                )
    except OSError as error:
        raise StreamError(
            f"cannot make the directory of {path}: {error.strerror}", "check feed.endpoints and permissions"
        ) from None


def _check_nobody_listens(path: Path, endpoint: str) -> None:
    """libzmq replaces a socket file, which is right if its feeder is dead, and would be theft if it lives."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StreamError(f"{path} exists and is no socket", "remove it, or give another path in feed.endpoints")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
        except OSError as error:
            raise StreamError(f"cannot tell who listens on {endpoint}: {error}", _TAKEN) from None
    raise StreamError(f"cannot listen on {endpoint}: a live feeder has it", _TAKEN)
