"""`dflash-mp bench end-to-end`: a whole run, feeders and drafters as processes of their own, against what each side manages alone.

Phases, warm-ups excluded: the feeders' rows are taken and thrown away; one drafter trains on rows out of its own memory (at the same time, if
they have GPUs of their own: neither waits for the other); so do all drafters, if there are several, which shows what adding their gradients
costs; then the whole run. Only the target's weights are made up. The ratio is the whole run's rows/s over the slower of the feeders alone and as
many times one drafter alone. Where processes share a device they can't reach that; what they could, if they shared its time without loss, is
printed, too. What a phase found is said and saved at its end, and what the processes' logs note, as it comes. Takes the seconds asked for, and a
start of the drafters for each phase.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dflash_mp import run as launcher
from dflash_mp.bench.end_to_end_fleet import Fleet, lanes_of
from dflash_mp.bench.end_to_end_place import Place, Processes
from dflash_mp.bench.end_to_end_report import EndToEnd, ProcessFigures, Progress, Restart, described
from dflash_mp.bench.training_watch import Training, Watch, growth, read_figures, read_steps
from dflash_mp.config import RunConfig
from dflash_mp.data.row import RowKey
from dflash_mp.errors import ConfigError, DflashError
from dflash_mp.monitor.scrape import Reading, endpoints_of
from dflash_mp.stream.client import RowClient
from dflash_mp.stream.handshake import SHARED_MEMORY
from dflash_mp.supervisor import Part, Running

START_SECONDS = 240.0  # for compilations
_WARM_STEPS = 3
_WARM_ROWS = 6
_CONNECT_SECONDS = 60.0


def bench_end_to_end(
    case: str,
    processes: Processes,
    *,
    seconds: float = 60.0,
    alone_seconds: float = 15.0,
    kill_feeder_at: float | None = None,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
    save: Callable[[dict[str, Any]], None] = lambda tree: None,
    keep: Path | None = None,
    start_seconds: float = START_SECONDS,
    side_by_side: bool | None = None,
) -> EndToEnd:
    """Measure the whole run for `seconds`, each side alone for `alone_seconds`. Raises `DflashError` when a process fails, or takes
    longer than `start_seconds` to start.

    `kill_feeder_at`: so many seconds into the run feeder 0 is killed and started again; the ratio is that of the time before.
    `save` gets what is known after each phase, for JSON. `keep`: a directory for the logs of all processes; None: they are deleted.
    `side_by_side`: whether the sides are measured at the same time; None: where they have GPUs of their own.
    """
    if kill_feeder_at is not None and not 0 < kill_feeder_at < seconds:
        raise ConfigError(
            f"a feeder can't be killed at {kill_feeder_at:g} of {seconds:g} s", "--kill-feeder-at below --seconds"
        )
    progress = Progress(case, processes, say, save)
    with tempfile.TemporaryDirectory(prefix="dflash-mp-bench-") as name, Fleet(say) as fleet:
        place = Place(Path(name), case, processes, overrides, keep)
        bench = _Bench(place, fleet, progress, start_seconds)
        bench.start_feeders()
        apart = (
            "cpu" not in (*processes.feeders, *processes.drafters) and processes.drafters[0] not in processes.feeders
        )
        feeders_alone, drafter_alone = bench.sides(alone_seconds, apart if side_by_side is None else side_by_side)
        count, together = len(processes.drafters), None
        if count > 1:
            with bench.training_alone(count) as training:
                together = training(alone_seconds)
        whole, figures, restart = bench.whole(seconds, kill_feeder_at)
        config = place.config("whole")
    on_gpu = any(device != "cpu" for device in (*processes.feeders, *processes.drafters))
    result = EndToEnd(
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
        start_seconds=progress.start_seconds,
        warnings=bench.warnings,
    )
    save(result.tree())
    return result


class _Bench:
    """The phases, over feeders that run through all of them."""

    def __init__(self, place: Place, fleet: Fleet, progress: Progress, start_seconds: float) -> None:
        self._place, self._fleet, self._progress, self._start_seconds = place, fleet, progress, start_seconds
        self._feeders: list[Running] = []
        self.warnings: tuple[str, ...] = ()  # of the processes, up to the end of what the ratio is about

    def start_feeders(self) -> None:
        """All of them, which compile at the same time; nothing is measured beside that."""
        self._progress.say("starting the feeders, which compile")
        started = time.monotonic()
        self._feeders = [self._fleet.start(part, launcher.environment()) for part in self._place.feeder_parts()]
        watch = self._watch(self._place.config("feeders", 1))
        for feeder in self._feeders:
            watch.until_serving(feeder, self._start_seconds)
        self._progress.started("the feeders", time.monotonic() - started)
        self._fleet.tell()

    def sides(self, seconds: float, side_by_side: bool) -> tuple[float, Training]:
        """Rows per second of the feeders alone, and one drafter alone."""
        if not side_by_side:
            feeders_alone = self.feeders_alone(seconds)
            with self.training_alone(1) as training:
                return feeders_alone, training(seconds)
        with self.training_alone(1) as training:
            started = time.monotonic()
            return self.feeders_alone(seconds), training(seconds - (time.monotonic() - started))

    def feeders_alone(self, seconds: float) -> float:
        """Rows per second that this process takes and throws away."""
        config = self._place.reader_config()
        watch = self._watch(config)
        self._progress.say("the feeders alone")
        with RowClient.of(config, 0, 1) as client:
            client.connect()
            self._check_lanes(client, watch)
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
        self._progress.found("feeders_alone", rows / spent, f"feeders alone {rows / spent:.2f} rows/s")
        self._fleet.tell()
        return rows / spent

    @contextmanager
    def training_alone(self, count: int) -> Iterator[Callable[[float], Training]]:
        """That many drafters on rows of their own, warm; gives what measures them from then on, for so many seconds more at least."""
        what = f"{count} drafter{'' if count == 1 else 's'} alone"
        config = self._place.config(f"alone-{count}", count)
        part = self._place.drafter_part(f"alone-{count}", count, local=True)
        running, watch = self._start_drafters(what, config, part, self._place.drafter_environment(count))

        def measure(seconds: float) -> Training:
            watch.pause(seconds)
            training = Training.of(read_steps(config.run_dir)[_WARM_STEPS - 1 :], config.train.rows_per_step)
            name = "drafter_alone" if count == 1 else "drafters_together"
            self._progress.found(name, training, f"{what} {described(training)}")
            return training

        yield measure
        self._fleet.tell()
        self._fleet.kill(running)

    def whole(
        self, seconds: float, kill_feeder_at: float | None
    ) -> tuple[Training, tuple[ProcessFigures, ...], Restart | None]:
        """The run itself."""
        config, restart = self._place.config("whole"), None
        part = self._place.drafter_part("whole", local=False)
        drafters, watch = self._start_drafters("the whole run", config, part, self._place.drafter_environment())
        first = len(read_steps(config.run_dir)) - 1
        before = read_figures(endpoints_of(config))
        watch.pause(seconds if kill_feeder_at is None else kill_feeder_at)
        after = read_figures(endpoints_of(config))
        steps = read_steps(config.run_dir)
        training = Training.of(steps[first:], config.train.rows_per_step)
        self._progress.found("whole", training, f"the whole run {described(training)}")
        figures = self._figures(before, after, training, drafters)
        self._progress.found("figures", figures, "\n".join(f"  {one.line()}" for one in figures))
        self._fleet.tell()
        self.warnings = tuple(self._fleet.warnings)
        if kill_feeder_at is not None:
            restart = self._restart(config, watch, training, after, seconds - kill_feeder_at)
            self._progress.found("restart", restart, restart.line())
        self._fleet.tell()
        self._fleet.kill(drafters)
        return training, figures, restart

    def _watch(self, config: RunConfig, *more: Running) -> Watch:
        return Watch(config.run_dir, [*self._feeders, *more], self._progress.say)

    def _start_drafters(
        self, what: str, config: RunConfig, part: Part, environment: Mapping[str, str]
    ) -> tuple[Running, Watch]:
        """Started and warm, with what watches them and the feeders."""
        self._progress.say(what)
        started = time.monotonic()
        running = self._fleet.start(part, environment)
        watch = self._watch(config, running)
        watch.until_step(_WARM_STEPS, self._start_seconds)
        self._progress.started(what, time.monotonic() - started)
        self._fleet.tell()
        return running, watch

    def _check_lanes(self, client: RowClient, watch: Watch) -> None:
        """Wait until all feeders are connected. Raises `DflashError` if one doesn't share its memory: slow rows make a good ratio."""
        watch.until(
            lambda: len(client.lanes) == len(self._feeders), _CONNECT_SECONDS, "not all feeders could be connected to"
        )
        lanes = client.described_lanes
        wrong = [f"{each}: {lanes[each]}" for each, lane in client.lanes.items() if lane != SHARED_MEMORY]
        if wrong:
            raise DflashError(
                f"the feeders' rows don't come through shared memory: {'; '.join(wrong)}",
                "make room for them in /dev/shm and feed.memory_mib, or measure smaller rows (--set data.row_tokens=…)",
            )

    def _restart(
        self,
        config: RunConfig,
        watch: Watch,
        before: Training,
        figures: Mapping[tuple[str, int], Reading],
        seconds: float,
    ) -> Restart:
        self._progress.say("feeder 0 is killed")
        first, old, killed = len(read_steps(config.run_dir)) - 1, self._feeders[0], time.time()
        watch.forget(old)
        self._fleet.tell()
        self._fleet.kill(old)
        self._feeders[0] = self._fleet.start(old.part, launcher.environment())
        watch.add(self._feeders[0])
        watch.until_serving(self._feeders[0], self._start_seconds)
        serves = time.time()
        seen = len(read_steps(config.run_dir))
        watch.until_step(seen + _WARM_STEPS, self._start_seconds)
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
        drafters: Running,
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
                    lane=self._lane(drafters, index) if role == "drafter" else "",
                )
            )
        return tuple(found)

    def _lane(self, drafters: Running, rank: int) -> str:
        """As the rank's log has it; by feeder, where they differ."""
        lanes = lanes_of(drafters, rank)
        if not lanes:
            raise DflashError(f"the log of rank {rank} does not say how it gets its rows", "this is a bug: report it")
        if len(set(lanes.values())) == 1:
            return next(iter(lanes.values()))
        return "; ".join(f"{lane} of {endpoint}" for endpoint, lane in sorted(lanes.items()))
