"""`dflash-mp regenerate --server`: against a real HTTP server that runs the tiny target, and misbehaves on demand."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dflash_mp.bench.tiny import write_tiny_target
from dflash_mp.cli import main
from dflash_mp.config import TargetConfig
from dflash_mp.target.load import Target, load_target

NEW = 8
KEY = "a-very-secret-key"


class Server(http.server.ThreadingHTTPServer):
    """An OpenAI-compatible server of one tiny target. `misbehave` may answer a request itself and return True."""

    daemon_threads = True

    def __init__(self, target: Target) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = target
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.busy = self.busiest = 0
        self.misbehave: Callable[[Handler, int], bool] = lambda handler, number: False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        tokenizer = self.target.tokenizer
        text = tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True, tokenize=False)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with self.lock:
            own = self.target.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=request["max_tokens"], do_sample=False
            )
        tokens = own[0, ids.shape[1] :].tolist()
        stopped = tokens[-1] == tokenizer.eos_token_id
        content = tokenizer.decode(tokens, skip_special_tokens=True)
        choice = {
            "message": {"role": "assistant", "content": content},
            "finish_reason": "stop" if stopped else "length",
        }
        return {"choices": [choice], "usage": {"completion_tokens": len(tokens)}}


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append({**request, "path": self.path})
            self.server.headers.append(dict(self.headers))
            number = len(self.server.requests)
            self.server.busy += 1
            self.server.busiest = max(self.server.busiest, self.server.busy)
        try:
            if not self.server.misbehave(self, number):
                self.reply(200, json.dumps(self.server.answer(request)).encode())
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with self.server.lock:
                self.server.busy -= 1

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(path: Path) -> Target:
    return load_target(TargetConfig(path=str(path), device="cpu", taps=1))


@pytest.fixture
def server(target: Target) -> Iterator[Server]:
    with Server(target) as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    talk = {"turns": ["one", "two"]}
    file.write_text("".join(json.dumps(r) + "\n" for r in [*({"prompt": f"question {n}"} for n in range(12)), talk]))
    return file


def run(server: Server, prompts: Path, *more: str) -> tuple[int, str]:
    out = prompts.with_name("answers.jsonl")
    words = ["regenerate", "--server", server.url, "--model", "tiny", "--prompts", prompts, "--out", out]
    done = CliRunner().invoke(main, [*map(str, words), "--max-new-tokens", str(NEW), "--concurrency", "3", *more])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def answers(prompts: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in prompts.with_name("answers.jsonl").read_text("utf-8").splitlines()]


def test_a_server_with_the_same_target_gives_the_same_answers_as_the_target_here(
    server: Server, prompts: Path, path: Path
) -> None:
    together = threading.Barrier(3)

    def misbehave(handler: Handler, number: int) -> bool:
        if number <= 3:
            together.wait(60)
        return False

    server.misbehave = misbehave
    code, said = run(server, prompts)
    assert code == 0, said
    here = prompts.with_name("here.jsonl")
    words = ["regenerate", "--target", path, "--prompts", prompts, "--out", here, "--device", "cpu"]
    assert CliRunner().invoke(main, [*map(str, words), "--max-new-tokens", str(NEW)]).exit_code == 0
    assert prompts.with_name("answers.jsonl").read_text() == here.read_text()
    assert server.busiest == 3
    assert {request["path"] for request in server.requests} == {"/v1/chat/completions"}
    request = server.requests[0]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("tiny", 0.0, NEW)
    assert len({request["seed"] for request in server.requests}) == len(server.requests)
    settings = json.loads(prompts.with_name("answers.jsonl.settings.json").read_text())
    assert (settings["server"], settings["model"]) == (server.url, "tiny")


def test_what_may_pass_is_tried_again(server: Server, prompts: Path) -> None:
    def misbehave(handler: Handler, number: int) -> bool:
        if number == 1:
            handler.reply(503, b"starting", Retry_After="0")
        elif number == 2:
            handler.close_connection = True  # and no answer at all
        elif number == 3:
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b'{"choices": [')
            handler.close_connection = True
        return number <= 3

    server.misbehave = misbehave
    code, said = run(server, prompts)
    assert code == 0, said
    assert "status 503: starting" in said
    assert len(re.findall(r"attempt \d of 6", said)) == 3
    assert [record["index"] for record in answers(prompts)] == list(range(13))


def test_a_server_that_stays_away_ends_the_command_and_what_is_written_stays(server: Server, prompts: Path) -> None:
    def misbehave(handler: Handler, number: int) -> bool:
        if number > 4:
            handler.reply(429, b'{"error": "slow down"}', Retry_After="0")
        return number > 4

    server.misbehave = misbehave
    code, said = run(server, prompts, "--attempts", "2")
    assert code == 4
    assert "in 2 attempts, the last one: status 429" in said
    assert "the same command goes on" in said
    written = prompts.with_name(".answers.jsonl.partial").read_bytes().count(b"\n")
    assert 1 <= written <= 4
    server.misbehave = lambda handler, number: False
    code, said = run(server, prompts, "--model", "other")
    assert code == 2
    assert "model" in said
    code, said = run(server, prompts, "--server", server.url.replace("127.0.0.1", "localhost"))
    assert code == 0, said
    assert "begun with server http" in said
    again = [headers for headers in server.headers if headers["Host"].startswith("localhost")]
    assert len(again) == 13 - written
    assert [record["index"] for record in answers(prompts)] == list(range(13))


def test_a_server_that_drips_is_left(server: Server, prompts: Path) -> None:
    def misbehave(handler: Handler, number: int) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        for _ in range(600):
            handler.wfile.write(b" ")
            time.sleep(0.1)
        return True

    server.misbehave = misbehave
    started = time.monotonic()
    code, said = run(server, prompts, "--attempts", "1", "--request-seconds", "1")
    assert code == 4
    assert "too slowly" in said
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("status", "body", "headers", "words"),
    [
        (401, b"who are you", {}, "environment variable TINY_KEY"),
        (404, b"no such model", {}, "--model"),
        (307, b"", {"Location": "http://127.0.0.1:1/other"}, "give the address it points to: http://127.0.0.1:1/other"),
        (400, b'{"error": "temperature must be polite"}', {}, "temperature must be polite"),
        (200, b"<html>", {}, "something other than JSON"),
        (200, b'{"choices": []}', {}, "no choices[0].message"),
        (200, b'{"choices": [{"message": {"content": "x"}, "finish_reason": "content_filter"}]}', {}, "content_filter"),
    ],
)
def test_a_refusal_ends_the_command_with_the_servers_words(
    server: Server, prompts: Path, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, headers: Any, words: str
) -> None:
    monkeypatch.setenv("TINY_KEY", KEY)

    def misbehave(handler: Handler, number: int) -> bool:
        handler.reply(status, body, **headers)
        return True

    server.misbehave = misbehave
    code, said = run(server, prompts, "--api-key-env", "TINY_KEY")
    assert code == 4
    assert words in said
    assert KEY not in said


def test_the_key_goes_to_the_server_and_nowhere_else(
    server: Server, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_KEY", KEY)
    code, said = run(server, prompts, "--api-key-env", "TINY_KEY", "--limit", "2")
    assert code == 0
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert KEY not in said
    for file in prompts.parent.iterdir():
        assert KEY.encode() not in file.read_bytes(), file
    server.headers.clear()
    run(server, prompts, "--limit", "2", "--force", "--api-key-env", "UNSET_KEY")
    assert not any("Authorization" in headers for headers in server.headers)


def test_a_second_question_follows_the_answer_and_a_prompt_without_room_is_marked(
    server: Server, prompts: Path
) -> None:
    full, name = False, "reasoning_content"

    def misbehave(handler: Handler, number: int) -> bool:
        if full and len(server.requests[-1]["messages"]) > 1:
            handler.reply(400, b'{"message": "This model\'s maximum context length is 8 tokens"}')
        else:
            message = {"role": "assistant", "content": f"reply {number}", name: "hm"}
            handler.reply(200, json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode())
        return True

    server.misbehave = misbehave
    assert run(server, prompts, "--concurrency", "1")[0] == 0
    last = answers(prompts)[-1]
    assert last["finish_reason"] == "stop"
    assert [m["content"] for m in last["messages"]] == ["one", "reply 13", "two", "reply 14"]
    assert last["messages"][1]["reasoning_content"] == "hm"
    assert server.requests[-1]["messages"] == last["messages"][:3]
    full, name = True, "reasoning"
    assert run(server, prompts, "--concurrency", "1", "--force")[0] == 0
    last = answers(prompts)[-1]
    assert last["finish_reason"] == "prompt_too_long"
    assert [m["role"] for m in last["messages"]] == ["user", "assistant", "user"]
    assert last["messages"][1]["reasoning_content"] == "hm"


def test_a_record_that_the_server_refuses_strands_no_other(server: Server, prompts: Path) -> None:
    def misbehave(handler: Handler, number: int) -> bool:
        asked = server.requests[-1]["messages"][-1]["content"]
        if asked == "question 3":
            handler.reply(400, b'{"error": "not that one"}')
        else:
            handler.reply(
                200, json.dumps({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}).encode()
            )
        return True

    server.misbehave = misbehave
    code, said = run(server, prompts, "--concurrency", "1")
    assert code == 0, said
    found = answers(prompts)
    assert [record["finish_reason"] for record in found] == ["stop"] * 3 + ["refused"] + ["stop"] * 9
    assert "status 400" in found[3]["refusal"]
    assert "not that one" in found[3]["refusal"]
    assert f"1 conversations were refused, the first of them: {prompts}:4" in said
    assert "1 refused" in said


def test_a_tool_call_ends_a_conversation_and_is_sent_as_the_api_has_it(server: Server, prompts: Path) -> None:
    def call(arguments: Any) -> list[dict[str, Any]]:
        return [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]

    def misbehave(handler: Handler, number: int) -> bool:
        message = {"content": None, "tool_calls": call('{"x": "é"}')}
        handler.reply(200, json.dumps({"choices": [{"message": message, "finish_reason": "tool_calls"}]}).encode())
        return True

    server.misbehave = misbehave
    said = {"role": "assistant", "content": "", "tool_calls": call({"x": "é"})}
    tool = {"role": "tool", "content": "3", "tool_call_id": "1"}
    talks = [{"turns": ["one", "two"]}, {"messages": [{"role": "user", "content": "q"}, said, tool]}]
    prompts.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    assert run(server, prompts, "--concurrency", "1")[0] == 0
    first, second = answers(prompts)
    assert first["messages"] == [{"role": "user", "content": "one"}, said]
    assert second["messages"][-1] == said
    assert server.requests[-1]["messages"][1]["tool_calls"] == call('{"x": "é"}')


def test_a_server_that_refuses_everything_is_not_asked_for_long(
    server: Server, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misbehave(handler: Handler, number: int) -> bool:
        handler.reply(400, b"no")
        return True

    server.misbehave = misbehave
    monkeypatch.setattr("dflash_mp.regenerate.command._ONLY_REFUSALS", 2)
    code, said = run(server, prompts, "--concurrency", "1")
    assert code == 4
    assert "no conversation could be answered (2 refused)" in said
    assert len(server.requests) < 13
    assert [file.name for file in prompts.parent.iterdir()] == [prompts.name]


def test_a_server_that_has_room_for_no_prompt_is_an_error(server: Server, prompts: Path) -> None:
    def misbehave(handler: Handler, number: int) -> bool:
        handler.reply(400, b'{"message": "This model\'s maximum context length is 8 tokens"}')
        return True

    server.misbehave = misbehave
    code, said = run(server, prompts)
    assert code == 2
    assert "13 prompt_too_long" in said
    assert "lower --max-new-tokens" in said
    assert [file.name for file in prompts.parent.iterdir()] == [prompts.name]


def test_addresses_that_cannot_be_are_refused(prompts: Path, tmp_path: Path) -> None:
    for url, words in (
        ("127.0.0.1:8000", "is not an address"),
        ("http://host:port/v1", "is not an address"),
        ("http://me:secret@host/v1", "environment variable"),
        ("http://host/v1?key=secret", "environment variable"),
        ("host/v1?key=secret", "environment variable"),
        ("http://host/v1#secret", "environment variable"),
    ):
        arguments = [
            "regenerate",
            "--server",
            url,
            "--model",
            "m",
            "--prompts",
            str(prompts),
            "--out",
            str(tmp_path / "o"),
        ]
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 2
        assert words in done.output
        assert "secret" not in done.output
