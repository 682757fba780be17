"""Whether a drafter and a feeder belong together.

A feeder checks a `Hello` with `refusal`; a drafter states what it knows in `Expectations`. Every refusal says what differs and on which
side to change it.
"""

from __future__ import annotations

from dflash_mp.config import RunConfig
from dflash_mp.stream.messages import Expectations, Hello, Refused, reason
from dflash_mp.stream.plan import StreamPlan

INBAND = "inband"  # payload in frames on the same socket
SHARED_MEMORY = "shared_memory"  # payload in a ring of memory that both sides have mapped
HELLO_PATIENCE = 2.0  # times silent_seconds, after which a feeder cuts off a connection without HELLO
RING_PATIENCE = 0.75 * HELLO_PATIENCE  # after which a drafter says HELLO without having got a ring


def expectations(config: RunConfig) -> Expectations:
    """What this run's configuration says of the rows that it wants."""
    layer_ids = config.target.layer_ids
    return Expectations(
        run=config.run_dir.absolute().name,
        seed=config.seed,
        row_tokens=config.data.row_tokens,
        layer_ids=None if layer_ids is None else tuple(layer_ids),
        wire_dtype=config.stream.wire_dtype,
    )


def lane_name(token: str) -> str:
    """How HELLO and WELCOME call the shared-memory lane with the ring of this token."""
    return f"{SHARED_MEMORY}/{token}"


def refusal(hello: Hello, plan: StreamPlan, run: str) -> Refused | None:
    """Why a feeder of `run` that serves `plan` must not serve this drafter; None if it may."""
    if hello.expects.run != run:
        return Refused(
            "run",
            reason(f"this feeder serves the run {run!r}, the drafter belongs to the run {hello.expects.run!r}"),
            "give both the same run_dir, or the drafter its own run's feed.endpoints",
        )
    if INBAND not in hello.lanes:
        return Refused(
            "version", f"the drafter takes rows by {', '.join(hello.lanes)}, this feeder sends them {INBAND}"
        )
    if differences := unmet(hello.expects, plan):
        return Refused(
            "plan",
            reason(f"the feeder serves other rows than the drafter's configuration says: {'; '.join(differences)}"),
            "start feeder and drafter with the same configuration; prepare the data again if data.* changed",
        )
    if hello.plan is not None and (differences := hello.plan.differences(plan)):
        return Refused(
            "plan",
            reason(
                f"the drafter is bound to other rows (drafter = here, feeder = there): {'; '.join(differences)}",
            ),
            "restore the options, dataset and target that the checkpoint was trained with, or start a new run_dir",
        )
    return None


def unmet(expects: Expectations, plan: StreamPlan) -> list[str]:
    """Each fact that `plan` doesn't have as expected, as text."""
    pairs = {
        "seed": (expects.seed, plan.data.seed),
        "data.row_tokens": (expects.row_tokens, plan.data.row_tokens),
        "dataset fingerprint": (expects.dataset, plan.data.dataset),
        "target.layer_ids": (expects.layer_ids, plan.target.layer_ids),
        "stream.wire_dtype": (expects.wire_dtype, plan.target.wire_dtype),
    }
    return [
        f"{name}: {wanted} wanted, {served} served"
        for name, (wanted, served) in pairs.items()
        if wanted is not None and wanted != served
    ]
