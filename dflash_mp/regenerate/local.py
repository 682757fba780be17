"""Answers by a target in this process: conversations in, answered ones out, in the order in which they end.

While the device writes, the host turns what has ended into text and tokenises what comes next, a few conversations at a time; they wait in a window,
longest first, so that those read together are of one length. A conversation with several questions comes back for the next one
as soon as it has its answer. Answers are the target's text without the token that ended it: one of the model's, or of the chat template's. An
answer with special tokens inside is refused, since its text would be another one. What is the same
whatever is answered beside a conversation: its random numbers; its logits up to rounding (in float32 that rarely, in bfloat16 now and then
changes a token, and the rest of that answer with it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dflash_mp.data.chat_template import ChatTemplate, TemplateProblem, Thinking
from dflash_mp.data.documents import Message
from dflash_mp.errors import DataError
from dflash_mp.regenerate.choice import AnswerOptions, uniforms
from dflash_mp.regenerate.conversations import Answered, Conversation, without_torn_character
from dflash_mp.regenerate.slots import SlotOptions, Slots, Text
from dflash_mp.target.load import Target

_STEPS = 8  # between two looks at which texts are done
_REFILL = 16  # slots are filled again when one in so many is free: a pass of prompts costs as much as several of single tokens
_WINDOW = 4  # questions that wait, for each slot
_SHARE = 32  # while the device writes, conversations for one in so many slots are tokenised, or more if more have ended
_AHEAD = 1.25  # conversations tokenised for each that has ended, until the window is full


@dataclass(frozen=True)
class LocalOptions:
    """`max_prompt_tokens`: longer prompts get no answer."""

    slots: SlotOptions
    answers: AnswerOptions
    max_prompt_tokens: int


@dataclass(frozen=True)
class _Question:
    """Turn number `turn` of a conversation; `messages` end with what is asked, `tokens` is all of it as the target reads it."""

    conversation: Conversation
    turn: int
    messages: list[Message]
    tokens: list[int]
    written: int  # tokens of the answers before


def answer_here(
    conversations: Iterable[Conversation], target: Target, options: LocalOptions, say: Callable[[str], None]
) -> Iterator[list[Answered]]:
    """Answer all `conversations`; yields those that ended since the last time, perhaps none. Raises `DataError`, `TargetError`."""
    reader = _Reader(target.tokenizer, options.answers.thinking)
    slots = Slots(target, options.slots, say)
    say(f"attention of new tokens: {slots.attention}")
    coming = iter(conversations)
    waiting: list[_Question] = []
    running: dict[int, _Question] = {}
    checked, more, filling = False, True, True
    while more or waiting or running:
        ended = [(running.pop(text.slot), text) for text in slots.take()]
        if waiting and not checked:
            slots.self_check(waiting[-1].tokens)  # the longest
            checked = True
        _start(slots, waiting, running, options)
        if running:
            slots.advance(_STEPS)  # the device goes on while the rest is done
        done: list[Answered] = []
        follow_up = _conclude(ended, reader, done)
        waiting += _room(reader.questions(follow_up, done), options, done)
        count = options.slots.slots
        filling = len(waiting) < (_WINDOW * count if filling else count)
        if more and filling:
            wanted = max(-(-count // _SHARE), math.ceil(_AHEAD * len(ended))) if running else count
            chunk = list(islice(coming, wanted))
            fresh = reader.questions([(c, 0, list(c.parts[0]), 0) for c in chunk], done)
            waiting = sorted([*_room(fresh, options, done), *waiting], key=lambda question: len(question.tokens))
            more = bool(chunk)
        yield done


def _conclude(
    ended: list[tuple[_Question, Text]], reader: _Reader, done: list[Answered]
) -> list[tuple[Conversation, int, list[Message], int]]:
    """What became of questions: those of a conversation that goes on are returned with its next one, as `_Reader.questions` takes them."""
    follow_up = []
    for (question, text), answer in zip(ended, reader.answers([text for _, text in ended]), strict=True):
        lost = reader.lost(text)
        if lost:
            why = f"its answer holds {', '.join(lost)}, which plain text can't keep: serve the target and give --server"
            done.append(Answered(question.conversation, question.messages, "refused", question.written, why))
            continue
        messages: list[Message] = [*question.messages, {"role": "assistant", "content": answer}]
        written, parts = question.written + len(text.tokens), question.conversation.parts
        if text.stopped and question.turn + 1 < len(parts):
            further = [*messages, *parts[question.turn + 1]]
            follow_up.append((question.conversation, question.turn + 1, further, written))
        else:
            done.append(Answered(question.conversation, messages, "stop" if text.stopped else "length", written))
    return follow_up


def _start(slots: Slots, waiting: list[_Question], running: dict[int, _Question], options: LocalOptions) -> None:
    free = slots.free()[: len(waiting)]
    if not free or (running and len(free) < len(waiting) and len(free) * _REFILL < options.slots.slots):
        return
    chosen = [waiting.pop() for _ in free]
    count = options.slots.max_new_tokens
    greedy = options.slots.sampling.greedy
    numbers = [] if greedy else [uniforms(options.answers.seed, q.conversation.index, q.turn, count) for q in chosen]
    slots.fill(free, [question.tokens for question in chosen], numbers)
    running.update(zip(free, chosen, strict=True))


def _room(questions: list[_Question], options: LocalOptions, done: list[Answered]) -> list[_Question]:
    """Those of `questions` that fit; the others are `done`, without an answer."""
    fitting = []
    for question in questions:
        if len(question.tokens) <= options.max_prompt_tokens:
            fitting.append(question)
        else:
            done.append(Answered(question.conversation, question.messages, "prompt_too_long", question.written))
    return fitting


def stop_tokens(target: Target, thinking: Thinking) -> tuple[int, ...]:
    """What ends an answer: the model's own stop tokens, and those with which the chat template ends an assistant's turn."""
    if not target.tokenizer.chat_template:
        return target.info.eos_token_ids
    try:
        ends = ChatTemplate(target.tokenizer, thinking).ends
    except TemplateProblem:  # it ends turns without a token of their own
        return target.info.eos_token_ids
    return tuple(sorted({*target.info.eos_token_ids, *target.tokenizer.convert_tokens_to_ids(list(ends))}))


class _Reader:
    """Between messages and tokens, with the target's tokenizer and chat template."""

    def __init__(self, tokenizer: Any, thinking: Thinking) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "the target's tokenizer has no chat template, so nothing can be asked",
                "use the target's instruction-tuned version",
            )
        self._tokenizer = tokenizer
        self._special = {n: token.content for n, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._template = ChatTemplate(tokenizer, thinking)
        # A template may open the thinking itself; then the answer's text lacks the mark that later renderings look for.
        self._opening = self._template.opened_thought

    def questions(
        self, asked: list[tuple[Conversation, int, list[Message], int]], done: list[Answered]
    ) -> list[_Question]:
        """Tokenise (conversation, turn, messages, tokens written before); those that the template refuses are `done`."""
        texts, taken = [], []
        for question in asked:
            conversation, _, messages, written = question
            try:
                text = self._template.render(messages, conversation.tools, prompt=True)
                text.encode("utf-8")
            except TemplateProblem as problem:
                done.append(Answered(conversation, messages, "refused", written, str(problem)))
            except UnicodeEncodeError:
                done.append(Answered(conversation, messages, "refused", written, "it holds half a surrogate pair"))
            else:
                texts.append(text)
                taken.append(question)
        ids = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return [
            _Question(c, turn, messages, list(tokens), written)
            for (c, turn, messages, written), tokens in zip(taken, ids, strict=True)
        ]

    def answers(self, texts: list[Text]) -> list[str]:
        """The answers as text, without the token that ended them."""
        # One by one: what `batch_decode` gives for no text at all differs between versions of transformers.
        return [
            self._opening
            + (self._decode(text.tokens[:-1]) if text.stopped else without_torn_character(self._decode(text.tokens)))
            for text in texts
        ]

    def lost(self, text: Text) -> list[str]:
        """The special tokens inside an answer, before the one that ended it."""
        inner = text.tokens[:-1] if text.stopped else text.tokens
        return [self._special[token] for token in dict.fromkeys(inner) if token in self._special]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
