"""Token ids and loss mask of documents: the mask is 1 on exactly the tokens that the target itself would generate.

A conversation is rendered with the target's chat template (`data/spans.py`) and tokenised as one text, the way a server would read it;
its assistant turns are supervised, each with its end-of-turn token. A plain text is supervised throughout, except for its first token,
which nothing precedes. Texts are tokenised in batches by the Rust tokenizer on all cores; the rest costs a few per cent of that.

Where a token would join the end of a header with the beginning of an answer, the text is tokenised in two parts there, as prompt
and answer are when the target generates. What cannot be told apart exactly raises `DataError`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from dflash_mp.data.chat_template import ChatTemplate, Thinking
from dflash_mp.data.documents import Document
from dflash_mp.data.skeleton import Span
from dflash_mp.data.spans import Rendered, SpanFinder
from dflash_mp.errors import DataError

_PROBE = "Ab  c123 4567\n\n\tif x != 'é':  # naïve 日本語 🙂\r\n  return x+1 <b>"


@dataclass(frozen=True)
class EncodedDocument:
    """`n` tokens: `input_ids` int32 [n] and `loss_mask` uint8 [n]; `turns`: the first token of each assistant turn."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    turns: tuple[int, ...] = ()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """16 hex digits over vocabulary, special tokens and how a probe text is split: equal ids for equal texts.

    It does not depend on the library versions or the file format that the tokenizer was loaded with.
    """
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    probe = tokenizer(_PROBE)["input_ids"]
    facts = json.dumps([vocabulary, sorted(tokenizer.get_added_vocab().items()), special, probe], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


class DocumentEncoder:
    """Encodes documents for one tokenizer (a fast one of transformers) and thinking mode. Raises `DataError` if it is not fast."""

    def __init__(self, tokenizer: Any, thinking: Thinking = "default") -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"the target's tokenizer ({type(tokenizer).__name__}) is not a fast one, so characters cannot be mapped to tokens",
                "save it as tokenizer.json (AutoTokenizer.from_pretrained(…, use_fast=True).save_pretrained(…))",
            )
        self._tokenizer = tokenizer
        self._backend = _exact_backend(tokenizer)
        self._finder = SpanFinder(ChatTemplate(tokenizer, thinking))
        self._added: dict[str, int] = tokenizer.get_added_vocab()
        probe = tokenizer("a")["input_ids"]
        self._first = [probe[0]] if len(probe) > 1 and probe[0] == tokenizer.bos_token_id else []

    def encode(self, documents: Sequence[Document]) -> list[EncodedDocument]:
        """The tokens of each document, in order."""
        rendered = [self._render(document) for document in documents]
        encodings = self._backend.encode_batch([r.text for r in rendered], add_special_tokens=False)
        return [
            self._plain(encoding) if document.messages is None else self._conversation(document, text, encoding)
            for document, text, encoding in zip(documents, rendered, encodings, strict=True)
        ]

    def _render(self, document: Document) -> Rendered:
        if document.messages is None:
            rendered = Rendered(document.text or "", [])
        elif not self._tokenizer.chat_template:
            raise DataError(
                f"{document.place} is a conversation, but the target's tokenizer has no chat template",
                "use the target's instruction-tuned version, put a chat_template.jinja beside its tokenizer, or prepare plain text",
            )
        else:
            rendered = self._finder.annotate(document)
        try:
            rendered.text.encode("utf-8")
        except UnicodeEncodeError as error:
            character = f"U+{ord(rendered.text[error.start]):04X}"
            raise DataError(f"{document.place}: half a surrogate pair ({character})", "fix the record's text") from None
        return rendered

    def _plain(self, encoding: Encoding) -> EncodedDocument:
        ids = np.array(self._first + encoding.ids, np.int32)
        mask = np.ones(len(ids), np.uint8)
        mask[:1] = 0
        return EncodedDocument(ids, mask)

    def _conversation(self, document: Document, rendered: Rendered, encoding: Encoding) -> EncodedDocument:
        whole = [self._tokens(encoding, span, 0) for span in rendered.spans]
        if None not in whole:
            return _masked(encoding.ids, [tokens for tokens in whole if tokens])
        return self._in_parts(document, rendered, encoding)

    def _tokens(self, encoding: Encoding, span: Span, offset: int) -> tuple[int, int] | None:
        """First token and end-of-turn token of `span` in the encoding of the text from character `offset` on; None if not exact."""
        first = encoding.char_to_token(span.start - offset)
        last = encoding.char_to_token(span.stop - offset)
        if first is None or last is None or encoding.ids[last] != self._added[span.end_of_turn]:
            return None
        where = encoding.token_to_chars(first)
        return (first, last) if where is not None and where[0] == span.start - offset else None

    def _in_parts(self, document: Document, rendered: Rendered, whole: Encoding) -> EncodedDocument:
        """Tokenise the text anew, cut where each span starts."""
        cuts = [0, *(span.start for span in rendered.spans), len(rendered.text)]
        pieces = [rendered.text[a:b] for a, b in pairwise(cuts)]
        ids: list[int] = []
        turns = []
        for number, encoding in enumerate(self._backend.encode_batch(pieces, add_special_tokens=False)):
            if number:
                span = rendered.spans[number - 1]
                tokens = self._tokens(encoding, span, span.start)
                if tokens is None:
                    raise self._inexact(document, number)
                turns.append((len(ids) + tokens[0], len(ids) + tokens[1]))
            ids += encoding.ids
        if self._text(ids) != self._text(whole.ids):
            raise self._inexact(document, len(turns))
        return _masked(ids, turns)

    def _text(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    @staticmethod
    def _inexact(document: Document, turn: int) -> DataError:
        return DataError(
            f"{document.place}: the tokenizer joins the beginning of assistant turn {turn} with what stands before it",
            "remove the blanks or marks at the beginning of that answer",
        )


def _masked(ids: list[int], turns: list[tuple[int, int]]) -> EncodedDocument:
    mask = np.zeros(len(ids), np.uint8)
    for first, last in turns:
        mask[first : last + 1] = 1
    mask[:1] = 0
    return EncodedDocument(np.array(ids, np.int32), mask, tuple(first for first, _ in turns))


def _exact_backend(tokenizer: Any) -> Tokenizer:
    """A copy of the Rust tokenizer that cuts and pads nothing and whose offsets include the blanks that tokens begin with."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for part in _nested(state):
        if part.get("type") == "ByteLevel" and "trim_offsets" in part:
            part["trim_offsets"] = False
    backend = Tokenizer.from_str(json.dumps(state))
    backend.no_truncation()
    backend.no_padding()
    return backend


def _nested(value: Any) -> list[dict[str, Any]]:
    """`value` and the objects in it that configure the tokenizer's stages."""
    found = []
    for key in ("pre_tokenizer", "post_processor", "decoder"):
        pending = [value.get(key)]
        while pending:
            part = pending.pop()
            if isinstance(part, dict):
                found.append(part)
                pending += part.values()
            elif isinstance(part, list):
                pending += part
    return found
