"""A run over three hosts as docs/operations.md describes it, watched from one of them: by a real Prometheus, and by `dflash-mp top`."""

from __future__ import annotations

import shlex
from pathlib import Path

import operations_page as page
import yaml
from process_trees import SECONDS
from prometheus_server import needs_prometheus, prometheus
from test_several_machines import Place, machines

_SEVERAL, _SEEING = "Several machines", "Seeing what happens"
_START_SECONDS = 240.0  # five processes import torch, on a busy machine


def _configure(place: Place) -> None:
    """The page's options for being seen by other hosts, and steps that don't end while somebody looks."""
    file = place.directory / "run.yaml"
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    tree.update(page.configuration(_SEEING))
    tree["train"].update(steps=100_000, log_every=2)
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")


@needs_prometheus
def test_the_dashboard_and_top_show_a_run_over_three_hosts(tmp_path: Path) -> None:
    with machines(tmp_path) as places:
        for place in places.values():
            _configure(place)
        addresses = dict(pair.split("=") for pair in places["A"].environment["ADDRESSES"].split())
        for name, line in page.commands(_SEVERAL):
            if line.startswith("dflash-mp export"):
                break
            for written, real in addresses.items():
                line = line.replace(written, real)
            process = places[name].start(line)
            if not line.startswith("launchers/"):
                assert process.wait(SECONDS) == 0, places[name].said()
        a, b, c = (places[name].host for name in "ABC")
        targets = [f"{a.address}:17400", f"{a.address}:17401", f"{b.address}:17500", f"{c.address}:17501"]
        with prometheus(tmp_path, f"{c.address}:9090", targets, c.popen) as server, c.entered():
            assert server.without_data("several", _START_SECONDS) == [], places["B"].said()[-2000:]
            assert len(server.ask('up{job="dflash-mp"} == 1')) == 4
        top = shlex.split("dflash-mp top --once") + [word for target in targets for word in ("--endpoint", target)]
        shown = c.run(top, env=places["C"].environment, capture_output=True, text=True, timeout=SECONDS).stdout
        assert shown.startswith("run several · step ")
        for process, target in zip(("feeder 0", "feeder 1", "drafter 0", "drafter 1"), targets, strict=True):
            assert any(row.startswith(process) and row.rstrip().endswith(target) for row in shown.splitlines()), shown
