"""`dflash-mp report`: what it makes of run directories in every state, and that a browser shows it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from process_trees import SECONDS

from dflash_mp.decode.evaluate import DrafterResult, Evaluation, SetResult
from dflash_mp.decode.measure import Figures
from dflash_mp.errors import DflashError
from dflash_mp.monitor.charts import Axis, Series, bar_chart, line_chart
from dflash_mp.monitor.page import page, write_report
from dflash_mp.monitor.record import read_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START = 1_700_000_000.0


def line(kind: str, step: int, **more: Any) -> str:
    figures = {"loss": 8 / (1 + step), "tau": 1 + step / 100, "accuracy_per_slot": [0.6, 0.4, 0.2], **more}
    return json.dumps({"kind": kind, "step": step, "time": START + step, **figures})


def write_run(directory: Path, steps: int = 40, tail: str = "") -> Path:
    """A run that was started twice, with warnings in both forms of log, and evaluated on two data sets."""
    (directory / "logs").mkdir(parents=True)
    (directory / "checkpoints" / "step-00000040").mkdir(parents=True)
    rates = {"tokens_per_second": 1234.0, "wait_share": 0.25, "gradient_norm": 2.0}
    paces = {"feeders_rows_per_second": 3.0, "drafters_rows_per_second": 4.0}
    lines = [line("held_out", 0), *(line("train", step, **rates, **paces) for step in range(2, steps + 1, 2))]
    lines.append(line("held_out", steps))
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n" + tail, encoding="utf-8")
    (directory / "config.yaml").write_text("run_dir: r\ntrain:\n  rows_per_step: 8\n  steps: 100\n  # </pre><script>\n")
    clock = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(START + second)) for second in (0, 5, 20)]
    (directory / "logs" / "drafters.log").write_text(
        f"{clock[0]} run | starts drafters: python\n"
        f"{clock[1]} drafter 0 | warning: lost the feeder <b>ipc://x</b>\n"
        "  a line of something else\n"
        f"{clock[2]} run | starts drafters: python\n",
        encoding="utf-8",
    )
    events = [
        {"time": "2023-11-14T22:13:25.000Z", "level": "error", "role": "feeder", "rank": 0, "message": "no memory"},
        {"time": "2023-11-14T22:13:26.000Z", "level": "info", "role": "feeder", "rank": 0, "message": "fine"},
        {"time": "yesterday", "level": "error", "role": "feeder", "rank": 0, "message": "of no time"},
    ]
    (directory / "logs" / "feeder-0.log").write_text("".join(json.dumps(e) + "\n" for e in events) + '{"torn', "utf-8")
    state = {"version": "0.1.0", "torch": "2.13.0", "step": 40, "plan": {"target": {"name": "a-target"}}}
    (directory / "checkpoints" / "step-00000040" / "state.json").write_text(json.dumps(state))
    return directory


def write_evaluation(file: Path) -> None:
    plain = Figures(5, 200, 15.0, 0, None, None, [], [])
    trained = Figures(5, 200, 20.0, 90, 2.25, 2.3, [0.7, 0.4, 0.15], [30, 30, 20, 10])
    sets = [
        SetResult(name, 0, plain, [DrafterResult("trained", trained, 1.4, [])]) for name in ("held_out", "HumanEval")
    ]
    Evaluation("a-target", "float32", "cpu", "default", {}, sets).write_json(file)


def titles(html: str) -> list[str]:
    return re.findall(r"<h3>([^<]*)</h3>", html)


def test_a_whole_run_has_every_plot_and_table(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a-run")
    write_evaluation(run / "eval" / "figures.json")
    html = page(read_run(run))
    assert titles(html) == [
        "Loss",
        "Acceptance length τ",
        "Accuracy per slot at the end",
        "Accuracy per slot over training",
        "τ by data set, decoding",
        "Throughput",
        "Waits",
        "What both sides could do",
        "Faults",
        "Gradient norm, before clipping",
    ]
    for text in (
        "step 40 of 100",
        "warnings (1)",
        "errors (1)",
        "new starts (1)",
        "HumanEval",
        "2.25",
        "1.40×",
        "no memory",
    ):
        assert text in html, text
    assert "a-target" in html
    assert html.count('class="mark"') == 7  # the second start, in the plots over steps


def test_it_needs_nothing_from_elsewhere_and_shows_text_as_text(tmp_path: Path) -> None:
    html = page(read_run(write_run(tmp_path / "a-run")))
    assert re.findall(r"https?://|url\(|@import|<script|<link rel=\"stylesheet|\ssrc=", html) == []
    assert re.findall(r'href="([^"]*)"', html) == ["data:,"]
    assert "lost the feeder &lt;b&gt;ipc://x&lt;/b&gt;" in html
    assert "&lt;/pre&gt;&lt;script&gt;" in html


@pytest.mark.parametrize(
    "tail",
    [
        '{"kind": "train", "step": 42, "ti',
        '{"kind": "train", "step": 42}\n',
        "[1]\n",
        '{"kind": "train", "step": NaN, "time": 1, "loss": 1, "tau": 1}\n',
        "\0\0\0",
    ],
)
def test_a_line_that_is_not_whole_is_left_out_and_said(tmp_path: Path, tail: str) -> None:
    record = read_run(write_run(tmp_path / "a-run", tail=tail))
    assert record.broken_lines == 1
    assert record.last_step == 40
    assert "1 broken line of metrics.jsonl left out" in page(record)


def test_steps_that_were_trained_again_count_once_with_their_later_figures(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a-run", tail=line("train", 38, loss=0.5) + "\n" + line("train", 42) + "\n")
    record = read_run(run)
    assert [figures["step"] for figures in record.train] == [*range(2, 43, 2)]
    assert record.train[-3]["loss"] == 0.5


def test_a_run_that_ended_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train:\n  steps: 10\n")
    html = page(read_run(tmp_path))
    assert "No figures yet" in html
    assert "step 0 of 10" in html


def test_figures_that_are_no_numbers_leave_a_gap_not_a_broken_plot(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "a-run", tail=line("train", 42, loss=math.nan) + "\n" + line("train", 44, loss=math.inf) + "\n"
    )
    html = page(read_run(run))
    plots = "".join(re.findall(r"<svg.*?</svg>", html))
    assert "nan" not in plots
    assert "inf" not in plots


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match="holds no run"):
        read_run(tmp_path)
    (tmp_path / "other.json").write_text('{"sets": 3}')
    with pytest.raises(DflashError, match="is no report of dflash-mp eval"):
        read_run(write_run(tmp_path / "a-run"), [tmp_path / "other.json"])
    with pytest.raises(DflashError, match="cannot write"):
        write_report(tmp_path / "a-run", tmp_path / "nowhere" / "x.html")


def test_points_lie_where_their_values_are() -> None:
    svg = line_chart("t", Axis("x"), Axis("y", zero=True), [Series("s", [(0, 0), (5, 5), (10, 10)])])
    assert svg is not None
    (points,) = re.findall(r'points="([^"]*)"', svg)
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, point.split(","))) for point in points.split())
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert x0 < x2
    assert y0 > y2
    assert ">10</text>" in svg
    assert line_chart("t", Axis("x"), Axis("y"), [Series("s", [(1.0, math.nan)])]) is None
    assert bar_chart("t", Axis("y"), [("a", [])]) is None


@pytest.mark.parametrize("values", [[3.0], [0.0, 0.0], [1e-9, 2e-9], [-5.0, 5.0], [1e12, 3e12], [0.999, 1.0]])
def test_any_range_of_values_has_an_axis_that_covers_it(values: list[float]) -> None:
    svg = line_chart("t", Axis("x"), Axis("y"), [Series("s", list(enumerate(values)), marks=True)])
    assert svg is not None
    for y in re.findall(r'cy="([^"]*)"', svg):
        assert 10 <= float(y) <= 260
    assert 2 <= svg.count('class="grid"') <= 12


def test_a_long_run_is_thinned_to_what_can_be_told_apart() -> None:
    svg = line_chart("t", Axis("x"), Axis("y"), [Series("s", [(float(i), float(i)) for i in range(100_000)])])
    assert svg is not None
    assert len(svg) < 60_000


# Appended to a copy of the page: what the browser made of each plot, for --dump-dom.
_MEASURE = """<script>
const box = one => { const r = one.getBoundingClientRect(); return [Math.round(r.width), Math.round(r.height)] };
const all = name => [...document.querySelectorAll(name)].map(box);
const found = {svg: all('svg'), lines: all('svg .line'), bars: all('svg .bar'), body: box(document.body),
  overflow: document.documentElement.scrollWidth > window.innerWidth,
  stroke: getComputedStyle(document.querySelector('svg .line')).stroke};
const out = document.createElement('pre'); out.id = 'found'; out.textContent = JSON.stringify(found); document.body.append(out);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [1400, 500])
def test_a_browser_shows_the_page_without_a_complaint_and_every_plot_has_a_size(tmp_path: Path, width: int) -> None:
    run = write_run(tmp_path / "a-run")
    write_evaluation(run / "eval.json")
    write_report(run, tmp_path / "page.html")
    measured = tmp_path / "measured.html"
    measured.write_text((tmp_path / "page.html").read_text().replace("</body>", _MEASURE))
    command = [
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += ["--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={width},1000"]
    shown = subprocess.run(
        [*command, "--dump-dom", measured.as_uri()], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "CONSOLE" not in shown.stderr, shown.stderr
    dumped = re.search(r'<pre id="found">(.*?)</pre>', shown.stdout)
    assert dumped is not None, shown.stdout[-2000:]
    found = json.loads(dumped[1])
    assert len(found["svg"]) == 10
    assert all(w > 300 and h > 140 for w, h in found["svg"]), found
    assert len(found["lines"]) >= 15
    assert all(w > 0 or h > 0 for w, h in found["lines"]), found
    assert len(found["bars"]) == 2
    assert all(w > 10 and h > 20 for w, h in found["bars"]), found
    assert not found["overflow"]
    assert found["stroke"] == "rgb(0, 114, 178)"
