"""The supervisor, on real process trees."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from process_trees import eventually, output_of, part, python, shell, supervised

from dflash_mp.process import SAME_SIGNAL_SECONDS
from dflash_mp.supervisor import Part, Patience

FOREVER = shell("echo up; exec sleep 600")
# Ends itself at SIGTERM, like a feeder or a drafter; says when.
ORDERLY = shell("trap 'echo stopped at $(date +%s%N); exit 0' TERM; echo up; while :; do sleep 0.05; done")
STUBBORN = shell("trap 'echo asked' TERM; echo up; while :; do sleep 0.05; done")
# Starts a worker in a session of its own, as torchrun does, and waits for it whatever happens.
_LEADER = """
import signal, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", {worker!r}], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: print("leader was signalled", flush=True))
sys.exit(worker.wait())
"""
_WORKER = """
import signal, sys, time
from dflash_mp.process import die_with_parent
die_with_parent()
signal.signal(signal.SIGTERM, {on_term})
print("up", flush=True)
time.sleep(600)
"""
LEADER = python(_LEADER.format(worker=_WORKER.format(on_term="lambda *_: sys.exit(0)")))
STUBBORN_LEADER = python(_LEADER.format(worker=_WORKER.format(on_term="signal.SIG_IGN")))


def until_up(one: Part) -> str:
    """A command of a shell that waits until `one` has printed "up"."""
    return f"until grep -qx up {one.log}; do sleep 0.05; done"


def test_the_run_is_over_when_the_working_parts_are_done(tmp_path: Path) -> None:
    feeder = part(tmp_path, "feeder", ORDERLY, serves=True)
    drafters = part(tmp_path, "drafters", shell(f"{until_up(feeder)}; echo trained"))
    with supervised(feeder, drafters) as run:
        assert run.finish() == (0, "")
        assert run.processes() == []
    assert output_of(drafters) == "trained\n"
    assert "stopped at" in output_of(feeder)


def test_the_first_failure_stops_all_and_gives_exit_code_and_last_lines(tmp_path: Path) -> None:
    fail = shell("echo up; sleep 0.3; for i in $(seq 40); do echo line $i; done; exit 6")
    with supervised(part(tmp_path, "feeder", FOREVER, serves=True), part(tmp_path, "drafters", fail)) as run:
        code, output = run.finish()
        assert run.processes() == []
    assert code == 6
    assert "drafters failed (exit code 6)" in output
    assert "line 40" in output
    assert "line 1\n" not in output
    assert str(tmp_path / "drafters.log") in output


@pytest.mark.parametrize("code", [2, 3, 4, 6])
def test_what_fails_again_is_not_said_to_resume(tmp_path: Path, code: int) -> None:
    with supervised(part(tmp_path, "feeder 0", shell(f"exit {code}"))) as run:
        _, output = run.finish()
    assert f"feeder 0 failed (exit code {code}); the last lines:" in output
    assert "; once what the last lines ask for is changed, the same command goes on" in output
    assert "resumes" not in output


@pytest.mark.parametrize("end", ["exit 1", "exit 5", "kill -9 $$"])
def test_after_other_ends_the_same_command_resumes(tmp_path: Path, end: str) -> None:
    with supervised(part(tmp_path, "drafters", shell(end))) as run:
        _, output = run.finish()
    assert "; the same command resumes from the last checkpoint" in output


def test_last_lines_are_those_of_this_start(tmp_path: Path) -> None:
    (tmp_path / "drafters.log").write_text("an older error\n")
    with supervised(part(tmp_path, "drafters", shell("exit 3"))) as run:
        code, output = run.finish()
    assert code == 3
    assert "it wrote nothing" in output
    assert "an older error" in (tmp_path / "drafters.log").read_text()


def test_a_serving_part_that_was_asked_to_stop_stops_the_run_in_order(tmp_path: Path) -> None:
    drafters = part(tmp_path, "drafters", ORDERLY)
    feeder = part(tmp_path, "feeder", shell(until_up(drafters)), serves=True)
    with supervised(feeder, drafters) as run:
        code, output = run.finish()
        assert run.processes() == []
    assert code == 0
    assert "stopped in order by SIGTERM" in output
    assert "stopped at" in output_of(drafters)


def test_a_part_ended_by_a_signal_counts_as_128_more(tmp_path: Path) -> None:
    with supervised(part(tmp_path, "drafters", shell("kill -9 $$"))) as run:
        assert run.finish()[0] == 128 + 9


def test_an_unknown_command_is_named(tmp_path: Path) -> None:
    with supervised(part(tmp_path, "drafters", ("no-such-command",))) as run:
        code, output = run.finish()
    assert code != 0
    assert "cannot start no-such-command" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_work_first_and_then_what_serves_it(tmp_path: Path, number: signal.Signals) -> None:
    feeder, drafters = part(tmp_path, "feeder", ORDERLY, serves=True), part(tmp_path, "drafters", ORDERLY)
    with supervised(feeder, drafters) as run:
        run.wait_until_up()
        run.process.send_signal(number)
        code, output = run.finish()
        assert run.processes() == []
    assert (code, output) == (0, f"stopped in order by {number.name}\n")
    times = {one.name: int(output_of(one).split("stopped at ")[1]) for one in (feeder, drafters)}
    assert times["drafters"] < times["feeder"]


def test_workers_in_other_sessions_are_asked_to_stop_and_their_leader_is_not(tmp_path: Path) -> None:
    drafters = part(tmp_path, "drafters", LEADER, leads=True)
    with supervised(drafters) as run:
        run.wait_until_up()
        run.process.send_signal(signal.SIGTERM)
        code, output = run.finish()
        assert run.processes() == []
    assert (code, output) == (0, "stopped in order by SIGTERM\n")
    assert output_of(drafters) == "up\n"


def test_what_ignores_sigterm_is_killed_when_patience_ends(tmp_path: Path) -> None:
    patience = Patience(orderly=0.3, failure=0.3, serving=0.3)
    with supervised(
        part(tmp_path, "feeder", STUBBORN, serves=True),
        part(tmp_path, "drafters", STUBBORN_LEADER, leads=True),
        patience=patience,
    ) as run:
        run.wait_until_up()
        assert len(run.processes()) >= 3
        run.process.send_signal(signal.SIGTERM)
        code, output = run.finish()
        assert run.processes() == []
    assert code == 143
    assert "without a checkpoint of the last steps" in output


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    drafters = part(tmp_path, "drafters", STUBBORN)
    with supervised(drafters) as run:
        run.wait_until_up()
        run.process.send_signal(signal.SIGINT)
        eventually(lambda: "asked" in output_of(drafters), "the signal was taken")
        time.sleep(SAME_SIGNAL_SECONDS + 0.5)
        assert run.process.poll() is None
        started = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        code, _ = run.finish()
        assert run.processes() == []
    assert code == 130
    assert time.monotonic() - started < 25  # less than any patience of a run


def test_copies_of_a_signal_are_one_request(tmp_path: Path) -> None:
    all_sent = tmp_path / "all-sent"
    saves = f"until [ -e {all_sent} ]; do sleep 0.05; done; echo saved; exit 0"
    drafters = part(tmp_path, "drafters", shell(f"trap '{saves}' TERM; echo up; while :; do sleep 0.05; done"))
    with supervised(drafters) as run:
        run.wait_until_up()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            run.process.send_signal(number)
            time.sleep(0.2)
        all_sent.touch()
        code, output = run.finish()
    assert code == 0, output
    assert output_of(drafters) == "up\nsaved\n"


def test_a_signal_after_the_work_is_done_loses_nothing(tmp_path: Path) -> None:
    sent = tmp_path / "sent"
    closes = f"echo closing; until [ -e {sent} ]; do sleep 0.05; done; exit 0"
    feeder = part(
        tmp_path, "feeder", shell(f"trap '{closes}' TERM; echo up; while :; do sleep 0.05; done"), serves=True
    )
    drafters = part(tmp_path, "drafters", shell(until_up(feeder)))
    with supervised(feeder, drafters) as run:
        eventually(lambda: "closing" in output_of(feeder), "the feeder closes")
        run.process.send_signal(signal.SIGINT)
        sent.touch()
        assert run.finish() == (0, "")


def test_a_feeder_that_does_not_end_loses_nothing_that_the_drafters_saved(tmp_path: Path) -> None:
    feeder, drafters = part(tmp_path, "feeder", STUBBORN, serves=True), part(tmp_path, "drafters", ORDERLY)
    with supervised(feeder, drafters, patience=Patience(serving=0.3)) as run:
        run.wait_until_up()
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == (0, "stopped in order by SIGTERM\n")
        assert run.processes() == []


def test_a_failure_while_stopping_is_reported_as_such(tmp_path: Path) -> None:
    fails = shell("trap 'echo disk full; exit 6' TERM; echo up; while :; do sleep 0.05; done")
    with supervised(part(tmp_path, "drafters", fails)) as run:
        run.wait_until_up()
        run.process.send_signal(signal.SIGTERM)
        code, output = run.finish()
    assert code == 6
    assert "disk full" in output


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    with supervised(
        part(tmp_path, "feeder", STUBBORN, serves=True), part(tmp_path, "drafters", STUBBORN_LEADER, leads=True)
    ) as run:
        run.wait_until_up()
        assert len(run.processes()) >= 3
        run.process.kill()
        run.wait_until_gone()  # the stubborn shell's `sleep` is nobody's worker: it ends by itself, within its 0.05 s
