"""`dflash-mp bench capture --tensor-parallel N`: rows of a target that N devices share against those of one device, in turn.

The leader holds the whole target, too, and computes the same rows with it: the features must agree as the self-check demands. Run as a module,
this file is one of the other processes.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from functools import partial

import torch

from dflash_mp import logs
from dflash_mp.bench.capture import bench_row, case_target
from dflash_mp.bench.timing import timed
from dflash_mp.config import TargetConfig
from dflash_mp.data.row import TokenRow
from dflash_mp.errors import DflashError
from dflash_mp.process import die_with_parent
from dflash_mp.target.agreement import TOLERANCE, vector_error
from dflash_mp.target.capture import Capture
from dflash_mp.target.load import Target, load_target
from dflash_mp.target.split import Share, split
from dflash_mp.target.split_group import Follower, SplitGroup

_ROWS = 4


@dataclass(frozen=True)
class SplitWork:
    """What each process must know: the target (a path, or a case with random weights), and the rows."""

    target: str | None
    case: str | None
    dtype: str
    tokens: int
    documents: int
    compiled: bool | None
    threads: int | None = None  # of a CPU, for each process

    def load(self, device: torch.device) -> Target:
        if self.case is not None:
            return case_target(self.case, str(device), self.dtype)
        named = {"path": self.target, "device": str(device), "dtype": self.dtype}
        return load_target(TargetConfig.model_validate(named))

    def row(self, target: Target, seed: int) -> TokenRow:
        return bench_row(self.tokens, self.documents, target.info.vocab_size, seed)

    def share(self, share: Share) -> Capture:
        """A capture with this process's share of the target, which has proved itself."""
        target = split(self.load(share.device), share)
        capture = Capture(target, row_tokens=self.tokens, compiled=self.compiled)
        capture.self_check(self.row(target, 0))
        return capture


@dataclass(frozen=True)
class SplitBench:
    """Median seconds per row, and the worst `vector_error` between both ways."""

    ways: int
    one_seconds: float
    split_seconds: float
    error: float
    tolerance: float
    how: str

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    def lines(self) -> list[str]:
        return [
            f"one device       {self.one_seconds * 1e3:9.1f} ms/row",
            f"{self.ways} devices        {self.split_seconds * 1e3:9.1f} ms/row: {self.one_seconds / self.split_seconds:.2f}x as fast; {self.how}",
            f"features differ by {self.error:.2g} of a token's vector (allowed {self.tolerance:g}): {'ok' if self.ok else 'WRONG'}",
        ]


def bench_split(work: SplitWork, devices: list[torch.device], rounds: int) -> SplitBench:
    """Compare some rows, then measure `rounds` alternating pairs. Raises `TargetError` if the target can't be split."""
    device = devices[0]
    whole_target = work.load(device)
    rows = [work.row(whole_target, seed) for seed in range(_ROWS)]
    whole = Capture(whole_target, row_tokens=work.tokens, compiled=work.compiled)
    whole.self_check(rows[0])
    with SplitGroup("dflash_mp.bench.capture_split", devices, asdict(work)) as group:
        shared = work.share(group.share)
        group.lead(shared)
        shape = (work.tokens, whole_target.info.feature_width)
        one, several = (whole_target.embedding.new_empty(shape) for _ in range(2))
        error = 0.0
        for row in rows:
            whole.capture(row, one)
            shared.capture(row, several)
            error = max(error, vector_error(several, one))
        times: dict[str, list[float]] = {"one": [], "several": []}
        for turn in range(rounds):
            row = rows[turn % _ROWS]
            times["one"].append(timed(partial(whole.capture, row, one), device))
            times["several"].append(timed(partial(shared.capture, row, several), device))
        how = shared.forward.describe()
    alone, shared_out = (statistics.median(taken) for taken in times.values())
    return SplitBench(len(devices), alone, shared_out, error, TOLERANCE[one.dtype], how)


def main() -> None:
    """Follow the leader. Ends with 0 when it has done."""
    die_with_parent()
    follower = Follower(sys.stdin.buffer)
    logs.start(logs.Speaker("capture, process", follower.share.rank), logs.Settings.of(os.environ))
    try:
        follower.join()
        work = SplitWork(**follower.facts)
        if work.threads is not None:
            torch.set_num_threads(work.threads)
        follower.follow(work.share(follower.share))
    except DflashError as error:
        logging.getLogger("dflash_mp.bench").error("%s", error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
