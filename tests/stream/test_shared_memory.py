"""Rings: sealed, readable by one drafter, there from the start, and gone with their last user."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from feeder_process import until

from dflash_mp.stream import ring_messages as rm
from dflash_mp.stream import shared_memory
from dflash_mp.stream.fd_passing import LaneError, connect, lane_address, receive, send
from dflash_mp.stream.lane_offers import LaneOffers
from dflash_mp.stream.lane_request import LaneRequest, LaneWishes, lane_wishes
from dflash_mp.stream.memory_limits import shortage
from dflash_mp.stream.shared_memory import MappedRing, Ring

ROW = 5000


def offer_of(ring: Ring) -> rm.RingOffer:
    return rm.RingOffer("token", ring.rows, ring.row_bytes, ring.stride)


def memfds() -> set[int]:
    """The rings that this process has open or mapped, by inode: another test's may go at any time."""
    gc.collect()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if "dflash-mp-rows" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(os.stat(f"/proc/self/fd/{name}").st_ino)
    maps = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    return found | {int(line.split()[4]) for line in maps if "dflash-mp-rows" in line}


# -- the ring -------------------------------------------------------------------------------------------------------------------------


def test_what_the_feeder_writes_is_what_the_drafter_reads_without_a_copy() -> None:
    ring = Ring(ROW, 3)
    mapped = MappedRing(ring.fd, offer_of(ring))
    assert [row.nbytes for row in mapped.rows] == [ROW] * 3
    assert not any(row.any() for row in mapped.rows)
    slots = [ring.take() for _ in range(3)]
    assert ring.take() is None
    for slot in slots:
        assert slot is not None
        assert slot.buffer.data_ptr() % 64 == 0
        slot.buffer.fill_(slot.index + 1)
    assert [int(row.unique()) for row in mapped.rows] == [1, 2, 3]


def test_neither_side_can_change_the_size_and_the_drafter_cannot_write() -> None:
    ring = Ring(ROW, 3)
    size = os.fstat(ring.fd).st_size
    for wrong in (0, size - 1, size + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(ring.fd, wrong)
    with pytest.raises(PermissionError):
        mmap.mmap(ring.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(ring.fd, b"x", 0)
    MappedRing(ring.fd, offer_of(ring))


def test_rows_stay_readable_when_the_feeder_has_let_go_and_nothing_is_left_at_the_end() -> None:
    before = memfds()
    ring = Ring(ROW, 2)
    mapped = MappedRing(ring.fd, offer_of(ring))
    slot = ring.take()
    assert slot is not None
    slot.buffer.fill_(7)
    row = mapped.rows[slot.index]
    ring.close_file()
    del ring, slot, mapped
    assert memfds() - before
    assert int(row.unique()) == 7
    del row
    assert not memfds() - before


@pytest.mark.parametrize("kind", ["unsealed", "smaller than offered", "no memory file"])
def test_memory_that_could_be_taken_away_under_the_drafter_is_refused(kind: str, tmp_path: Path) -> None:
    if kind == "smaller than offered":
        ring = Ring(ROW, 2)
        fd, offer = os.dup(ring.fd), replace(offer_of(ring), rows=3)
    else:
        offer = rm.RingOffer("token", 2, ROW, ROW)
        flags = os.O_RDWR | os.O_CREAT
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING) if kind == "unsealed" else os.open(tmp_path / "file", flags)
        os.ftruncate(fd, 2 * ROW)
    with pytest.raises(LaneError, match="not sealed, or smaller than it says"):
        MappedRing(fd, offer)
    os.close(fd)


# -- too little memory ----------------------------------------------------------------------------------------------------------------


def test_the_limits_of_the_machine_and_of_every_group_above_are_known(tmp_path: Path) -> None:
    def write(name: str, text: object) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n", encoding="ascii")

    mib = 1 << 20
    assert shortage(1 << 60, tmp_path) is None  # nothing known
    write("proc/meminfo", f"MemTotal: 999 kB\nMemAvailable:  {500 * 1024} kB")
    assert shortage(501 * mib, tmp_path) == "the machine has 500 MiB left"
    write("proc/self/cgroup", "4:memory:/job/one\n0::/job/one")
    write("sys/fs/cgroup/job/one/memory.max", "max")
    write("sys/fs/cgroup/job/one/memory.current", 1)
    write("sys/fs/cgroup/job/memory.max", 300 * mib)
    write("sys/fs/cgroup/job/memory.current", 100 * mib)
    assert shortage(200 * mib, tmp_path) is None
    assert shortage(201 * mib, tmp_path) == "the container has 200 MiB left"
    write("sys/fs/cgroup/job/memory.stat", f"anon 1\ninactive_file {50 * mib}")
    assert shortage(250 * mib, tmp_path) is None
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", 90 * mib)
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", 80 * mib)
    assert shortage(11 * mib, tmp_path) == "the container has 10 MiB left"


def test_more_than_the_container_has_left_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    before = memfds()
    monkeypatch.setattr(shared_memory, "shortage", lambda nbytes: "the container has 3 MiB left")
    with pytest.raises(LaneError) as caught:
        Ring(1 << 20, 4)
    assert caught.value.what == "too little memory for a ring of 4 rows (4.0 MiB): the container has 3 MiB left"
    assert "lower stream.window_mib" in caught.value.remedy
    assert not memfds() - before


_LIMITED = """
import resource
from dflash_mp.stream.fd_passing import LaneError
from dflash_mp.stream.shared_memory import Ring
Ring(1 << 20, 4)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for kind, most in ((resource.RLIMIT_FSIZE, 64 << 20), (resource.RLIMIT_AS, used + (1 << 30))):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        Ring(1 << 30, 4)
    except LaneError as error:
        print(error)
    resource.setrlimit(kind, before)
"""


def test_a_limit_of_the_process_is_found_when_the_ring_is_made() -> None:
    done = subprocess.run([sys.executable, "-c", _LIMITED], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    too_large, no_address, *_ = done.stdout.split("too little memory")[1:]
    assert " for a ring of 4 rows (4096.0 MiB): File too large" in too_large
    assert " for a ring of 4 rows (4096.0 MiB): Cannot allocate memory" in no_address
    assert "→ give the feeder's container or machine more memory, or lower stream.window_mib" in no_address


# -- asking and offering --------------------------------------------------------------------------------------------------------------

Offering = Callable[..., LaneOffers]


@pytest.fixture
def offering(tmp_path: Path) -> Iterator[Offering]:
    started: list[LaneOffers] = []

    def start(capacity: int = 8, in_use: int = 0, endpoint: str = f"ipc://{tmp_path}/f.sock") -> LaneOffers:
        offers = LaneOffers(endpoint, ROW, capacity, lambda but: in_use, None, lambda count, text: None)
        offers.start()
        started.append(offers)
        return offers

    yield start
    for offers in started:
        offers.close()


def wishes(rows: int = 4, rank: int = 0, world: int = 1) -> LaneWishes:
    return lane_wishes(rank, world, window_bytes=rows * ROW, least=2, pin=False, checksums=False)


def ask(tmp_path: Path, wished: LaneWishes | None, endpoint: str = "") -> LaneRequest:
    done = threading.Event()
    request = LaneRequest(endpoint or f"ipc://{tmp_path}/f.sock", wished, 10.0, done.set)
    assert request.done or done.wait(30)
    return request


def test_a_drafter_gets_a_ring_of_its_window_and_no_more_than_its_share(offering: Offering, tmp_path: Path) -> None:
    offers = offering(capacity=8)
    first, second = ask(tmp_path, wishes(3, 0, 2)), ask(tmp_path, wishes(100, 1, 2))
    assert first.ring is not None
    assert second.ring is not None
    assert [len(first.ring.rows), len(second.ring.rows)] == [3, 4]
    assert offers.pending_rows() == 7
    name = f"shared_memory/{first.ring.token}"
    assert offers.claim("rank 1", (name, "inband")) == ("", None)  # another's
    lane, ring = offers.claim("rank 0", (name, "inband"))
    assert (lane, ring is not None) == (name, True)
    assert offers.claim("rank 0", (name, "inband")) == ("", None)  # once
    assert offers.pending_rows() == 4


def test_memory_that_others_have_is_not_given_away(offering: Offering, tmp_path: Path) -> None:
    offers = offering(capacity=8, in_use=7)
    request = ask(tmp_path, wishes())
    assert request.ring is None
    assert "feed.memory_mib leaves this drafter 1 rows, it needs 2; set feed.memory_mib to at least" in request.why
    why, ring = offers.claim("rank 0", ("inband",))
    assert "too little memory" in why
    assert ring is None


def test_a_ring_that_nobody_claims_is_dropped(offering: Offering, tmp_path: Path) -> None:
    before, offers = memfds(), offering()
    request = ask(tmp_path, wishes())
    offers.expire()
    assert offers.pending_rows() == 4
    offers._pending["rank 0"].since -= 31
    offers.expire()
    assert offers.pending_rows() == 0
    del request
    until(lambda: not memfds() - before)  # the thread that asked may not have ended yet


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("tcp://192.0.2.1:5555", "another host"),
        ("tcp://127.0.0.1:1", "its socket @dflash-mp/lane/1 can't be reached: Connection refused"),
        ("tcp://localhost:1", "its socket @dflash-mp/lane/1 can't be reached"),
        ("tcp://[::1]:1", "its socket @dflash-mp/lane/::1/1 can't be reached"),  # another feeder may be there
        ("tcp://127.0.0.2:1", "its socket @dflash-mp/lane/127.0.0.2/1 can't be reached"),
        ("ipc:///nowhere/f.sock", "its socket /nowhere/f.sock.lane can't be reached: No such file or directory"),
        (f"ipc:///{'x' * 103}", "has more than 107 bytes"),
    ],
)
def test_why_there_is_no_ring_is_said(endpoint: str, says: str, tmp_path: Path) -> None:
    request = ask(tmp_path, wishes(), endpoint)
    assert request.ring is None
    assert says in request.why


def test_what_is_no_request_is_answered_and_holds_nobody_up(offering: Offering, tmp_path: Path) -> None:
    offering()
    address = lane_address(f"ipc://{tmp_path}/f.sock")
    silent = [connect(address, 5.0) for _ in range(20)]
    for wrong in (b"\xc1", rm.encode(rm.RingProgress(1)), rm.encode(replace(wishes().request, version=9))):
        with connect(address, 5.0) as connection:
            send(connection, wrong)
            answer = rm.decode(receive(connection)[0])
            assert isinstance(answer, rm.RingDenied)
    assert ask(tmp_path, wishes()).ring is not None
    for each in silent:
        each.close()


def test_a_dead_feeders_socket_is_replaced_and_a_closed_ones_removed(offering: Offering, tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stale.bind(f"{tmp_path}/f.sock.lane")
    stale.close()
    offers = offering()
    assert (tmp_path / "f.sock.lane").stat().st_mode & 0o777 == 0o600
    assert ask(tmp_path, wishes()).ring is not None
    offers.close()
    assert not (tmp_path / "f.sock.lane").exists()


def test_a_file_descriptor_that_a_peer_slips_in_is_closed(offering: Offering, tmp_path: Path) -> None:
    offering()
    before = len(os.listdir("/proc/self/fd"))
    with connect(lane_address(f"ipc://{tmp_path}/f.sock"), 5.0) as connection, open(os.devnull, "rb") as file:
        send(connection, rm.encode(wishes().request), file.fileno())
        assert isinstance(rm.decode(receive(connection)[0]), rm.RingDenied)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)  # fewer, if what another test left is closed meanwhile


def test_a_ring_pinned_for_cuda_is_registered_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for CUDA's runtime: what is called with what, and in which order with the end of the mapping."""
    calls: list[tuple[object, ...]] = []

    class Cudart:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            calls.append(("register", address, nbytes, flags))
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            calls.append(("unregister", address, "dflash-mp-rows" in Path("/proc/self/maps").read_text("ascii")))

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    before = memfds()
    ring = Ring(ROW, 2, writable=True)
    mapped = MappedRing(ring.fd, offer_of(ring), cuda_device=0)
    ring.close_file()
    del ring
    address = mapped.rows[0].data_ptr()
    assert calls == [("register", address, 2 * 5056, 1)]
    del mapped
    gc.collect()
    assert calls[1:] == [("unregister", address, True)]
    assert not memfds() - before
