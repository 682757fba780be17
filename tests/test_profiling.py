"""--profile: what may be asked for, and what a request costs when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dflash_mp.cli import main
from dflash_mp.drafter import step_profile
from dflash_mp.drafter.step_profile import StepProfile, span
from dflash_mp.errors import ConfigError, DflashError
from dflash_mp.profiling import ProfileRequest, parse_profile


def test_steps_and_ranks_are_read() -> None:
    assert parse_profile([]) is None
    assert parse_profile(["steps=10..15"]) == ProfileRequest(10, 15, (0,))
    assert parse_profile(["ranks=2,0,2", "steps=7"]) == ProfileRequest(7, 7, (0, 2))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["10..15"], "'10..15' is not steps=FIRST..LAST"),
        (["step=10..15"], "is not steps=FIRST..LAST"),
        (["steps=1", "steps=2"], "each once"),
        (["ranks=0"], "says no steps"),
        (["steps=a..b"], "'a..b' is not FIRST..LAST"),
        (["steps=5..4"], "names no steps"),
        (["steps=0..4"], "names no steps"),
        (["steps=1..2", "ranks=all"], "'all' is not a list"),
        (["steps=1..2", "ranks="], "'' is not a list"),
    ],
)
def test_a_bad_request_is_refused_with_an_example(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_profile(words)
    assert says in caught.value.what
    assert "--profile steps=10..15" in caught.value.remedy


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("steps=3..9",), "asks for step 9, but the run ends after step 8"),
        (("steps=3..4", "ranks=0,2"), "asks for rank 2, but the run has 2 drafters"),
        (("stepz=3",), "is not steps=FIRST..LAST"),
    ],
)
def test_run_refuses_what_it_will_not_have_before_anything_starts(
    words: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"run_dir: {tmp_path}/run\ntarget: {{path: t}}\ndata: {{path: d}}\ntrain: {{steps: 8, drafters: 2}}\n"
    )
    done = CliRunner().invoke(main, ["run", "-c", str(file), *(w for word in words for w in ("--profile", word))])
    assert done.exit_code == 2
    assert says in done.output
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_must_have_some_of_the_steps_before_it() -> None:
    ProfileRequest(3, 6).check_resumed(5)
    with pytest.raises(ConfigError, match=r"steps 3 to 6, but the run resumes after step 6[\s\S]*from 7 on"):
        ProfileRequest(3, 6).check_resumed(6)


def test_without_a_profile_nothing_of_the_profiler_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: object, **__: object) -> None:
        raise AssertionError("the profiler was used")

    monkeypatch.setattr(torch.profiler, "record_function", touched)
    monkeypatch.setattr(torch.profiler, "profile", touched)
    assert span("forward") is span("backward")
    for profile in (
        StepProfile(None, tmp_path / "run", 0, torch.device("cpu")),
        StepProfile(ProfileRequest(1, 2, (1,)), tmp_path / "run", 0, torch.device("cpu")),
    ):
        with profile.around(1), span("forward"):
            pass
        profile.close(1)
    assert not (tmp_path / "run").exists()


def test_a_directory_that_cannot_be_made_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    with pytest.raises(DflashError, match=r"cannot make .*profile"):
        StepProfile(ProfileRequest(1, 2), tmp_path, 0, torch.device("cpu"))


def test_a_profile_that_is_cut_short_is_written_all_the_same(tmp_path: Path) -> None:
    stopped = StepProfile(ProfileRequest(2, 9), tmp_path / "stopped", 0, torch.device("cpu"))
    for step in (1, 2, 3):
        with stopped.around(step), span("forward"):
            torch.ones(3).sum()
    stopped.close(3)
    failed = StepProfile(ProfileRequest(1, 9), tmp_path / "failed", 0, torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), failed.around(1):
        raise ZeroDivisionError
    assert [file.name for file in (tmp_path / "stopped" / "profile").iterdir()] == ["rank-0-steps-2-3.trace.json.gz"]
    assert [file.name for file in (tmp_path / "failed" / "profile").iterdir()] == ["rank-0-steps-1-1.trace.json.gz"]
    assert not step_profile._recording


def test_a_profile_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile = StepProfile(ProfileRequest(1, 1), tmp_path, 0, torch.device("cpu"))
    (tmp_path / "profile").rmdir()
    with profile.around(1):
        torch.ones(3).sum()
    assert f"the profile could not be written to {tmp_path}/profile" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_there_is_a_memory_snapshot_as_well(tmp_path: Path) -> None:
    profile = StepProfile(ProfileRequest(1, 1), tmp_path, 0, torch.device("cuda", 0))
    with profile.around(1), span("forward"):
        torch.ones(1 << 20, device="cuda").sum().item()
    written = {file.name: file.stat().st_size for file in (tmp_path / "profile").iterdir()}
    assert set(written) == {"rank-0-steps-1-1.trace.json.gz", "rank-0-steps-1-1.memory.pickle"}
    assert min(written.values()) > 1000
