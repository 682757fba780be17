"""`dflash-mp compare races`: every case of `races` on this PyTorch, bare, under the older shim, and under the shim.

Each variant runs in a process of its own, because bare PyTorch does not survive all of them. Needs PyTorch and this package's source, nothing
else, so that it runs in any environment: `python -m dflash_mp.threads.reproduce`. Takes about ten seconds per variant.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

VARIANTS = ("bare", "module-replacement", "shim")
_SECONDS = 300.0


def main(as_json: bool = False) -> None:
    """Print what happened, as a table or as JSON."""
    found = reproduce()
    print(json.dumps(found, indent=1) if as_json else "\n".join(lines(found)))


def reproduce(python: str = sys.executable) -> dict[str, Any]:
    """ "torch", "states" (what each is in this PyTorch) and "cases": name → variant → what the second thread met."""
    parts = {variant: _run(python, variant) for variant in VARIANTS}
    bare = parts["bare"]
    cases = {
        name: {variant: part["cases"].get(name, part["note"]) for variant, part in parts.items()}
        for name in bare["cases"]
    }
    return {"torch": bare["torch"], "states": bare["states"], "shim": parts["shim"]["note"], "cases": cases}


def lines(found: dict[str, Any]) -> list[str]:
    """For a terminal."""
    text = [f"PyTorch {found['torch']}", *(f"  {name}: {what}" for name, what in found["states"].items()), ""]
    for name, outcomes in found["cases"].items():
        text += [name, *(f"    {variant:18} {outcome}" for variant, outcome in outcomes.items())]
    return [*text, "", f"shim: {found['shim']}"]


def _run(python: str, variant: str) -> dict[str, Any]:
    command = [python, "-m", "dflash_mp.threads.reproduce", variant]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode != 0:
        return {"torch": "?", "states": {}, "cases": {}, "note": f"died: {done.stderr[-500:]}"}
    part: dict[str, Any] = json.loads(done.stdout)
    return part


def run_variant(variant: str) -> dict[str, Any]:
    """Run all cases in this process, which may be unusable afterwards."""
    import contextlib

    from dflash_mp.threads import fx_shim, races
    from dflash_mp.threads.module_replacement import replaced

    states, note, cases = fx_shim.probe(), "", {}
    with contextlib.ExitStack() as stack:
        try:
            if variant == "shim":
                report = stack.enter_context(fx_shim.isolated())
                note = "; ".join(f"{name} {what}" for name, what in report.states.items())
            elif variant == "module-replacement":
                stack.enter_context(replaced())
        except fx_shim.FxShimError as error:
            return {"torch": races.torch.__version__, "states": states, "cases": {}, "note": f"refused: {error.what}"}
        for case in (*races.PROTECTION, *races.CASES):
            cases[case.name] = case.outcome()
        left = races.left_behind()
        note = note or ("left behind: " + ", ".join(left) if left else "")
    return {"torch": races.torch.__version__, "states": states, "cases": cases, "note": note}


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(run_variant(sys.argv[1])))
    else:
        main()
