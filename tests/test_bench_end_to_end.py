"""`bench end-to-end`: real processes on a tiny target, and the arithmetic of its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from process_trees import SECONDS, eventually

from dflash_mp.bench.end_to_end import bench_end_to_end
from dflash_mp.bench.end_to_end_fleet import Fleet, Notes, is_warning, lanes_of
from dflash_mp.bench.end_to_end_place import Place, Processes
from dflash_mp.bench.end_to_end_report import EndToEnd, ProcessFigures, Restart
from dflash_mp.bench.training_watch import StepLine, Training, Watch
from dflash_mp.cli import main
from dflash_mp.data.store import PreparedDataset
from dflash_mp.errors import DflashError
from dflash_mp.process import mark_of, marked_processes
from dflash_mp.supervisor import Part

PACE = Training(10, 10.0, 4.0, 1.0, 1.0, 1.0, (0.0,), 0)


def result(feeders: str, drafters: str, *, feeders_alone: float, drafter_alone: float, whole: float) -> EndToEnd:
    return EndToEnd(
        case="tiny",
        processes=Processes(tuple(feeders.split(",")), tuple(drafters.split(","))),
        gpu="",
        rows_per_step=4,
        row_tokens=64,
        feeders_alone=feeders_alone,
        drafter_alone=replace(PACE, rows_per_second=drafter_alone),
        drafters_together=None,
        whole=replace(PACE, rows_per_second=whole),
        figures=(),
        restart=None,
    )


@pytest.mark.timeout(600)  # it starts eight processes that import torch, most of them one after the other
def test_a_real_feeder_and_two_ranks_are_measured_against_their_sides_and_through_the_feeders_death(
    tmp_path: Path,
) -> None:
    before = set(marked_processes(mark_of(os.getpid())))  # multiprocessing's own, of tests before this one
    said: list[str] = []
    saved: list[set[str]] = []
    found = bench_end_to_end(
        "tiny",
        Processes(("cpu",), ("cpu", "cpu")),
        seconds=5,
        alone_seconds=3,
        kill_feeder_at=3,
        say=said.append,
        save=lambda tree: saved.append(set(tree)),
        keep=tmp_path / "logs",
        side_by_side=True,
    )
    assert set(marked_processes(mark_of(os.getpid()))) <= before
    phases = [
        text for text in said if text in ("1 drafter alone", "2 drafters alone", "the feeders alone", "the whole run")
    ]
    assert phases == ["1 drafter alone", "the feeders alone", "2 drafters alone", "the whole run"]
    assert found.slower_side == min(found.feeders_alone, 2 * found.drafter_alone.rows_per_second) > 0
    assert found.ratio == pytest.approx(found.whole.rows_per_second / found.slower_side)
    assert found.whole.recompilations == 0
    ranks = [one for one in found.figures if one.name.startswith("rank")]
    assert [one.name for one in found.figures] == ["feeder 0", "rank 0", "rank 1"]
    for number, rank in enumerate(ranks):
        assert rank.lane.startswith("shared_memory (")
        assert rank.computing == pytest.approx(1 - found.whole.wait_shares[number])
    assert found.restart is not None
    assert found.restart.down > 0
    assert found.restart.rows_per_second_after > 0
    # Nothing waits for the end: a later phase that fails takes no figure with it.
    keys = ("feeders_alone", "drafter_alone", "drafters_together", "whole", "figures", "restart", "warnings")
    first = [next(number for number, tree in enumerate(saved) if key in tree) for key in keys]
    assert first == sorted(set(first))
    assert len([text for text in said if "feeder 0: the target's rows: " in text]) == 2, "of both of its starts"
    assert any("drafter 1: rank 1: connected to ipc://" in text for text in said)
    assert any("warning: rank 0: lost the feeder" in text for text in said)
    assert found.warnings == (), "that one has nothing to do with the ratio"
    assert set(found.start_seconds) == {"the feeders", "1 drafter alone", "2 drafters alone", "the whole run"}
    assert {file.name for file in (tmp_path / "logs").iterdir()} == {
        "feeder-0.log",
        "alone-1.log",
        "alone-2.log",
        "whole.log",
    }


def test_while_a_start_is_waited_for_each_process_shows_what_it_is_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_mp.bench.training_watch._SAY_SECONDS", 0.1)
    said: list[str] = []
    part = Part(
        "feeder 0",
        (sys.executable, "-c", "import time; print('compiling', flush=True); time.sleep(99)"),
        tmp_path / "f.log",
    )
    with Fleet(said.append) as fleet:
        running = fleet.start(part, dict(os.environ))
        watch = Watch(tmp_path, [running], said.append)
        watch.until(lambda: any("feeder 0: compiling" in text for text in said), 60, "it said nothing")
        with pytest.raises(
            DflashError, match=r"feeder 0 did not serve within 0 s; the last lines of feeder 0:\n +compiling"
        ):
            watch.until_serving(running, 0.2)


def test_a_log_tells_how_its_process_works_and_each_warning_once(tmp_path: Path) -> None:
    lines = [
        "2026-11-30 01:00:00 feeder 0 | the target's rows: flex attention",
        "2026-11-30 01:00:00 feeder 0 | serving tiny on ipc://x",
        "2026-11-30 01:00:01 feeder 0 | warning: the layers can't be compiled",
        "2026-11-30 01:00:02 feeder 0 | warning: the layers can't be compiled",
        "2026-11-30 01:00:03 drafter 1 | rank 1: connected to ipc://y, lane inband (switched off)",
        "warning: not a line of a log",
        "2026-11-30 01:00:03 drafter 1 | warning: x.py:1: FutureWarning: `y` is deprecated",
        "2026-11-30 01:00:04 feeder 0 | warning: half a li",
    ]
    program = f"print({chr(10).join(lines)!r}, end='')"
    with Fleet(lambda text: None) as fleet:
        running = fleet.start(Part("feeder 0", (sys.executable, "-c", program), tmp_path / "f.log"), dict(os.environ))
        running.process.wait(60)
        notes = Notes(running)
        found = notes.new()
        assert found == [
            "feeder 0: the target's rows: flex attention",
            "feeder 0: warning: the layers can't be compiled",
            "drafter 1: rank 1: connected to ipc://y, lane inband (switched off)",
        ]
        assert [is_warning(note) for note in found] == [False, True, False]
        assert notes.new() == []
        with running.part.log.open("a") as log:
            log.write("ne\n")
        assert notes.new() == ["feeder 0: warning: half a line"]
        assert lanes_of(running, 1) == {"ipc://y": "inband (switched off)"}
        assert lanes_of(running, 0) == {}


def test_feeders_whose_rows_are_not_in_shared_memory_are_not_measured() -> None:
    before = set(marked_processes(mark_of(os.getpid())))
    with pytest.raises(DflashError, match=r"don't come through shared memory: ipc:.*inband \(.*too little memory"):
        bench_end_to_end("tiny", Processes(("cpu",), ("cpu",)), overrides=["feed.memory_mib=0.15"], alone_seconds=1)
    assert set(marked_processes(mark_of(os.getpid()))) <= before


def test_one_client_of_several_feeders_has_four_rows_of_each_and_there_is_memory_for_them(tmp_path: Path) -> None:
    place = Place(tmp_path, "tiny", Processes(("cpu",) * 8, ("cpu",)))
    config = place.reader_config()
    row_mib = 64 * (5 * 96 * 4 + 16) / 2**20
    assert place.config("whole").stream.window_mib // row_mib < 32 <= config.stream.window_mib // row_mib
    assert config.feed.memory_mib >= 4 * row_mib
    assert place.config("whole").stream.window_mib == pytest.approx(6 * row_mib + 1)


def test_sigterm_ends_a_measurement_in_order(tmp_path: Path) -> None:
    words = ["bench", "end-to-end", "--feeders", "cpu", "--drafters", "cpu"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-m", "dflash_mp.cli", *words], env=environment, stderr=subprocess.PIPE)
    mark = mark_of(process.pid)
    eventually(lambda: marked_processes(mark) != [], "the feeder is started")
    process.terminate()
    process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + 15
    assert list(tmp_path.iterdir()) == []
    eventually(lambda: marked_processes(mark) == [], "the feeder is gone")


def test_the_report_is_printed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    canned = result("cuda:0", "cuda:1,cuda:2", feeders_alone=10, drafter_alone=4, whole=7.6)
    figures = ProcessFigures("rank 0", "cuda:1", 0.995, {"of the device for rows": 0.005}, 3 << 30, 0, "shared_memory")
    canned = replace(canned, figures=(figures,), restart=Restart(30.5, 31.0, 29.5, 7.5, 3, 0), drafters_together=PACE)
    canned = replace(canned, warnings=("feeder 0: warning: a row can't be recorded as a CUDA graph",))

    def measure(case: str, processes: Processes, **options: object) -> EndToEnd:
        asked.append((case, processes, options["seconds"], options["kill_feeder_at"], options["overrides"]))
        assert options["keep"] == tmp_path / "f.json.logs"
        save: Any = options["save"]
        save(canned.tree())
        return canned

    monkeypatch.setattr("dflash_mp.bench.end_to_end.bench_end_to_end", measure)
    words = "--case 8b --feeders cuda:0 --drafters cuda:1,cuda:2 --seconds 90 --kill-feeder-at 40 --set seed=1 --out"
    done = CliRunner().invoke(main, ["bench", "end-to-end", *words.split(), str(tmp_path / "f.json")])
    assert asked == [("8b", Processes(("cuda:0",), ("cuda:1", "cuda:2")), 90.0, 40.0, ("seed=1",))]
    for text in (
        "ratio to the slower side's 8.00 rows/s: 95.0%",
        "50.0% of 2 times one",
        "rank 0 on cuda:1: computing 99.5%; waits: 0.5% of the device for rows, GPU memory 3.0 GiB at most",
        "served again after 30.5 s, the longest step took 31.0 s, 29.5 s of training were lost, 3 rows asked for again",
        "feeder 0: warning: a row can't be recorded as a CUDA graph",
    ):
        assert text in done.output
    tree = json.loads((tmp_path / "f.json").read_text())
    assert (tree["ratio"], tree["whole"]["rows_per_second"]) == (pytest.approx(0.95), 7.6)


def test_steps_are_counted_from_the_end_of_the_first() -> None:
    waits = ((9.0, 9.0), (0.5, 0.0), (0.5, 2.0))
    lines = [StepLine(n, time, wait, 2) for n, time, wait in zip((4, 5, 6), (10.0, 11.0, 14.0), waits, strict=True)]
    training = Training.of(lines, rows_per_step=8)
    assert (training.steps, training.seconds, training.rows_per_second) == (2, 4.0, 4.0)
    assert (training.step_median, training.longest_step, training.wait_shares) == (2.0, 3.0, (0.25, 0.5))
    assert training.recompilations == 2


def test_the_ratio_is_to_the_slower_side_and_processes_that_share_a_gpu_are_told_what_it_allows() -> None:
    apart = result("cuda:0", "cuda:1,cuda:2", feeders_alone=10, drafter_alone=4, whole=7.6)
    assert apart.slower_side == 8
    assert apart.ratio == pytest.approx(0.95)
    assert apart.sharing_bound == pytest.approx(8)
    assert not any("share a device" in line for line in apart.lines())
    one = result("cuda:0", "cuda:0", feeders_alone=12, drafter_alone=4, whole=2.7)
    assert one.sharing_bound == pytest.approx(3)  # a row takes 1/12 s of the feeder and 1/4 s of the drafter
    assert "processes share a device, which allows 3.00 rows/s: 90.0% of that" in one.lines()
    three = result("cuda:0", "cuda:1,cuda:1,cuda:1", feeders_alone=12, drafter_alone=4, whole=4)
    assert three.sharing_bound == pytest.approx(4)
    on_cores = result("cpu", "cpu", feeders_alone=12, drafter_alone=4, whole=4)
    assert on_cores.sharing_bound == 4


def test_ranks_that_share_a_gpu_get_one_each_and_others_see_their_own_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3")
    apart = Place(tmp_path / "apart", "tiny", Processes(("cuda:0",), ("cuda:2", "cuda:1")))
    assert apart.drafter_environment()["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert apart.drafter_environment(1)["CUDA_VISIBLE_DEVICES"] == "3"
    assert "dflash_mp.bench.on_device" not in apart.drafter_part("whole", local=False).command
    shared = Place(tmp_path / "shared", "tiny", Processes(("cuda:0",), ("cuda:1", "cuda:1")))
    command = shared.drafter_part("whole", local=False).command
    assert command[command.index("dflash_mp.bench.on_device") + 1] == "5,5"
    config = shared.config("whole")
    assert (config.train.drafters, config.train.rows_per_step, config.feed.devices) == (2, 4, ["cuda:0"])
    assert shared.config("alone", 1).train.rows_per_step == 2
    larger = Place(tmp_path / "larger", "tiny", Processes(("cpu",), ("cpu", "cpu", "cpu")), ["train.rows_per_step=24"])
    assert [larger.config("alone", count).train.rows_per_step for count in (None, 1, 3)] == [24, 8, 24]
    assert shared.config("alone", 1).run_dir.name == config.run_dir.name  # feeders serve one run


def test_documents_are_of_all_lengths_and_packed_into_rows(tmp_path: Path) -> None:
    place = Place(tmp_path, "0.6b", Processes(("cpu",), ("cpu",)), ["data.row_tokens=512"])
    dataset = PreparedDataset.open(place.config("whole").data.path)
    rows = [dataset.row("train", number) for number in range(dataset.rows("train"))]
    documents = [len(set(row.document_ids.tolist()) - {0}) for row in rows]
    assert dataset.manifest.row_tokens == 512
    assert min(documents) <= 2 < 6 <= max(documents)
    assert 0.3 < sum(float(row.loss_mask.mean()) for row in rows) / len(rows) < 0.95
    assert place.config("whole").stream.window_mib == pytest.approx(6 * 512 * (5 * 1024 * 4 + 16) / 2**20 + 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--case", "huge"], "there is no case 'huge'"),
        (["--feeders", "gpu0"], "'gpu0' is no device"),
        (["--feeders", "0"], "'0' is no device"),
        (["--drafters", "cuda:0,1"], "'1' is no device"),
        (["--set", "feed.tensor_parallel=2", "--set", 'feed.devices=["cpu", "cpu"]'], "can't be shared"),
        (["--out", "missing/f.json"], "missing is no directory that can be written to"),
        (["--drafters", "cpu,cuda:0"], "partly on the CPU"),
        (["--drafters", ""], "is no device"),
        (["--kill-feeder-at", "61"], "can't be killed at 61 of 60 s"),
        (["--set", "train.lr=1"], "train.lr: unknown key"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(words: list[str], says: str) -> None:
    done = CliRunner().invoke(main, ["bench", "end-to-end", *words])
    assert done.exit_code == 2
    assert says in done.output
