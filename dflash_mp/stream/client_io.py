"""The drafter's stream thread: keeps feeders connected, asks them for rows, and receives into the window. Another one takes checksums.

One poller over all links. A feeder is given at most a few rows at a time (as many as it allows); which, `dealing` decides: a slow feeder
gets as few as it manages, and what it brings too late is asked of another one, too. Rows owed by a feeder that is lost are asked of another.
Nothing here waits longer than a poll; an exception ends the thread and surfaces in `Window.take`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from functools import partial

import zmq

from dflash_mp.errors import StreamError
from dflash_mp.stream import messages as m
from dflash_mp.stream.client_link import Link
from dflash_mp.stream.codec import ProtocolError
from dflash_mp.stream.dealing import LOOK_AHEAD, deal, takeovers, untried
from dflash_mp.stream.handshake import unmet
from dflash_mp.stream.inband_rows import InbandRows
from dflash_mp.stream.keys import DrafterKeys
from dflash_mp.stream.lane_request import LaneWishes
from dflash_mp.stream.layout import RowLayout
from dflash_mp.stream.plan import StreamPlan
from dflash_mp.stream.ring_rows import RingRows
from dflash_mp.stream.roster import Roster
from dflash_mp.stream.shared_memory import Loan
from dflash_mp.stream.software import torch_mismatch
from dflash_mp.stream.sums import Sums
from dflash_mp.stream.wakeup import Wakeup
from dflash_mp.stream.weights import WeightsBuilder
from dflash_mp.stream.window import Request, Want, Window

log = logging.getLogger(__name__)
_READS_PER_ROUND = 8
_WEIGHT_REQUESTS = 4
_BYE_SECONDS = 1.0
_SUM_SECONDS = 1.0  # for one chunk
_OLDER = "this feeder may be older than this drafter: update feeders first"
_STARVING_POLL_MS = 20  # while the trainer waits and some feeder has nothing to do


class ClientIo:
    """`start`, then `close`. `changed` is notified whenever a link, the weights or the thread change state.

    `wishes` are None where memory is not to be shared; a `roster` says when `endpoints` are others.
    """

    def __init__(
        self,
        endpoints: list[str],
        hello: Callable[[StreamPlan | None], m.Hello],
        who: str,
        silent_seconds: float,
        keys: DrafterKeys | None = None,
        wishes: LaneWishes | None = None,
        roster: Roster | None = None,
    ) -> None:
        self.plan: StreamPlan | None = None
        self.row_bytes = self.checksum_errors = 0
        self.window: Window | None = None
        self.weights: WeightsBuilder | None = None
        self.broken: StreamError | None = None
        self.errors = dict.fromkeys(("row_failed", "feeder_lost", "feeder_refused", "malformed"), 0)
        self.changed = threading.Condition()
        self._hello, self._who, self._silent_seconds = hello, who, silent_seconds
        self._connecting = True  # a refusal is an error, as long as nothing has been promised
        self._wishes, self._roster, self._keys = wishes, roster, keys
        self._leaving: m.Bye | None = None
        self._weights_link: Link | None = None
        self._weights_welcome: m.Welcome | None = None  # names the conversation in which chunks were asked for
        self._turns, self._resumed = itertools.count(), 0.0  # when this process went on after it had been stopped
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._poller, self._wakeup = zmq.Poller(), Wakeup()
        self._poller.register(self._wakeup.fd, zmq.POLLIN)
        self.links = [Link(endpoint, self._context, self._poller, keys) for endpoint in endpoints]
        self._ring_rows = RingRows(self.links)
        self._sums = Sums(self.wake)
        self._inband_rows = InbandRows(self._sums, self._corrupted)
        self._thread = threading.Thread(target=self._main, name="stream", daemon=True)

    def start(self) -> None:
        self._sums.start()
        self._thread.start()

    def wake(self) -> None:
        """There is something to do."""
        self._wakeup.set()

    def give_back(self, loan: Loan) -> None:
        """The trainer needs this row of a feeder's ring no longer. To be followed by `wake`."""
        self._ring_rows.give_back(loan)

    def settled(self) -> None:
        """The caller has its plan: from now on a refused feeder is one feeder less, not an error."""
        self._connecting = False

    def close(self, bye: m.Bye) -> None:
        self._leaving = bye
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2 * _BYE_SECONDS + 1)
        else:
            self._context.destroy(linger=0)
        self._sums.close(_SUM_SECONDS)
        if not self._thread.is_alive():
            self._wakeup.close()

    def live(self) -> list[Link]:
        return [link for link in self.links if link.state == "live"]

    def describe(self) -> str:
        """All feeders, for people."""
        return "; ".join(link.describe(time.monotonic()) for link in self.links)

    # -- the thread ---------------------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._part(self._run())
        except StreamError as error:
            self._break(error)
        except BaseException as error:
            failure = StreamError(f"{self._who}: the stream's thread failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._break(failure)
        finally:
            self._context.destroy(linger=500)

    def _break(self, error: StreamError) -> None:
        self.broken = error
        if self.window is not None:
            self.window.break_off(error)
        self._notify()

    def _run(self) -> m.Bye:
        ping_seconds, last = min(1.0, self._silent_seconds / 4), time.monotonic()
        while self._leaving is None:
            patience = _STARVING_POLL_MS if self._could_take_over() else int(ping_seconds * 500)
            ready = [polled for polled, _ in self._poller.poll(patience)]
            if self._wakeup.fd in ready:
                self._wakeup.clear()
            now = time.monotonic()
            if now - last > self._silent_seconds / 2:  # this process was stopped: no feeder is to blame
                self._resumed = now
                for link in self.links:
                    link.heard = now
            last = now
            if self._roster is not None and self._roster.changed(now):
                self._follow(self._roster.endpoints)
            for link in self.links:
                if link.lane_answered or any(link.owns(polled) for polled in ready):
                    self._attend(link)
                self._check(link, ping_seconds)
            self._sums.pump()
            self._ring_rows.pump()
            self._ask_for_weights()
            self._ask_for_rows()
        return self._leaving

    def _part(self, bye: m.Bye) -> None:
        """Say Bye and read on until it is answered, so that the feeders have surely heard it."""
        for link in self.live():
            link.post(bye)
        deadline = time.monotonic() + _BYE_SECONDS
        while self.live() and (left := deadline - time.monotonic()) > 0:
            self._poller.poll(int(left * 1000) + 1)
            for link in self.live():
                self._attend(link)

    def _follow(self, endpoints: list[str]) -> None:
        """Connect to feeders that are new, and leave those that are no longer named."""
        stay = [link for link in self.links if link.endpoint in endpoints]
        known = {link.endpoint for link in stay}
        new = [Link(e, self._context, self._poller, self._keys) for e in endpoints if e not in known]
        for link in [link for link in self.links if link not in stay]:
            log.info("%s: %s is no longer named: left", self._who, link.endpoint)
            self._again(link.leave(m.Bye("done", "this feeder is no longer named")))
        self.links[:] = [*stay, *new]  # in place: others look at the list
        self._notify()

    # -- links --------------------------------------------------------------------------------------------------------------------

    def _attend(self, link: Link) -> None:
        if link.state == "connecting":
            if not link.disconnected():
                wishes = None if self._wishes is None else self._wishes.share(len(self.links))
                link.approach(self._hello(self.plan), wishes, self._silent_seconds, self.wake)
                return
            link.abandon_lane()
            if link.locked_out is not None:
                self._refused(link, link.locked_out)
            return
        try:
            for _ in range(_READS_PER_ROUND):
                self._sums.pump()
                message = link.receive()
                if message is None:
                    break
                self._handle(link, message)
                if isinstance(message, m.Row) and message.request not in link.asked:
                    break  # a whole row: the next one must be asked for before more are read
        except ProtocolError as error:
            self.errors["malformed"] += 1
            log.error("%s: %s broke the protocol: %s", self._who, link.endpoint, error.what)
            refusal = m.Refused("malformed", m.reason(f"it broke the protocol: {error.what}"))
            self._again(link.refuse(refusal))
            return
        if link.state in ("greeting", "live") and link.disconnected():
            self._lose(link, "the connection broke")

    def _check(self, link: Link, ping_seconds: float) -> None:
        now = time.monotonic()
        link.tick(now)
        if link.state == "live":
            link.ping(now, ping_seconds)
        if link.state in ("greeting", "live") and now - link.heard > self._silent_seconds:
            self._lose(link, f"silent for {self._silent_seconds:g} s")

    def _lose(self, link: Link, why: str, bye: m.Bye | None = None) -> None:
        self.errors["feeder_lost"] += 1
        owed = link.lose(why, bye)
        log.warning("%s: lost the feeder %s: %s; %d rows asked again", self._who, link.endpoint, why, len(owed))
        self._again(owed)

    def _again(self, owed: list[Request]) -> None:
        for request in owed:
            if self.window is not None:
                self.window.again(request, counts=False, why="")
        self._notify()

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    # -- messages -----------------------------------------------------------------------------------------------------------------

    def _handle(self, link: Link, message: m.Message) -> None:
        if isinstance(message, m.Row):
            self._inband_rows.receive(link, message, self.window, self.row_bytes)
        elif isinstance(message, m.Placed):
            self._ring_rows.receive(link, message, self.window, self._corrupted)
        elif isinstance(message, m.Pong):
            link.pong = message
        elif isinstance(message, m.RowError):
            self._row_error(link, message)
        elif isinstance(message, m.Weights):
            self._weights(link, message)
        elif isinstance(message, m.Welcome):
            self._welcome(link, message)
        elif isinstance(message, m.Refused):
            self._refused(link, message)
        elif isinstance(message, m.Bye) and self._leaving is not None:
            link.close()
        elif isinstance(message, m.Bye):
            self._lose(link, f"it said goodbye ({message.code}): {message.reason}", m.Bye("done", "goodbye"))
        else:
            raise ProtocolError(f"{type(message).__name__} is not for a drafter")

    def _welcome(self, link: Link, welcome: m.Welcome) -> None:
        if link.state != "greeting":
            raise ProtocolError("WELCOME, though not greeted")
        hello = self._hello(self.plan)
        differences = unmet(hello.expects, welcome.plan)
        if hello.plan is not None:
            differences += hello.plan.differences(welcome.plan)
        if differences:
            why = m.reason(f"the plans differ (wanted = here, its own = there): {'; '.join(differences)}")
            self._refused(link, m.Refused("plan", why, "start all feeders with the same configuration"))
            return
        for other in self.live():
            if other.welcome is not None and other.welcome.feeder == welcome.feeder:
                # Not the one that greeted last: while the first is taken for gone, and greets again, the second may have come in between.
                first, second = sorted((other, link), key=self.links.index)
                both = f"{first.endpoint} and {second.endpoint} lead to the same feeder"
                if self._connecting:
                    raise StreamError(f"{self._who}: {both}", "name each feeder once in feed.endpoints")
                log.error("%s: %s; the second is not used", self._who, both)
                self._again(second.leave(m.Bye("done", both)))
                if second is link:
                    return  # the feeder took it for the first's successor: that connects again
        row_bytes = RowLayout.of(welcome.plan).nbytes
        if welcome.row_bytes != row_bytes or welcome.lane not in link.lanes or not link.ring_fits(row_bytes):
            raise ProtocolError(f"WELCOME offers {welcome.row_bytes} bytes by {welcome.lane}; {row_bytes} are due")
        if self.plan is None:
            self.plan, self.row_bytes = welcome.plan, row_bytes
        link.go_live(welcome)
        log.info("%s: connected to %s, lane %s", self._who, link.endpoint, link.describe_lane())
        if (mismatch := torch_mismatch(hello.software, welcome.software)) is not None:
            log.warning("%s: the feeder %s: %s", self._who, link.endpoint, mismatch)
        self._notify()

    def _refused(self, link: Link, refusal: m.Refused) -> None:
        if refusal.code == "stranger":
            self._lose(link, "it had forgotten this drafter")
            return
        self.errors["feeder_refused"] += 1
        verb = "" if refusal.code == "key" else " refused"
        remedy = _OLDER if refusal.code == "malformed" and link.state == "greeting" else ""
        error = StreamError(f"{self._who}: {link.endpoint}{verb}: {refusal.reason}", refusal.remedy or remedy)
        if refusal.code == "replaced" or (self._connecting and refusal.code != "full"):
            raise error
        if link.refusal is None or link.refusal.reason != refusal.reason:
            log.error("%s", error)
        self._again(link.refuse(refusal))

    def _corrupted(self, link: Link, request: Request, window: Window) -> None:
        self.checksum_errors += 1
        log.error("%s: %s arrived corrupted from %s", self._who, request.want.key, link.endpoint)
        fresh = request.asked_at > self._resumed  # a feeder may reuse a slot of a drafter that was stopped for long
        self._failed(link, request, window, "it arrived corrupted", fresh)

    def _row_error(self, link: Link, error: m.RowError) -> None:
        request = link.asked.pop(error.request, None)
        if request is None or self.window is None:
            raise ProtocolError(f"ROW_ERROR answers request {error.request}, which was not made")
        if error.retryable:
            log.warning("%s: %s could not make %s: %s", self._who, link.endpoint, request.want.key, error.reason)
            self._failed(link, request, self.window, error.reason)
        else:
            self.window.fail(request, error.reason)

    def _failed(self, link: Link, request: Request, window: Window, why: str, counts: bool = True) -> None:
        others = untried(request.want, [other for other in self.live() if other is not link], time.monotonic())
        window.again(request, counts=counts, why=why, untried=bool(others))

    def _weights(self, link: Link, message: m.Weights) -> None:
        if self.weights is None or link is not self._weights_link:
            raise ProtocolError("WEIGHTS, which were not asked for")
        weights, place = self.weights, self.weights.place(message)
        link.payload_into(place)
        self._sums.add(weights.digest, place)
        if weights.placed(place):
            self._sums.end(weights.digest, partial(self._weights_summed, weights, message))
        self._notify()

    def _weights_summed(self, weights: WeightsBuilder, last: m.Weights, checksum: int) -> None:
        weights.judge(last, checksum)
        self._notify()

    # -- asking -------------------------------------------------------------------------------------------------------------------

    def _ask_for_weights(self) -> None:
        weights, link = self.weights, self._weights_link
        if weights is None or weights.done:
            self.weights = self._weights_link = None
            return
        if link is None or link.welcome is not self._weights_welcome:  # another feeder, or another conversation
            weights.forget_requests()
            self._weights_link = link = min(self.live(), key=lambda each: len(each.asked), default=None)
            self._weights_welcome = None if link is None else link.welcome
        if link is not None:
            for request in weights.requests(_WEIGHT_REQUESTS):
                link.post(request)

    def _ask_for_rows(self) -> None:
        window = self.window
        if window is None:
            return
        now, live = time.monotonic(), self.live()
        batches: dict[str, tuple[Link, list[m.RowRequest]]] = {}
        for want, link in deal(window.waiting(LOOK_AHEAD), self._ring_rows.able(window, live), now, next(self._turns)):
            self._ask(window, want, link, batches)
        if self._could_take_over():
            for want, link in takeovers(window.under_way(), {link.endpoint: link for link in live}, now):
                if self._ring_rows.make_room(window, want, link):
                    log.debug("%s: %s is asked of %s, too: %s is late", self._who, want.key, link.endpoint, want.feeder)
                    self._ask(window, want, link, batches)
        for link, requests in batches.values():
            link.post(m.Get(tuple(requests)))

    def _ask(self, window: Window, want: Want, link: Link, batches: dict[str, tuple[Link, list[m.RowRequest]]]) -> None:
        request = window.asked(want, link.endpoint)
        batches.setdefault(link.endpoint, (link, []))[1].append(link.ask(request))

    def _could_take_over(self) -> bool:
        """Whether the trainer waits, for a row that a feeder without work might bring sooner than the one that was asked."""
        live, window = self.live(), self.window
        return window is not None and window.starving and len(live) > 1 and any(not link.asked for link in live)
