"""Which steps of which ranks are profiled: `--profile steps=10..15 --profile ranks=0,2`, checked before anything starts.

Without --profile there is no request, and nothing of `dflash_mp.drafter.step_profile` runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_mp.errors import ConfigError

_EXAMPLE = "for example --profile steps=10..15, and --profile ranks=0,2 for ranks other than 0"
_STEPS = re.compile(r"(\d+)(?:\.\.(\d+))?")
_RANKS = re.compile(r"\d+(?:,\d+)*")


@dataclass(frozen=True)
class ProfileRequest:
    """Profile the optimizer steps `first` to `last`, both included and counted from 1 as the log does, on each of `ranks`."""

    first: int
    last: int
    ranks: tuple[int, ...] = (0,)

    def check(self, steps: int, ranks: int) -> None:
        """Raises `ConfigError` when the run has fewer steps or ranks than that."""
        if self.last > steps:
            raise ConfigError(
                f"--profile asks for step {self.last}, but the run ends after step {steps}",
                "name earlier steps, or raise train.steps",
            )
        if missing := [rank for rank in self.ranks if rank >= ranks]:
            raise ConfigError(
                f"--profile asks for rank {missing[0]}, but the run has {ranks} drafter{'s' if ranks > 1 else ''}, counted from 0",
                "name ranks that there are",
            )

    def check_resumed(self, step: int) -> None:
        """Raises `ConfigError` when a run that goes on after `step` has none of the steps before it."""
        if self.last <= step:
            raise ConfigError(
                f"--profile asks for steps {self.first} to {self.last}, but the run resumes after step {step}",
                f"name steps from {step + 1} on",
            )


def parse_profile(words: Sequence[str]) -> ProfileRequest | None:
    """The request in the values of --profile; None without any. Raises `ConfigError` for what is not one."""
    if not words:
        return None
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in ("steps", "ranks") or key in given:
            raise ConfigError(f"--profile {word!r} is not steps=FIRST..LAST or ranks=N,N, each once", _EXAMPLE)
        given[key] = value
    if "steps" not in given:
        raise ConfigError("--profile says no steps", _EXAMPLE)
    steps = _STEPS.fullmatch(given["steps"])
    if steps is None:
        raise ConfigError(f"--profile steps={given['steps']!r} is not FIRST..LAST", _EXAMPLE)
    first, last = int(steps[1]), int(steps[2] or steps[1])
    if not 1 <= first <= last:
        raise ConfigError(
            f"--profile steps={given['steps']} names no steps: they count from 1, the first before the last", _EXAMPLE
        )
    if "ranks" in given and not _RANKS.fullmatch(given["ranks"]):
        raise ConfigError(f"--profile ranks={given['ranks']!r} is not a list of numbers", _EXAMPLE)
    ranks = given.get("ranks", "0").split(",")
    return ProfileRequest(first, last, tuple(sorted({int(rank) for rank in ranks})))
