"""`dflash-mp regenerate`: from prompts to a file of the target's own answers, by the target itself or a server, going on where it was.

`regenerate` checks what can be checked before it loads the target, writes through `AnswerFile` and returns what became of the conversations.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mp import __version__
from dflash_mp.config import SourceConfig, TargetConfig
from dflash_mp.data.chat_template import chat_template_fingerprint
from dflash_mp.data.encoding import tokenizer_fingerprint
from dflash_mp.data.origin import settings_file
from dflash_mp.data.sources import HUB_PREFIX, describe_file, source_files
from dflash_mp.errors import ConfigError, DataError, DflashError, TargetError
from dflash_mp.regenerate.choice import AnswerOptions
from dflash_mp.regenerate.conversations import Answered, Conversation, read_conversations
from dflash_mp.regenerate.output import AnswerFile
from dflash_mp.regenerate.server import ServerOptions, address, answer_there

FORMAT = 1
_REPORT_SECONDS = 10.0
_ONLY_REFUSALS = 64  # so many from a server, and no answer yet: it isn't the records


@dataclass(frozen=True)
class Request:
    """What to ask, how to answer, and where to write. Exactly one of `target` and `server` is set."""

    sources: Sequence[SourceConfig]
    out: Path
    answers: AnswerOptions
    target: TargetConfig | None = None
    server: ServerOptions | None = None
    batch: int = 128
    max_prompt_tokens: int | None = None
    cuda_graphs: bool = True
    force: bool = False


@dataclass(frozen=True)
class Outcome:
    """Conversations by how they ended, over all starts; `tokens` and `seconds` of this one."""

    reasons: dict[str, int]
    tokens: int
    seconds: float

    def line(self) -> str:
        """For people."""
        parts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.reasons.items()))
        rate = (
            f"; {self.tokens:,} tokens in {self.seconds:.0f} s: {self.tokens / self.seconds:,.0f} tokens/s"
            if self.tokens
            else ""
        )
        return f"{sum(self.reasons.values()):,} conversations ({parts}){rate}"


def regenerate(request: Request, say: Callable[[str], None]) -> Outcome:
    """Write `request.out`. Raises `DflashError`; what is written by then stays, and the same request goes on."""
    how = request.answers
    for _ in read_conversations(request.sources):  # a malformed record, however late, ends the command before any work
        pass
    prompts = [_describe(source) for source in request.sources]
    answerer, facts = _target(request, say) if request.target is not None else _server(request, say)
    settings = {
        "format": FORMAT,
        "prompts": prompts,
        **facts,
        "max_new_tokens": how.max_new_tokens,
        "temperature": how.sampling.temperature,
        "top_p": how.sampling.top_p,
        "top_k": how.sampling.top_k,
        "seed": how.seed,
        "thinking": how.thinking,
        "versions": _versions(),
    }
    with AnswerFile(request.out, settings, force=request.force, say=say) as file:
        if file.complete:
            say(f"{request.out} is already there, made with the same settings; nothing to do")
            return Outcome({}, 0, 0.0)
        return _write(request, file, answerer, say)


_Answerer = Callable[[Iterable[Conversation]], Iterator[list[Answered]]]


def _write(request: Request, file: AnswerFile, answerer: _Answerer, say: Callable[[str], None]) -> Outcome:
    before = file.done
    if before:
        say(f"going on after {len(before):,} conversations that are written already")
    started = last = time.monotonic()
    fresh = tokens = 0
    asked = 0
    refused: list[Answered] = []

    def left() -> Iterator[Conversation]:
        nonlocal asked
        for conversation in read_conversations(request.sources):
            asked += 1
            if conversation.index not in before:
                yield conversation

    coming = left()
    for answered in answerer(coming):
        file.add(answer.record() for answer in answered)
        fresh += len(answered)
        tokens += sum(answer.tokens for answer in answered)
        refused += [answer for answer in answered if answer.finish_reason == "refused"]
        if request.server is not None and len(refused) == len(file.done) >= _ONLY_REFUSALS:
            raise _none_answered(request, file, refused)
        now = time.monotonic()
        if fresh and now - last > _REPORT_SECONDS:
            say(f"{len(before) + fresh:,} conversations, {tokens / (now - started):,.0f} tokens/s in finished answers")
            last = now
    seconds = time.monotonic() - started
    for _ in coming:  # what the answerer left, if it did
        pass
    if len(file.done) != asked:
        raise RuntimeError(f"{asked} conversations were asked, {len(file.done)} have their line in {request.out}")
    if not file.answered:
        raise _none_answered(request, file, refused)
    if refused:
        say(f"{len(refused):,} conversations were refused, the first of them: {_why(refused[0])}")
    reasons = file.finish()
    say(f"{request.out} and {settings_file(request.out).name}: written")
    return Outcome(reasons, tokens, seconds)


def _none_answered(request: Request, file: AnswerFile, refused: list[Answered]) -> DflashError:
    """What to raise when nothing was answered; discards `file`."""
    reasons = file.reasons()
    found = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
    file.discard()
    if "refused" not in reasons:
        return ConfigError(
            f"no conversation could be answered ({found}): no prompt has room for an answer of {request.answers.max_new_tokens} tokens",
            "lower --max-new-tokens" + (" or raise --max-prompt-tokens" if request.max_prompt_tokens else ""),
        )
    what = f"no conversation could be answered ({found})" + (f"; for example {_why(refused[0])}" if refused else "")
    if request.server is not None:
        return TargetError(what, "check --server and --model, and what the server logs")
    return DataError(what, "change the records, or serve the target and give --server")


def _why(refused: Answered) -> str:
    return f"{refused.conversation.place}: {refused.refusal}"


def _target(request: Request, say: Callable[[str], None]) -> tuple[_Answerer, dict[str, Any]]:
    from dflash_mp.regenerate.local import LocalOptions, answer_here, stop_tokens
    from dflash_mp.regenerate.rotary import steady_positions
    from dflash_mp.regenerate.slots import SlotOptions
    from dflash_mp.target.load import load_target

    if request.target is None:
        raise ValueError("no target")
    target = load_target(request.target)
    info, how = target.info, request.answers
    if target.anatomy is None:
        raise ValueError("the target's model was freed")
    steady = steady_positions(target.anatomy.config)
    positions = info.max_positions if steady is None else min(info.max_positions, steady)
    room = positions - how.max_new_tokens
    beyond = f" ({info.max_positions}, but texts beyond {positions} would change their neighbours' rotary embeddings)"
    if room < 1:
        raise ConfigError(
            f"{how.max_new_tokens} new tokens don't fit the target's context of {positions}"
            + (beyond if positions < info.max_positions else ""),
            "lower --max-new-tokens, or serve the target and give --server",
        )
    if positions < info.max_positions:
        say(f"{info.name}'s context is {positions} here{beyond}; for longer texts serve it and give --server")
    longest = room if request.max_prompt_tokens is None else min(room, request.max_prompt_tokens)
    slots = SlotOptions(
        request.batch, how.max_new_tokens, stop_tokens(target, how.thinking), how.sampling, request.cuda_graphs
    )
    options = LocalOptions(slots, how, longest)
    facts = {
        "target": info.name,
        "revision": request.target.revision,
        "weights": info.weights,
        "dtype": info.dtype,
        "tokenizer": tokenizer_fingerprint(target.tokenizer),
        "chat_template": chat_template_fingerprint(target.tokenizer),
        "max_prompt_tokens": longest,
    }
    say(f"{info.name}, {info.dtype} on {target.device}: {request.batch} conversations at a time")
    return lambda conversations: answer_here(conversations, target, options, say), facts


def _server(request: Request, say: Callable[[str], None]) -> tuple[_Answerer, dict[str, Any]]:
    if request.server is None:
        raise ValueError("neither a target nor a server")
    options = request.server
    address(options)
    facts = {"server": options.url, "model": options.model}
    return lambda conversations: answer_there(conversations, options, request.answers, say), facts


def _describe(source: SourceConfig) -> dict[str, Any]:
    """A source in the settings: files by content, not by name."""
    facts: dict[str, Any] = {"format": source.format, "limit": source.limit}
    if source.path.startswith(HUB_PREFIX):
        return {**facts, "name": source.path, "subset": source.subset, "split": source.split}
    return {**facts, "sha256": [describe_file(path)[1] for path in source_files(source)]}


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {
        "dflash-mp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
