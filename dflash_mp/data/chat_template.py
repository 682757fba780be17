"""The target's chat template: what it renders, its generation prompt, and the token that ends an assistant's turn.

Every method raises `TemplateProblem` (caught in `data/spans.py`, which knows the record) when the template cannot do what is asked.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cached_property
from typing import Any, Literal

from dflash_mp.data.skeleton import PLAIN, Message, split_stand_ins, stand_in

Thinking = Literal["default", "on", "off"]
_THINK, _THINK_END = "<think>", "</think>"
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# A template that prints today's date would make other rows tomorrow.
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ {'%Y-%m-%d': '2024-07-26', '%d %B %Y': '26 July 2024'}[format] "
    "or '26 Jul 2024' }}{%- endmacro -%}"
)
_QUESTION = stand_in((0, "user", PLAIN))
_ANSWER = stand_in((1, "assistant", PLAIN))


class TemplateProblem(Exception):
    """Why a conversation cannot be rendered, or an assistant's turn not be located."""


def chat_template_fingerprint(tokenizer: Any) -> str:
    """16 hex digits that name the tokenizer's chat template, or "none"."""
    template = tokenizer.chat_template
    if not template:
        return "none"
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer that has one, with `enable_thinking` given as `thinking` says."""

    def __init__(self, tokenizer: Any, thinking: Thinking = "default") -> None:
        self._tokenizer = tokenizer
        own = {"default": None, "on": True, "off": False}[thinking]
        self.modes = (own, *(mode for mode in (None, True, False) if mode is not own))
        """Values of `enable_thinking`, the configured one first; None: not given."""

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, *, prompt: bool = False, mode: int = 0
    ) -> str:
        """The text of `messages`, with `prompt` followed by the generation prompt; `mode` is an index into `modes`."""
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._source(tools),
                add_generation_prompt=prompt,
                tokenize=False,
                **self._options(mode),
            )
        except Exception as error:  # a template is a program of the target's makers and raises what it likes
            raise TemplateProblem(f"the chat template refuses the conversation: {error}") from error
        return str(text)

    def has_markers(self, tools: list[dict[str, Any]] | None) -> bool:
        """Whether the template marks what the assistant generates with `{% generation %}`."""
        return bool(_GENERATION_TAG.search(self._source(tools)))

    def render_marked(
        self, messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of `messages`, and the characters (start, end) inside each `{% generation %}` block."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, blocks = render_jinja_template(
                conversations=[[{k: v for k, v in message.items() if v is not None} for message in messages]],
                tools=tools,
                chat_template=self._source(tools),
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **self._options(0)},
            )
        except Exception as error:
            raise TemplateProblem(f"the chat template refuses the conversation: {error}") from error
        return texts[0], list(blocks[0])

    @cached_property
    def generation_prompts(self) -> list[str]:
        """What the template adds to make the assistant speak, the configured thinking mode's first; "" where it adds nothing."""
        prompts = []
        for mode in range(len(self.modes)):
            without, full = self.render([_QUESTION], mode=mode), self.render([_QUESTION], prompt=True, mode=mode)
            prompts.append(full[len(without) :] if full.startswith(without) else "")
        return list(dict.fromkeys(prompts))

    @cached_property
    def opened_thought(self) -> str:
        """What the generation prompt holds of the thought, from `<think>` on; "" unless it opens one and leaves it open."""
        prompt = self.generation_prompts[0]
        opened = _THINK in prompt and _THINK_END not in prompt
        return prompt[prompt.index(_THINK) :] if opened else ""

    def check(self) -> None:
        """Raise `TemplateProblem` unless the template ends an assistant's turn with a special token."""
        _ = self.ends

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The tokens that end an assistant's turn: at the end, before the next generation prompt, and the end of text."""
        last = self._after_answer(prompt=False)
        found = self._ending(last, 0)
        if found is None:
            raise TemplateProblem(
                "the chat template ends an assistant's turn without a special token, so where it ends is unknown"
            )
        ends = [found[1]]
        following, prompt = self._after_answer(prompt=True), self.generation_prompts[0]
        if prompt and following.endswith(prompt):
            inner = self._ending(following[: -len(prompt)], 0)
            ends += [inner[1]] if inner else []
        return tuple(dict.fromkeys([*ends, *([self._tokenizer.eos_token] if self._tokenizer.eos_token else [])]))

    def find_end(self, text: str, place: int) -> tuple[int, str] | None:
        """Where the end-of-turn token lies that follows `place` (after blanks at most), and its text; None if none does."""
        found = self._ending(text, place)
        return found if found is not None and found[1] in self.ends else None

    def begins_with(self, text: str) -> str:
        """The special token that `text` begins with, or ""."""
        found = self._special_tokens.match(text)
        return found[1] if found else ""

    def _after_answer(self, prompt: bool) -> str:
        texts, slots = split_stand_ins(self.render([_QUESTION, _ANSWER], prompt=prompt))
        return texts[max((place + 1 for place, slot in enumerate(slots) if slot == (1, 0)), default=0)]

    def _ending(self, text: str, place: int) -> tuple[int, str] | None:
        """The special token that follows `place`: the end of text if it is in an unbroken run of them, else the run's first."""
        first = found = self._special_tokens.match(text, place)
        while found is not None and found[1] != self._tokenizer.eos_token:
            following = self._special_tokens.match(text, found.end())
            found = following if following is not None and following.start(1) == found.end() else None
        end = found or first
        return (end.start(1), end[1]) if end else None

    @cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        tokens = set(self._tokenizer.get_added_vocab())
        if self._tokenizer.bos_token != self._tokenizer.eos_token:
            tokens.discard(self._tokenizer.bos_token)
        longest_first = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
        return re.compile(rf"\s*({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def _source(self, tools: list[dict[str, Any]] | None) -> str:
        template: str = self._tokenizer.get_chat_template(None, tools)
        return _FIXED_DATE + template if "strftime_now" in template else template

    def _options(self, mode: int) -> dict[str, bool]:
        thinking = self.modes[mode]
        return {} if thinking is None else {"enable_thinking": thinking}
