"""Answers by an OpenAI-compatible server (vLLM, SGLang, …): `POST URL/chat/completions`, a bounded number at a time.

A request that fails for a reason that may pass (no connection, time-out, status 408, 409, 425, 429 or 5xx) is tried again after 1, 2, 4, … seconds, or
as long as the server asks, up to a limit of attempts; then the whole command fails with the server's words: what is written stays, and the same
command goes on. So it does for a wrong key, address or model. A conversation that the server won't answer (status 400, 413, 422, or an answer
that holds none) is refused, and the others go on. Every wait is bounded. Redirections are not followed, so
the key goes to the server that was named and nowhere else; it is read from the environment and never printed or stored.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import random
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dflash_mp.data.documents import Message, with_objects
from dflash_mp.errors import ConfigError, TargetError
from dflash_mp.regenerate.choice import AnswerOptions
from dflash_mp.regenerate.conversations import Answered, Conversation, without_torn_character

_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_MOST_BYTES = 64 << 20
_LONGEST_PAUSE = 60.0
_TOO_LONG = ("context length", "context_length", "too long", "maximum model length")


@dataclass(frozen=True)
class ServerOptions:
    """`url` ends with the API's version, usually /v1. `seconds`: longest wait for an answer. `key_variable`: names the key in the environment."""

    url: str
    model: str
    concurrency: int = 64
    attempts: int = 6
    seconds: float = 600.0
    key_variable: str = "OPENAI_API_KEY"


class _Passing(Exception):
    """Worth another attempt, after `pause` seconds if the server said so."""

    def __init__(self, why: str, pause: float | None = None) -> None:
        super().__init__(why)
        self.pause = pause


class _PromptTooLong(Exception):
    """The server has no room for the prompt."""


class _Refused(Exception):
    """The server won't answer this conversation."""


def answer_there(
    conversations: Iterable[Conversation], options: ServerOptions, how: AnswerOptions, say: Callable[[str], None]
) -> Iterator[list[Answered]]:
    """Answer all `conversations`; yields each as it ends. Raises `ConfigError`, `TargetError`."""
    place = address(options)
    if place.scheme == "http" and _key(options) and place.hostname not in ("localhost", "127.0.0.1", "::1"):
        say(f"the key in {options.key_variable} goes to {place.hostname} unencrypted: use https where you can")
    asked: queue.Queue[Conversation | None] = queue.Queue(2 * options.concurrency)
    answered: queue.Queue[Answered | BaseException] = queue.Queue()
    clients = [_Client(place, options, how, say) for _ in range(options.concurrency)]
    for client in clients:
        threading.Thread(target=_work, args=(client, asked, answered), daemon=True).start()
    open_ones = 0
    try:
        for conversation in conversations:
            while asked.full():
                yield [_next(answered)]
                open_ones -= 1
            asked.put(conversation)
            open_ones += 1
        while open_ones:
            yield [_next(answered)]
            open_ones -= 1
    finally:
        for client in clients:
            client.stop()
        for _ in clients:
            _offer(asked)


def _work(
    client: _Client, asked: queue.Queue[Conversation | None], answered: queue.Queue[Answered | BaseException]
) -> None:
    while (conversation := asked.get()) is not None and not client.stopped.is_set():
        try:
            answered.put(client.answer(conversation))
        except BaseException as error:
            answered.put(error)
            return


def _next(answered: queue.Queue[Answered | BaseException]) -> Answered:
    found = answered.get()  # bounded: every client answers or fails within attempts × (seconds + pause)
    if isinstance(found, BaseException):
        raise found
    return found


def _offer(asked: queue.Queue[Conversation | None]) -> None:
    """Wake one worker, if it waits."""
    try:
        asked.put_nowait(None)
    except queue.Full:
        return


class _Client:
    """One connection, kept open. `stop` from another thread ends whatever it waits for."""

    def __init__(
        self, place: urllib.parse.SplitResult, options: ServerOptions, how: AnswerOptions, say: Callable[[str], None]
    ) -> None:
        self._place, self._options, self._how, self._say = place, options, how, say
        self._connection: http.client.HTTPConnection | None = None
        self.stopped = threading.Event()

    def answer(self, conversation: Conversation) -> Answered:
        """Ask every question of `conversation` in turn."""
        messages: list[Message] = []
        tokens, reason = 0, "stop"
        for turn, part in enumerate(conversation.parts):
            messages += part
            try:
                message, reason, used = self._ask(conversation, turn, messages)
            except _PromptTooLong:
                return Answered(conversation, messages, "prompt_too_long", tokens)
            except _Refused as refusal:
                return Answered(conversation, messages, "refused", tokens, str(refusal))
            messages.append(message)
            tokens += used
            if reason != "stop" or message.get("tool_calls"):  # what the tool says to it is not known
                break
        return Answered(conversation, messages, reason, tokens)

    def stop(self) -> None:
        """End what `answer` waits for, and let it fail; from any thread."""
        self.stopped.set()
        connection = self._connection
        if connection is not None and connection.sock is not None:
            try:
                connection.sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is closed already
                return

    def _ask(self, conversation: Conversation, turn: int, messages: list[Message]) -> tuple[Message, str, int]:
        body = json.dumps(_request(self._options.model, self._how, conversation, turn, messages)).encode()
        attempts, attempt = self._options.attempts, 0
        while True:
            attempt += 1
            try:
                return _reply(self._post(body), self._options.url)
            except _Passing as problem:
                if attempt >= attempts or self.stopped.is_set():
                    raise TargetError(
                        f"{self._options.url} gave no answer to {conversation.place} in {attempt} attempts, the last one: {problem}",
                        "check the server; what is written already stays, and the same command goes on",
                    ) from problem
                pause = min(_LONGEST_PAUSE, 2.0 ** (attempt - 1) if problem.pause is None else problem.pause)
                self._say(f"{conversation.place}: {problem}; attempt {attempt + 1} of {attempts} in {pause:.0f} s")
                self.stopped.wait(pause * random.uniform(1.0, 1.25))

    def _post(self, body: bytes) -> dict[str, Any]:
        """The server's answer, a JSON object. Raises `_Passing`, `_PromptTooLong`, `_Refused` and `TargetError`."""
        deadline = time.monotonic() + self._options.seconds
        try:
            response = self._send(body)
            content = _read(response, deadline)
        except (OSError, http.client.HTTPException, TimeoutError) as error:
            self._close()
            raise _Passing(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        if response.status != 200:
            if response.will_close:
                self._close()
            raise self._refusal(response, content)
        try:
            value = json.loads(content)
        except ValueError:
            raise TargetError(
                f"{self._options.url} answered with something other than JSON: {_words(content)}", "check --server"
            ) from None
        if not isinstance(value, dict):
            raise TargetError(
                f"{self._options.url} answered with {type(value).__name__}, not an object", "check --server"
            )
        return value

    def _send(self, body: bytes) -> http.client.HTTPResponse:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._place.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(self._place.hostname or "", self._place.port, timeout=self._options.seconds)
        headers = {"Content-Type": "application/json"}
        key = _key(self._options)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._connection.request("POST", self._place.path.rstrip("/") + "/chat/completions", body, headers)
        return self._connection.getresponse()

    def _refusal(self, response: http.client.HTTPResponse, content: bytes) -> Exception:
        said = _words(content)
        if response.status in _PASSING:
            after = response.headers.get("Retry-After", "")
            return _Passing(f"status {response.status}: {said}", float(after) if after.isdigit() else None)
        if response.status in (400, 413, 422) and any(mark in said.lower() for mark in _TOO_LONG):
            return _PromptTooLong(said)
        if response.status in (400, 413, 422):
            return _Refused(f"the server refuses (status {response.status}): {said}")
        remedy = {
            401: f"put the server's key into the environment variable {self._options.key_variable}",
            403: f"check the key in the environment variable {self._options.key_variable}",
            404: "check the address (it usually ends with /v1) and --model",
        }.get(response.status, "check --server and --model, and what the server logs")
        if 300 <= response.status < 400:
            remedy = f"give the address it points to: {response.headers.get('Location', 'unknown')}"
        return TargetError(f"{self._options.url} refuses (status {response.status}): {said}", remedy)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def address(options: ServerOptions) -> urllib.parse.SplitResult:
    """The parts of the server's address. Raises `ConfigError` if it is none, or holds a secret."""
    if any(mark in options.url for mark in "@?#"):
        raise ConfigError(
            "--server holds a user or password (@), or a query or fragment (? or #): it would be stored with the answers",
            f"give the plain address; put the key into the environment variable {options.key_variable}",
        )
    try:
        place = urllib.parse.urlsplit(options.url)
        _ = place.port  # raises when it is no number
    except ValueError as error:
        raise ConfigError(f"--server is not an address: {error}", "for example http://127.0.0.1:8000/v1") from None
    if place.scheme not in ("http", "https") or not place.hostname:
        raise ConfigError(
            f"--server {options.url!r} is not an address", "for example --server http://127.0.0.1:8000/v1"
        )
    return place


def _key(options: ServerOptions) -> str:
    return os.environ.get(options.key_variable, "")


def _request(
    model: str, how: AnswerOptions, conversation: Conversation, turn: int, messages: list[Message]
) -> dict[str, Any]:
    request: dict[str, Any] = {
        "model": model,
        "messages": [_as_sent(message) for message in messages],
        "max_tokens": how.max_new_tokens,
        "temperature": how.sampling.temperature,
        "top_p": how.sampling.top_p,
        "stream": False,
        # One number for each answer, below 2³¹ as servers want it.
        "seed": (how.seed * 1_000_003 + conversation.index * 64 + turn) % (1 << 31),
    }
    if how.sampling.top_k:
        request["top_k"] = how.sampling.top_k
    if conversation.tools:
        request["tools"] = conversation.tools
    if how.thinking != "default":
        request["chat_template_kwargs"] = {"enable_thinking": how.thinking == "on"}
    return request


def _as_sent(message: Message) -> Message:
    """`message` as the API has it: the arguments of tool calls as JSON text."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_text(call) for call in calls]} if isinstance(calls, list) else message


def _with_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _reply(answer: dict[str, Any], url: str) -> tuple[Message, str, int]:
    """The assistant's message, why it ended, and its tokens. Raises `_Refused` and `TargetError`."""
    try:
        choice = answer["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        used = (answer.get("usage") or {}).get("completion_tokens") or 0
        thought = message.get("reasoning_content") or message.get("reasoning")  # servers' older and newer name
        kept = {"reasoning_content": thought} if thought else {}
        if message.get("tool_calls"):
            kept["tool_calls"] = with_objects(message["tool_calls"])
        content = message.get("content")
    except ValueError as error:
        raise _Refused(f"the server's answer can't be read: {error}") from None
    except (KeyError, IndexError, TypeError, AttributeError):
        raise TargetError(
            f"{url}: the server's answer has no choices[0].message", "check that it is an OpenAI-compatible server"
        ) from None
    if content is None and kept:
        content = ""
    if not isinstance(content, str):
        raise _Refused("the server's message has no content")
    ended = "length" if reason == "length" else "stop"
    if ended == "length":
        content = without_torn_character(content)
    if reason not in ("stop", "length", "tool_calls"):
        raise _Refused(f"the server ended its answer with {reason!r}")
    return {"role": "assistant", "content": content, **kept}, ended, int(used)


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise TargetError(f"the server sent more than {_MOST_BYTES >> 20} MiB for one answer", "check --server")
        if time.monotonic() > deadline:
            raise TimeoutError("the answer came too slowly")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    response.close()  # read1 leaves it open, and the connection would take no further request
    return b"".join(parts)


def _words(content: bytes) -> str:
    return " ".join(content[:2000].decode("utf-8", "replace").split())[:300] or "no text"
