"""`dflash-mp bench memory`: rows by the thousand, while the memory of feeder and drafter stays as it is.

A feeder serves an honest drafter, and beside it one that has asked for rows and stopped reading (it is really stopped, by SIGSTOP). Resident memory
of all three is looked at a hundred times; growth is that of the median of the last ten looks over the median of ten from a fifth on,
when everything has been touched once. Fails with `DflashError` when a row is wrong. A minute or two for 10,000 rows.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event

from dflash_mp.bench.feeder_child import SPAWN, CheckingDrafter, FeederChild, FeederChildOptions, resident, start_marked
from dflash_mp.bench.synthetic import synthetic_plan
from dflash_mp.errors import DflashError
from dflash_mp.process import die_with_parent
from dflash_mp.stream.plan import StreamPlan

FLAT_BYTES = 8 << 20
_LOOKS = 100


@dataclass
class MemoryReport:
    """Resident bytes at each look, by process."""

    rows: int
    seconds: float = 0.0
    feeder: list[int] = field(default_factory=list)
    drafter: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)

    @property
    def growth(self) -> dict[str, int]:
        """Bytes, by process."""
        return {name: _growth(getattr(self, name)) for name in ("feeder", "drafter", "stopped")}

    @property
    def flat(self) -> bool:
        return all(growth < FLAT_BYTES for growth in self.growth.values())

    def lines(self) -> list[str]:
        """The result in words."""
        names = {"feeder": "feeder", "drafter": "drafter", "stopped": "drafter that stopped reading"}
        return [
            f"{self.rows} rows in {self.seconds:.0f} s, each right",
            *(
                f"{name}: {getattr(self, key)[-1] / 2**20:.1f} MiB at the end, grew by {self.growth[key] / 2**20:.2f} MiB"
                for key, name in names.items()
            ),
            "flat" if self.flat else f"not flat: {FLAT_BYTES / 2**20:.0f} MiB are allowed",
        ]


def memory(rows: int = 10_000, transport: str = "tcp", shared_memory: bool = False) -> MemoryReport:
    """Take `rows` rows, in-band or by `shared_memory`, and look. Raises `DflashError`."""
    plan, report = synthetic_plan(row_tokens=128, hidden_size=64), MemoryReport(rows)
    with tempfile.TemporaryDirectory(prefix="dmp-memory-") as directory:
        endpoint = "tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{directory}/feeder.sock"
        with FeederChild(FeederChildOptions(endpoint, plan)) as feeder:
            ready = SPAWN.Event()
            other = SPAWN.Process(target=_stop_reading, args=(feeder.endpoint, plan, shared_memory, ready), daemon=True)
            start_marked(other)
            drafter = CheckingDrafter(feeder.endpoint, plan, shared_memory=shared_memory)
            try:
                if not ready.wait(120):
                    raise DflashError("the second drafter does not connect", "its error is above")
                os.kill(other.pid or 0, signal.SIGSTOP)
                begun = time.monotonic()
                for number in range(rows):
                    drafter.take()
                    if number % max(1, rows // _LOOKS) == 0:
                        report.feeder.append(feeder.resident)
                        report.drafter.append(resident(os.getpid()))
                        report.stopped.append(resident(other.pid or 0))
                report.seconds = time.monotonic() - begun
            finally:
                other.kill()
                drafter.client.close()
    return report


def _stop_reading(endpoint: str, plan: StreamPlan, shared_memory: bool, ready: Event) -> None:
    die_with_parent()
    drafter = CheckingDrafter(endpoint, plan, rank=1, shared_memory=shared_memory)
    drafter.take()
    ready.set()
    while True:
        time.sleep(0.001)
        drafter.take()


def _growth(looks: list[int]) -> int:
    tenth = max(1, len(looks) // 10)
    return int(statistics.median(looks[-tenth:]) - statistics.median(looks[2 * tenth :][:tenth] or looks))
