"""What processes say: who, when, what, on one line; as JSON for machines; never a credential."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from dflash_mp import logs
from dflash_mp.logs import Settings, Speaker
from dflash_mp.options import log_options, log_settings
from dflash_mp.run import environment
from dflash_mp.run_view import PlainView

JSON = Settings("json", "debug")
log = logging.getLogger("dflash_mp.some_module")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("dflash_mp")
    handlers, levels, hook = list(root.handlers), (root.level, own.level), sys.excepthook
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])
    sys.excepthook = hook
    logging.captureWarnings(False)


def said(speaker: Speaker, settings: Settings, *calls: tuple[object, ...]) -> list[str]:
    """The lines that `log.log(*call)` makes of each call."""
    out = io.StringIO()
    logs.start(speaker, settings, out)
    for level, message, *more in calls:
        log.log(level, message, *more)  # type: ignore[arg-type]
    return out.getvalue().splitlines()


def test_a_line_for_people_says_when_and_who() -> None:
    (info, warning) = said(
        Speaker("feeder", 3), Settings(), (logging.INFO, "serving %s", "x"), (logging.WARNING, "late")
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d feeder 3 \| serving x", info)
    assert warning.endswith("feeder 3 | warning: late")
    assert logs.is_line(info)
    assert not logs.is_line("Traceback (most recent call last):")


def test_an_event_is_one_line_whatever_its_text() -> None:
    (line,) = said(Speaker("run"), Settings(), (logging.ERROR, "what\n  → remedy\n"))
    assert line.endswith("run | error: what → remedy")


def test_a_json_line_has_the_same_keys_first_and_then_the_events_own() -> None:
    out = io.StringIO()
    logs.start(Speaker("drafter", 0), JSON, out)
    log.info("step 3", extra=logs.facts("step", step=3, loss=float("nan"), slots=(0.5, float("inf")), level="mine"))
    log.info("plain")
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert list(first) == ["time", "level", "role", "rank", "event", "message", "step", "loss", "slots"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert (first["level"], first["role"], first["rank"], first["event"]) == ("info", "drafter", 0, "step")
    assert (first["step"], first["loss"], first["slots"]) == (3, None, [0.5, None])
    assert list(second) == ["time", "level", "role", "rank", "message"]
    assert logs.is_line(out.getvalue().splitlines()[0])


@pytest.mark.parametrize("settings", [Settings(), JSON], ids=["text", "json"])
def test_a_traceback_follows_its_line(settings: Settings) -> None:
    out = io.StringIO()
    logs.start(Speaker("feeder", 0), settings, out)
    try:
        raise ValueError("inside")
    except ValueError:
        log.exception("row 7 could not be made")
    first, *more = out.getvalue().splitlines()
    if settings.format == "json":
        assert "ValueError: inside" in json.loads(first)["traceback"]
        assert more == []
    else:
        assert first.endswith("error: row 7 could not be made")
        assert more[-1] == "    ValueError: inside"


@pytest.mark.parametrize(
    ("level", "shown"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)], ids=lambda value: str(value)
)
def test_the_level_is_the_packages_and_libraries_say_warnings_only(level: str, shown: int) -> None:
    out = io.StringIO()
    logs.start(Speaker("run"), Settings("text", level), out)
    for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        log.log(number, "own")
        logging.getLogger("a_library").log(number, "theirs")
    lines = out.getvalue().splitlines()
    assert sum("own" in line for line in lines) == shown
    assert sum("theirs" in line for line in lines) == min(shown, 2)


def test_what_libraries_and_python_warn_of_looks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    library = logging.getLogger("a_library_with_a_handler")
    theirs = logging.StreamHandler(io.StringIO())
    library.addHandler(theirs)
    library.propagate = False
    out = io.StringIO()
    logs.start(Speaker("feeder", 1), JSON, out)
    library.warning("slow tokenizer")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("deprecated", stacklevel=1)
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["level"], first["role"], first["message"]) == ("warning", "feeder", "slow tokenizer")
    assert "UserWarning: deprecated" in second["message"]
    assert theirs.stream.getvalue() == ""


def test_a_bug_is_one_object_when_the_log_is_json() -> None:
    out = io.StringIO()
    logs.start(Speaker("drafter", 2), JSON, out)
    try:
        raise KeyError("x")
    except KeyError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    tree = json.loads(out.getvalue())
    assert (tree["level"], tree["message"]) == ("critical", "KeyError: 'x'")
    assert "Traceback" in tree["traceback"]


@pytest.mark.parametrize("settings", [Settings(), JSON], ids=["text", "json"])
def test_credentials_are_never_said(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "WANDB_API_KEY": 'wb"quoted\\0123',
        "HF_TOKEN": "hf_0123456789",
        "DB_PASSWORD": "first-line\nsecond-line",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SHORT_KEY", "step")  # a word of every line, and no credential
    out = io.StringIO()
    logs.start(Speaker("run"), settings, out)
    for value in secrets.values():
        log.info("started with %s", value, extra=logs.facts("start", given=value))
        try:
            raise ValueError(f"refused {value}")
        except ValueError:
            log.exception("a step failed")
    log.info("tracking at https://someone:pass-word@host/project")
    text = out.getvalue()
    assert text.count("***") >= 7
    for part in ("quoted", "0123456789", "first-line", "second-line", "pass-word"):
        assert part not in text, part
    assert "a step failed" in text
    assert "https://someone:***@host/project" in text


def test_options_win_over_the_environment_and_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    @log_options
    def command() -> None:
        click.echo(json.dumps(environment(log_settings())))

    def settings(*words: str, **given: str) -> Settings:
        done = CliRunner().invoke(command, words, env=given)
        assert done.exit_code == 0, done.output
        return Settings.of(json.loads(done.output))

    assert settings() == Settings("text", "info")
    assert settings("-q") == Settings("text", "warning")
    assert settings("-qqqq") == Settings("text", "error")
    assert settings("-v", "--log-format", "json") == Settings("json", "debug")
    inherited = {"DFLASH_MP_LOG_FORMAT": "json", "DFLASH_MP_LOG_LEVEL": "warning"}
    assert settings(**inherited) == Settings("json", "warning")
    assert settings("-v", "--log-format", "text", **inherited) == Settings("text", "info")
    assert Settings.of({"DFLASH_MP_LOG_FORMAT": "yaml", "DFLASH_MP_LOG_LEVEL": "loud"}) == Settings()


def test_a_view_passes_lines_of_logs_on_and_says_whose_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "abcdefgh-01")
    for settings in (Settings(), JSON):
        line = logs.line(Speaker("drafter", 1), settings, "hello")
        view = PlainView(io.StringIO(), settings)
        assert view._said("drafters", line) == line
        other = view._said("feeder 0", "USDT: abcdefgh-01 <raw>")
        if settings.format == "json":
            tree = json.loads(other)
            assert (tree["role"], tree["rank"], tree["message"]) == ("feeder", 0, "USDT: *** <raw>")
        else:
            assert other == "[feeder 0] USDT: *** <raw>"


def test_a_reader_that_is_gone_does_not_change_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    program = (
        "from dflash_mp import logs; import logging, sys\n"
        "logs.start(logs.Speaker('run'), logs.DEFAULT)\n"
        "sys.stdin.read(1)\n"
        "for _ in range(3): logging.getLogger('dflash_mp.test').warning('to nobody')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stderr is not None
    process.stderr.close()
    process.stdin.write(b"x")
    process.stdin.close()
    assert process.wait(60) == 0
