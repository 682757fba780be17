"""The run of `dflash_mp.bench.tiny_run`, under the name by which tests know it."""

from __future__ import annotations

from dflash_mp.bench.tiny_run import make_tiny_run

__all__ = ["make_tiny_run"]
