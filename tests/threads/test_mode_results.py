"""What is told of modes, and how their processes are listened to."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from pathlib import Path

import pytest

from dflash_mp.errors import DflashError
from dflash_mp.threads import compare as of_modes
from dflash_mp.threads.compare import IMPORTED, PROCESSES, READY, Limits, ModeResult, Worker
from dflash_mp.threads.log import DrafterLog, Step
from dflash_mp.threads.report import compare_losses, heading
from dflash_mp.threads.work import SCALES, Work, synthetic_work


def result(mode: str, *drafters: list[float]) -> ModeResult:
    """Of a mode whose drafters had these losses."""
    logs = {
        number: DrafterLog([Step(i + 1, 0.0, 0.0, loss, 0) for i, loss in enumerate(losses)])
        for number, losses in enumerate(drafters)
    }
    return ModeResult(mode, 0.0, 1.0, logs, [], {}, "")


def work_on(tmp_path: Path, *devices: str) -> Work:
    work = synthetic_work(SCALES["quick"], tmp_path / "run", drafters=1, devices=("cpu",), steps=1, vary=0.0)
    return dataclasses.replace(work, backend="eager", devices=devices)


def test_losses_are_compared_bit_by_bit_over_the_steps_in_common() -> None:
    reference = result(PROCESSES, [3.0, 2.0, 1.0])
    assert compare_losses(result("shim", [3.0, 2.0]), reference) == "same bits in 2 steps"
    told = "differ from drafter 0, step 2 on, by up to 2.5e-01 (drafter 0, step 2)"
    assert compare_losses(result("none", [3.0, 2.5]), reference) == told
    assert compare_losses(result("none", []), reference) == "no step in common"
    assert compare_losses(reference, reference) == "the reference"


def test_the_first_step_that_differs_is_told_and_where_the_largest_difference_is() -> None:
    reference = result(PROCESSES, [4.0] * 3, [4.0] * 3, [4.0] * 3)
    found = result("shim", [4.0, 4.0, 4.5], [4.25, 4.0, 4.0], [4.0, 6.0, 5.0])
    told = "differ from drafter 1, step 1 on, by up to 5.0e-01 (drafter 2, step 2)"
    assert compare_losses(found, reference) == told


def test_a_loss_that_is_no_number_is_the_largest_difference_unless_both_are() -> None:
    reference = result(PROCESSES, [4.0, 4.0, math.nan])
    told = "differ from drafter 0, step 1 on, by up to inf (drafter 0, step 2)"
    assert compare_losses(result("shim", [5.0, math.nan, math.nan]), reference) == told
    assert compare_losses(result("shim", [4.0, 4.0, math.nan]), reference) == "same bits in 3 steps"


def test_devices_that_no_process_named_are_a_cpu_or_an_unknown_gpu(tmp_path: Path) -> None:
    nothing = [ModeResult("shim", 0.0, 0.0, {}, [None], {}, "it could not begin")]
    assert "on CPU (cpu)" in heading(work_on(tmp_path, "cpu"), nothing)
    assert "on an unknown GPU (cuda:0)" in heading(work_on(tmp_path, "cuda:0"), nothing)


@pytest.mark.parametrize("said", ["NCCL version 2.27\\nimported\\nready\\n", "imported\\nready\\nhalf a line"])
def test_lines_that_come_together_are_all_heard(said: str, tmp_path: Path) -> None:
    program = f"import os\nos.write(1, b'{said}')\ninput()\n"
    worker = Worker([sys.executable, "-c", program], tmp_path, dict(os.environ))
    for line in (IMPORTED, READY):
        worker.await_line(line, time.monotonic() + 30)
    worker.kill()


def test_a_line_that_comes_in_parts_is_heard_and_half_of_one_holds_up_nothing(tmp_path: Path) -> None:
    program = "import os, time\nos.write(1, b'impor')\ntime.sleep(0.3)\nos.write(1, b'ted\\nrea')\ninput()\n"
    worker = Worker([sys.executable, "-c", program], tmp_path, dict(os.environ))
    worker.await_line(IMPORTED, time.monotonic() + 30)
    before = time.monotonic()
    worker.await_import(before + 1.0)
    with pytest.raises(DflashError, match="did not get ready in time"):
        worker.await_line(READY, before + 1.0)
    assert time.monotonic() - before < 10


def test_the_wait_for_the_next_mode_is_no_part_of_a_modes_start_and_has_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mode needs 4 of its 9 seconds; the next one's import needs 6 s more from then on, which is no failure."""
    program = (
        "import pathlib, sys, time\n"
        "_, place, imports, first = sys.argv\n"
        "time.sleep(float(imports))\nprint('imported', flush=True)\ninput()\n"
        "time.sleep(float(first))\nprint('ready', flush=True)\ninput()\n"
        'outcome = \'{"seconds": 0.0, "hung": [], "stacks": {}}\'\n'
        "pathlib.Path(place, 'outcome.json').write_text(outcome)\n"
    )
    seconds = {"none": ("0", "4"), "shim": ("10", "0")}

    def start(fleet: of_modes._Fleet) -> None:
        if not fleet.workers:
            place = fleet.directory / "process-0"
            command = [sys.executable, "-c", program, str(place), *seconds[fleet.mode]]
            fleet.workers.append(Worker(command, place, dict(os.environ)))

    monkeypatch.setattr(of_modes._Fleet, "start", start)
    work = work_on(tmp_path, "cpu")
    none, shim = of_modes.compare(work, list(seconds), tmp_path, limits=Limits(ready=9.0))
    assert (none.failure, shim.failure) == ("", "")
    assert 4.0 <= none.start_seconds < 9.0
    assert shim.start_seconds < 1.0
