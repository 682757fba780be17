"""Figures of a step for tests of what reports them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from dflash_mp.drafter.metrics import Figures


def some_figures(**given: Any) -> Figures:
    """τ 2.5 and two slots, unless given otherwise."""
    defaults: dict[str, Any] = {
        "loss": 1.5,
        "weight": 1.0,
        "tau": 2.5,
        "accuracy": 0.5,
        "accuracy_per_slot": (0.75, 0.25),
        "waits": (0.0,),
    }
    rest = {field.name: False if field.type == "bool" else 0 for field in fields(Figures)}
    return Figures(**{**rest, **defaults, **given})
