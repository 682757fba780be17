"""Who belongs to a feeder's run is decided in one function."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_mp.bench.synthetic import RUN, synthetic_expectations, synthetic_plan
from dflash_mp.config_file import load_config
from dflash_mp.stream.handshake import INBAND, expectations, refusal
from dflash_mp.stream.messages import VERSION, Hello, Refused

PLAN = synthetic_plan()
HELLO = Hello(VERSION, "rank 0", "x", 0, 1, synthetic_expectations(PLAN), None, (INBAND,))


@pytest.mark.parametrize("plan", [None, PLAN])
def test_a_drafter_of_the_run_is_welcome(plan: object) -> None:
    assert refusal(replace(HELLO, plan=plan), PLAN, RUN) is None


@pytest.mark.parametrize(
    ("hello", "code", "says"),
    [
        (replace(HELLO, expects=replace(HELLO.expects, run="other")), "run", "belongs to the run 'other'"),
        (replace(HELLO, expects=replace(HELLO.expects, seed=1)), "plan", "seed: 1 wanted, 0 served"),
        (replace(HELLO, expects=replace(HELLO.expects, row_tokens=1)), "plan", "row_tokens: 1 wanted, 64 served"),
        (replace(HELLO, expects=replace(HELLO.expects, dataset="d")), "plan", "fingerprint: d wanted, synthetic"),
        (replace(HELLO, expects=replace(HELLO.expects, layer_ids=(1,))), "plan", "(1,) wanted, (1, 2) served"),
        (replace(HELLO, expects=replace(HELLO.expects, wire_dtype="fp8")), "plan", "fp8 wanted, auto served"),
        (
            replace(HELLO, plan=replace(PLAN, target=replace(PLAN.target, wire_dtype="fp8"))),
            "plan",
            "target.wire_dtype: 'fp8' here, 'auto' there",
        ),
        (
            replace(HELLO, plan=replace(PLAN, data=replace(PLAN.data, rows=9))),
            "plan",
            "data.rows: 9 here, 1000 there",
        ),
        (replace(HELLO, lanes=("carrier pigeon",)), "version", "carrier pigeon"),
    ],
)
def test_any_other_is_refused_with_what_differs(hello: Hello, code: str, says: str) -> None:
    refused = refusal(hello, PLAN, RUN)
    assert isinstance(refused, Refused)
    assert refused.code == code
    assert says in refused.reason


def test_expectations_come_from_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        f"run_dir: {tmp_path}/my-run\nseed: 4\ntarget: {{path: t, layer_ids: [1, 3]}}\n"
        "data: {path: d, row_tokens: 96}\ntrain: {steps: 1}\n"
    )
    stated = expectations(load_config(file).config)
    assert (stated.run, stated.seed, stated.row_tokens) == ("my-run", 4, 96)
    assert (stated.dataset, stated.layer_ids, stated.wire_dtype) == (None, (1, 3), "auto")
    assert expectations(load_config(file, ["stream.wire_dtype=fp8"]).config).wire_dtype == "fp8"
