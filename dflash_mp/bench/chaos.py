"""`dflash-mp bench chaos`: kill anything, any number of times, and compare with a run that nothing disturbed.

A tiny run is trained once in peace. Then the same run is started again and again while SIGKILL hits a feeder, a drafter rank, torchrun or the
supervisor: victim, phase and the delay within the phase come from a seeded generator, so the plan of kills repeats (the timing of the
machine doesn't). When a run is done before all kills were made, the next begins. Each must end with the same weights and
optimizer tensors, bit for bit, with no process, socket, or temporary file left. The report says what was killed where and
what that cost. Costs a few seconds of one or two cores per kill.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from dflash_mp.bench.chaos_fleet import Fleet, Place, leftovers, read_steps
from dflash_mp.errors import DflashError
from dflash_mp.process import send_signal

VICTIMS = ("feeder", "drafter", "torchrun", "supervisor")
STEPS = 60
_WORDS = [
    "the",
    "a",
    "red",
    "green",
    "small",
    "large",
    "cat",
    "dog",
    "tree",
    "house",
    "runs",
    "sees",
    "has",
    "under",
    "over",
    "near",
]
# Or as long as the undisturbed run: the longest wait for the phase that was drawn; then whatever phase it is.
_REACH_SECONDS = 20.0
_END_SECONDS = 120.0  # the longest time without a line from the drafters
_TICK_SECONDS = 0.004
# How long after a phase began the kill may come, in seconds. Starting is mostly imports.
_SPREAD = {
    "starting": 3.0,
    "connecting": 0.5,
    "first pass": 0.3,
    "training": 1.0,
    "held-out": 0.02,
    "checkpointing": 0.02,
}
_SPREAD |= {"serving": 1.5}


@dataclass(frozen=True)
class Kill:
    """A SIGKILL: what it hit, in which phase, after which logged step of which run, `layout` as in `chaos_fleet`."""

    victim: str
    phase: str
    layout: str
    run: int
    step: int
    seconds: float


@dataclass
class ChaosReport:
    """What was done and found. `ok` when nothing differs and nothing was left."""

    seed: int
    steps: int
    kills: list[Kill] = field(default_factory=list)
    runs: int = 0
    drafter_starts: int = 0
    feeder_starts: int = 0
    steps_again: int = 0
    undisturbed_seconds: float = 0.0
    disturbed_seconds: float = 0.0
    compared_tensors: int = 0
    differing: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.differing or self.orphans or self.left or self.unexpected)

    @property
    def seconds_lost(self) -> float:
        return self.disturbed_seconds - self.runs * self.undisturbed_seconds

    def places(self) -> Counter[tuple[str, str]]:
        """Kills by (victim, phase)."""
        return Counter((kill.victim, kill.phase) for kill in self.kills)

    def write_json(self, file: Path) -> None:
        by_place = {f"{victim}, {phase}": count for (victim, phase), count in sorted(self.places().items())}
        facts = {**asdict(self), "ok": self.ok, "seconds_lost": self.seconds_lost, "kills_by_place": by_place}
        file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def chaos(
    kills: int, seed: int, out: Path, seconds: float | None, say: Callable[[str], None] = lambda text: None
) -> ChaosReport:
    """Make `kills` kills, or as many as fit into `seconds` after the undisturbed run, below `out`; then finish and compare. Raises `DflashError`."""
    out = out.absolute()
    if out.exists() and any(out.iterdir()):
        raise DflashError(f"{out} is not empty", "give another directory with --out")
    out.mkdir(parents=True, exist_ok=True)
    report, draw = ChaosReport(seed, STEPS), random.Random(seed)
    file = _write_run(out, seed)
    shared_memory = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="dmp-") as short:  # a socket's path may not be long
        sockets, temporary = Path(short, "s"), Path(short, "t")
        temporary.mkdir()

        def place(name: str) -> Place:
            return Place(file, out / name, sockets, temporary, (f"seed={seed}",))

        say("undisturbed run")
        report.undisturbed_seconds = _undisturbed(place("undisturbed"))
        ends = None if seconds is None else time.monotonic() + seconds
        while report.runs == 0 or (len(report.kills) < kills and not _over(ends)):
            report.runs += 1
            begun = time.monotonic()
            run_dir = out / f"run-{report.runs}"
            _disturbed(Fleet(place(run_dir.name)), report, draw, kills, ends, say)
            report.disturbed_seconds += time.monotonic() - begun
            compare(out / "undisturbed", run_dir, report)
            lines = [step for step, kind in read_steps(run_dir) if kind == "train"]
            report.steps_again += len(lines) - len(set(lines))
        report.left = leftovers([sockets, temporary], shared_memory)
    report.write_json(out / "chaos.json")
    return report


def _undisturbed(place: Place) -> float:
    fleet, begun = Fleet(place), time.monotonic()
    try:
        fleet.start("run")
        if code := _await_end(fleet):
            raise DflashError(f"even undisturbed the run ends with exit code {code}:\n{fleet.last_lines()}")
    finally:
        fleet.kill_all()
    return time.monotonic() - begun


def _disturbed(
    fleet: Fleet,
    report: ChaosReport,
    draw: random.Random,
    kills: int,
    ends: float | None,
    say: Callable[[str], None],
) -> None:
    """One run to its end: starts and kills until it is done or enough was killed, then a start that nothing disturbs."""
    begun = time.monotonic()
    try:
        while len(report.kills) < kills and not _over(ends):
            layout = "run" if draw.random() < 0.35 else "hand"
            if layout == "hand":
                fleet.keep_feeders()
            fleet.start(layout)
            made = _one_start(fleet, layout, report, draw, kills, ends, begun, say)
            code = _await_end(fleet)
            report.orphans += fleet.orphans()
            if code == 0:
                break
            if not made:
                report.unexpected.append(f"a start that nothing killed ended with {code}:\n{fleet.last_lines()}")
                break
        fleet.start("run")  # also takes away what a killed `run` had to leave: its socket
        if code := _await_end(fleet):
            report.unexpected.append(f"the last, undisturbed start ended with {code}:\n{fleet.last_lines()}")
        report.orphans += fleet.orphans()
        fleet.stop_feeders()
    finally:
        fleet.kill_all()
        report.drafter_starts += fleet.starts
        report.feeder_starts += fleet.feeder_starts


def _one_start(
    fleet: Fleet,
    layout: str,
    report: ChaosReport,
    draw: random.Random,
    kills: int,
    ends: float | None,
    begun: float,
    say: Callable[[str], None],
) -> int:
    """Kill until the drafters are hit, and sometimes once more while the rest is stopping. The number of kills that can end the start."""
    fatal, hit = 0, set[int]()
    while len(report.kills) < kills and fleet.exit_code is None and not _over(ends):
        victim = draw.choice([one for one in VICTIMS if layout == "run" or one != "supervisor"])
        phases = ("starting", "serving") if victim == "feeder" else tuple(_SPREAD)[:-1]
        aim, share = draw.choice(phases), draw.random()
        pid = _reach(fleet, victim, aim, share, 0.0 if fatal else max(_REACH_SECONDS, report.undisturbed_seconds))
        if pid is None or pid in hit:  # gone meanwhile, or dying already
            if fatal:
                return fatal
            continue
        hit.add(pid)
        by_hand = victim == "feeder" and layout == "hand"
        phase = "stopping" if fatal and not by_hand else fleet.phase(victim, pid)
        report.kills.append(Kill(victim, phase, layout, report.runs, fleet.step(), time.monotonic() - begun))
        send_signal(pid, 9)
        say(f"kill {len(report.kills)}: {victim}, {phase} ({layout}, run {report.runs}, step {report.kills[-1].step})")
        if by_hand:
            continue
        fatal += 1
        if draw.random() < 0.7:
            break
    return fatal


def _reach(fleet: Fleet, victim: str, aim: str, share: float, patience: float) -> int | None:
    """Wait until a `victim` is in the phase `aim` and a `share` of its spread has passed; its pid, None when there is none any more."""
    deadline = time.monotonic() + patience
    while fleet.exit_code is None:
        if fleet.feeders:
            fleet.keep_feeders()
        pids = fleet.pids(victim)
        late = time.monotonic() > deadline
        for pid in pids:
            if late or fleet.phase(victim, pid) == aim:
                time.sleep(0.0 if late else share * _SPREAD[aim])
                return pid if pid in fleet.pids(victim) else None
        if late:
            return None
        time.sleep(_TICK_SECONDS)
    return None


def _await_end(fleet: Fleet) -> int:
    """The exit code of the drafters' start, which must not go for `_END_SECONDS` without a word."""
    said, deadline = -1, 0.0
    while (code := fleet.exit_code) is None:
        if (now_said := fleet.said()) != said:
            said, deadline = now_said, time.monotonic() + _END_SECONDS
        if time.monotonic() > deadline:
            raise DflashError(f"the drafters neither end nor go on for {_END_SECONDS:.0f} s:\n{fleet.last_lines()}")
        if fleet.feeders:
            fleet.keep_feeders()
        time.sleep(0.02)
    return code


def compare(undisturbed: Path, run_dir: Path, report: ChaosReport) -> None:
    """Add to `report` which tensors of the last checkpoints differ in a bit, or that one is missing."""
    last = Path("checkpoints", f"step-{STEPS:08d}")
    for name in ("weights.safetensors", "optimizer.safetensors"):
        if not (run_dir / last / name).exists():
            report.differing.append(f"{run_dir / last / name} is missing")
            continue
        ours, theirs = load_file(undisturbed / last / name), load_file(run_dir / last / name)
        keys = sorted(ours.keys() | theirs.keys())
        report.compared_tensors += len(keys)
        for key in keys:
            if key not in ours or key not in theirs or not _same_bits(ours[key], theirs[key]):
                report.differing.append(f"{run_dir.name}: {name}: {key}")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_form = a.shape == b.shape and a.dtype == b.dtype
    return same_form and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def _over(ends: float | None) -> bool:
    return ends is not None and time.monotonic() > ends


def _write_run(out: Path, seed: int) -> Path:
    """A tiny target, made-up conversations, their prepared data and a configuration: two ranks, frequent checkpoints and evaluations."""
    from dflash_mp.bench.tiny import write_tiny_target
    from dflash_mp.config import load_config
    from dflash_mp.data.prepare import prepare
    from dflash_mp.target.tokenizer import load_tokenizer

    draw = random.Random(seed)
    pairs = (
        {key: " ".join(draw.choices(_WORDS, k=draw.randint(4, 12))) for key in ("prompt", "response")}
        for _ in range(200)
    )
    (out / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    write_tiny_target(out / "target")
    tree = {
        "run_dir": str(out / "run"),
        "seed": seed,
        "target": {"path": str(out / "target"), "device": "cpu", "taps": 2},
        "data": {
            "path": str(out / "data"),
            "sources": [{"path": str(out / "pairs.jsonl")}],
            "row_tokens": 256,
            "held_out": 0.2,
            "min_supervised_tokens": 8,
        },
        "feed": {"threads": 1},
        "drafter": {"layers": 1, "block_size": 4},
        "train": {
            "device": "cpu",
            "threads": 1,
            "drafters": 2,
            "steps": STEPS,
            "rows_per_step": 4,
            "anchors_per_row": 8,
            "log_every": 1,
            "checkpoint_every": 5,
            "held_out_every": 10,
            "held_out_rows": 8,
        },
    }
    file = out / "run.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    config = load_config(file).config
    prepare(config.data, load_tokenizer(config.target), seed=config.seed)
    return file
