"""`dflash-mp bench end-to-end`: a whole run, feeders and drafters as processes of their own, against what each side manages alone.

Phases, warm-ups excluded: the feeders' rows are taken and thrown away; one drafter trains on rows out of its own memory (at the same time, if
they have GPUs of their own: neither waits for the other); so do all drafters, if there are several, which shows what adding their gradients
costs; then the whole run. Only the target's weights are made up. The ratio is the whole run's rows/s over the slower of the feeders alone and as
many times one drafter alone. Where processes share a device they can't reach that; what they could, if they shared its time without loss, is
printed, too. Takes the seconds asked for, and a start of the drafters for each phase.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import torch

from dflash_mp import run as launcher
from dflash_mp.bench.end_to_end_place import Place, Processes
from dflash_mp.bench.end_to_end_report import EndToEnd, ProcessFigures, Restart
from dflash_mp.bench.training_watch import Training, Watch, growth, read_figures, read_steps
from dflash_mp.config import RunConfig
from dflash_mp.data.row import RowKey
from dflash_mp.errors import ConfigError, DflashError
from dflash_mp.monitor.scrape import Reading, endpoints_of
from dflash_mp.process import MARK, children_of, mark_of, send_signal
from dflash_mp.stream.client import RowClient
from dflash_mp.supervisor import Part, Running

_START_SECONDS = 400.0  # for compilations
_WARM_STEPS = 3
_WARM_ROWS = 6
_GONE_SECONDS = 30.0


def bench_end_to_end(
    case: str,
    processes: Processes,
    *,
    seconds: float = 60.0,
    alone_seconds: float = 15.0,
    kill_feeder_at: float | None = None,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
    side_by_side: bool | None = None,
) -> EndToEnd:
    """Measure the whole run for `seconds`, each side alone for `alone_seconds`. Raises `DflashError` when a process fails.

    `kill_feeder_at`: so many seconds into the run feeder 0 is killed and started again; the ratio is that of the time before.
    `side_by_side`: whether the sides are measured at the same time; None: where they have GPUs of their own.
    """
    if kill_feeder_at is not None and not 0 < kill_feeder_at < seconds:
        raise ConfigError(
            f"a feeder can't be killed at {kill_feeder_at:g} of {seconds:g} s", "--kill-feeder-at below --seconds"
        )
    with tempfile.TemporaryDirectory(prefix="dflash-mp-bench-") as name, _Fleet() as fleet:
        place = Place(Path(name), case, processes, overrides)
        say("starting the feeders, which compile")
        feeders = [fleet.start(part, launcher.environment()) for part in place.feeder_parts()]
        bench = _Bench(place, fleet, feeders, say)
        apart = (
            "cpu" not in (*processes.feeders, *processes.drafters) and processes.drafters[0] not in processes.feeders
        )
        if apart if side_by_side is None else side_by_side:
            with bench.training_alone(1) as training:
                started = time.monotonic()
                feeders_alone = bench.feeders_alone(alone_seconds)
                drafter_alone = training(alone_seconds - (time.monotonic() - started))
        else:
            feeders_alone = bench.feeders_alone(alone_seconds)
            with bench.training_alone(1) as training:
                drafter_alone = training(alone_seconds)
        count, together = len(processes.drafters), None
        if count > 1:
            with bench.training_alone(count) as training:
                together = training(alone_seconds)
        whole, figures, restart = bench.whole(seconds, kill_feeder_at)
        config = place.config("whole")
    on_gpu = any(device != "cpu" for device in (*processes.feeders, *processes.drafters))
    return EndToEnd(
        case=case,
        processes=processes,
        gpu=torch.cuda.get_device_name() if on_gpu else "",
        rows_per_step=config.train.rows_per_step,
        row_tokens=config.data.row_tokens,
        feeders_alone=feeders_alone,
        drafter_alone=drafter_alone,
        drafters_together=together,
        whole=whole,
        figures=figures,
        restart=restart,
    )


class _Bench:
    """The phases, over feeders that run through all of them."""

    def __init__(self, place: Place, fleet: _Fleet, feeders: list[Running], say: Callable[[str], None]) -> None:
        self._place, self._fleet, self._feeders, self._say = place, fleet, feeders, say

    def feeders_alone(self, seconds: float) -> float:
        """Rows per second that this process takes and throws away."""
        config = self._place.config("feeders", 1)
        watch = Watch(config.run_dir, self._feeders)
        for feeder in self._feeders:
            watch.until_serving(feeder, _START_SECONDS)
        self._say("the feeders alone")
        with RowClient.of(config, 0, 1) as client:
            client.connect()
            client.schedule(RowKey("train", ordinal) for ordinal in itertools.count())
            ordinals = itertools.count()

            def take() -> None:
                client.take(RowKey("train", next(ordinals))).release()

            for _ in range(_WARM_ROWS * len(self._feeders)):
                take()
            started, rows = time.perf_counter(), 0
            while (spent := time.perf_counter() - started) < seconds:
                take()
                rows += 1
        watch.check()
        return rows / spent

    @contextmanager
    def training_alone(self, count: int) -> Iterator[Callable[[float], Training]]:
        """That many drafters on rows of their own, warm; gives what measures them from then on, for so many seconds more at least."""
        self._say(f"{count} drafter{'' if count == 1 else 's'} alone")
        name = f"alone-{count}"
        config = self._place.config(name, count)
        running = self._fleet.start(
            self._place.drafter_part(name, count, local=True), self._place.drafter_environment(count)
        )
        watch = Watch(config.run_dir, [*self._feeders, running])
        watch.until_step(_WARM_STEPS, _START_SECONDS)

        def measure(seconds: float) -> Training:
            watch.pause(seconds)
            return Training.of(read_steps(config.run_dir)[_WARM_STEPS - 1 :], config.train.rows_per_step)

        yield measure
        self._fleet.kill(running)

    def whole(
        self, seconds: float, kill_feeder_at: float | None
    ) -> tuple[Training, tuple[ProcessFigures, ...], Restart | None]:
        """The run itself."""
        self._say("the whole run")
        config, restart = self._place.config("whole"), None
        drafters = self._fleet.start(self._place.drafter_part("whole", local=False), self._place.drafter_environment())
        watch = Watch(config.run_dir, [*self._feeders, drafters])
        watch.until_step(_WARM_STEPS, _START_SECONDS)
        first = len(read_steps(config.run_dir)) - 1
        before = read_figures(endpoints_of(config))
        watch.pause(seconds if kill_feeder_at is None else kill_feeder_at)
        after = read_figures(endpoints_of(config))
        steps = read_steps(config.run_dir)
        training = Training.of(steps[first:], config.train.rows_per_step)
        figures = self._figures(before, after, training)
        if kill_feeder_at is not None:
            restart = self._restart(config, watch, training, after, seconds - kill_feeder_at)
        self._fleet.kill(drafters)
        return training, figures, restart

    def _restart(
        self,
        config: RunConfig,
        watch: Watch,
        before: Training,
        figures: Mapping[tuple[str, int], Reading],
        seconds: float,
    ) -> Restart:
        self._say("feeder 0 is killed")
        first, old, killed = len(read_steps(config.run_dir)) - 1, self._feeders[0], time.time()
        watch.forget(old)
        self._fleet.kill(old)
        self._feeders[0] = self._fleet.start(old.part, launcher.environment())
        watch.add(self._feeders[0])
        watch.until_serving(self._feeders[0], _START_SECONDS)
        serves = time.time()
        seen = len(read_steps(config.run_dir))
        watch.until_step(seen + _WARM_STEPS, _START_SECONDS)
        watch.pause(max(0.0, killed + seconds - time.time()))
        steps, later = read_steps(config.run_dir), read_figures(endpoints_of(config))
        training = Training.of(steps[first:], config.train.rows_per_step)
        again = [step for step in steps if step.time > serves][1:]  # the first one had waited
        ranks = [key for key in later if key[0] == "drafter"]
        return Restart(
            down=serves - killed,
            longest_step=training.longest_step,
            lost=training.seconds * (1 - training.rows_per_second / before.rows_per_second),
            rows_per_second_after=Training.of(again, config.train.rows_per_step).rows_per_second,
            retries=round(sum(growth(later[key], figures[key], "dflash_mp_stream_retries_total") for key in ranks)),
            recompilations=training.recompilations,
        )

    def _figures(
        self,
        before: Mapping[tuple[str, int], Reading],
        after: Mapping[tuple[str, int], Reading],
        training: Training,
    ) -> tuple[ProcessFigures, ...]:
        found = []
        for (role, index), reading in sorted(after.items(), key=lambda item: (item[0][0] != "feeder", item[0][1])):
            earlier = before[role, index]

            def share(name: str, now: Reading = reading, then: Reading = earlier, **labels: str) -> float:
                return growth(now, then, name, **labels) / (now.moment - then.moment)

            if role == "feeder":
                spent = "dflash_mp_feeder_time_seconds_total"
                computing = share(spent, state="computing")
                waits = {
                    "for drafters to ask": share(spent, state="idle"),
                    "for drafters to take": share(spent, state="blocked"),
                }
            else:
                lacked = training.wait_shares[index]
                computing = 1 - lacked
                waits = {
                    "of the device for rows": lacked,
                    "of the process for rows": share("dflash_mp_stream_waited_seconds_total"),
                }
            devices = self._place.processes.feeders if role == "feeder" else self._place.processes.drafters
            found.append(
                ProcessFigures(
                    name=f"{'feeder' if role == 'feeder' else 'rank'} {index}",
                    device=devices[index],
                    computing=computing,
                    waits=waits,
                    gpu_peak_bytes=int(reading.value("dflash_mp_gpu_memory_bytes", kind="peak") or 0),
                    compilations=round(growth(reading, earlier, "dflash_mp_compilations_total")),
                    lane=self._lane(index) if role == "drafter" else "",
                )
            )
        return tuple(found)

    def _lane(self, rank: int) -> str:
        """As feeder 0's log has it."""
        text = self._feeders[0].part.log.read_text(encoding="utf-8", errors="replace")
        found = re.findall(rf"\brank {rank} of \d+ connected, lane (.*)", text)
        if not found:
            raise DflashError(
                f"the log of feeder 0 does not say how rank {rank} gets its rows", "this is a bug: report it"
            )
        return str(found[-1])


class _Fleet:
    """Processes that end with this one; leaving the context kills them."""

    def __init__(self) -> None:
        self._running: list[Running] = []

    def start(self, part: Part, environment: Mapping[str, str]) -> Running:
        """Start it."""
        self._running.append(Running(part, {**environment, MARK: mark_of(os.getpid())}))
        return self._running[-1]

    def kill(self, running: Running) -> None:
        """SIGKILL, and wait until it and the ranks that it started are gone, and with them what they had on a GPU."""
        ranks = children_of(running.process.pid)
        if running.exit_code is None:
            send_signal(running.process.pid, signal.SIGKILL)
        running.process.wait(_GONE_SECONDS)
        deadline = time.monotonic() + _GONE_SECONDS
        while any(map(_lives, ranks)):
            if time.monotonic() > deadline:
                raise DflashError(f"processes {ranks} do not end", "they hang in the kernel; see `dmesg`")
            time.sleep(0.05)
        with suppress(ValueError):
            self._running.remove(running)

    def __enter__(self) -> _Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for running in list(self._running):
            self.kill(running)


def _lives(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code, which nobody may collect."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False
