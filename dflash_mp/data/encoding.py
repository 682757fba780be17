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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from dflash_mp.data.chat_template import ChatTemplate, TemplateProblem, Thinking
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
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=itemgetter(1)):
        digest.update(b"%d %b\n" % (index, token.encode("utf-8", "surrogatepass")))
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    facts = [sorted(tokenizer.get_added_vocab().items()), special, tokenizer(_PROBE)["input_ids"]]
    digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()[:16]


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
        self._lossless = _is_lossless(self._backend)
        self._template = ChatTemplate(tokenizer, thinking)
        self._finder = SpanFinder(self._template)
        self._added: dict[str, int] = tokenizer.get_added_vocab()
        probe = tokenizer("a")["input_ids"]
        self._first = [probe[0]] if len(probe) > 1 and probe[0] == tokenizer.bos_token_id else []

    def encode(self, documents: Sequence[Document]) -> list[EncodedDocument]:
        """The tokens of each document, in order."""
        return next(iter(self.encode_batches([documents])))[1] if documents else []

    def encode_batches(
        self, batches: Iterable[Sequence[Document]]
    ) -> Iterator[tuple[Sequence[Document], list[EncodedDocument]]]:
        """Each batch with the tokens of its documents. The next batch is read and rendered while one is tokenised."""
        with ThreadPoolExecutor(1, thread_name_prefix="tokenise") as thread:
            pending: tuple[Sequence[Document], list[Rendered], Future[list[Encoding]]] | None = None
            for batch in batches:
                rendered = [self._render(document) for document in batch]
                encodings = thread.submit(self._tokenise, [text.text for text in rendered])
                if pending:
                    yield pending[0], self._mask(pending[0], pending[1], pending[2].result())
                pending = batch, rendered, encodings
            if pending:
                yield pending[0], self._mask(pending[0], pending[1], pending[2].result())

    def opens_thought(self) -> bool:
        """Whether the template's generation prompt opens the thought, so that an answer need not."""
        if not self._tokenizer.chat_template:
            return False
        try:
            return bool(self._template.opened_thought)
        except (
            TemplateProblem
        ):  # it takes no single question; a conversation that it refuses is named where it is rendered
            return False

    def _tokenise(self, texts: list[str]) -> list[Encoding]:
        return self._backend.encode_batch(texts, add_special_tokens=False)

    def _mask(
        self, documents: Sequence[Document], rendered: list[Rendered], encodings: list[Encoding]
    ) -> list[EncodedDocument]:
        encoded: list[EncodedDocument] = []
        joined: list[int] = []
        for number, (text, encoding) in enumerate(zip(rendered, encodings, strict=True)):
            turns = [self._tokens(encoding, span, 0) for span in text.spans]
            if None in turns:
                joined.append(number)
            plain = documents[number].messages is None
            encoded.append(self._plain(encoding) if plain else _masked(encoding.ids, [turn for turn in turns if turn]))
        for number, apart in zip(joined, self._encode_apart([rendered[n] for n in joined]), strict=True):
            encoded[number] = self._check_apart(documents[number], apart, encodings[number])
        return encoded

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

    def _tokens(self, encoding: Encoding, span: Span, offset: int) -> tuple[int, int] | None:
        """First token and end-of-turn token of `span` in the encoding of the text from character `offset` on; None if not exact."""
        first = encoding.char_to_token(span.start - offset)
        last = encoding.char_to_token(span.stop - offset)
        if first is None or last is None or encoding.ids[last] != self._added[span.end_of_turn]:
            return None
        where = encoding.token_to_chars(first)
        return (first, last) if where is not None and where[0] == span.start - offset else None

    def _encode_apart(self, texts: list[Rendered]) -> Iterator[tuple[list[int], list[tuple[int, int] | None]]]:
        """Ids and turns of each text when it is cut where a span starts."""
        cuts = [[0, *(span.start for span in text.spans), len(text.text)] for text in texts]
        pieces = [text.text[a:b] for text, places in zip(texts, cuts, strict=True) for a, b in pairwise(places)]
        encodings = iter(self._tokenise(pieces))
        for text in texts:
            ids: list[int] = next(encodings).ids
            turns: list[tuple[int, int] | None] = []
            for span in text.spans:
                encoding = next(encodings)
                turn = self._tokens(encoding, span, span.start)
                turns.append((turn[0] + len(ids), turn[1] + len(ids)) if turn else None)
                ids += encoding.ids
            yield ids, turns

    def _check_apart(
        self, document: Document, apart: tuple[list[int], list[tuple[int, int] | None]], whole: Encoding
    ) -> EncodedDocument:
        ids, turns = apart
        exact = [turn for turn in turns if turn]
        if len(exact) < len(turns) or not (self._lossless or self._text(ids) == self._text(whole.ids)):
            raise DataError(
                f"{document.place}: the tokenizer joins the beginning of an assistant's turn with what stands before it",
                "remove the blanks or marks at the beginning of that answer",
            )
        return _masked(ids, exact)

    def _text(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


def _masked(ids: list[int], turns: list[tuple[int, int]]) -> EncodedDocument:
    mask = np.zeros(len(ids), np.uint8)
    for first, last in turns:
        mask[first : last + 1] = 1
    mask[:1] = 0
    return EncodedDocument(np.array(ids, np.int32), mask, tuple(first for first, _ in turns))


def _exact_backend(tokenizer: Any) -> Tokenizer:
    """The Rust tokenizer, or a copy of it that cuts and pads nothing and whose offsets include the blanks that tokens begin with."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    trims = "trim_offsets=True" in repr(backend.post_processor)
    if not trims and backend.truncation is None and backend.padding is None:
        return backend
    # A quotation mark inside a token is escaped, so this is a key and its value wherever it stands.
    copy = Tokenizer.from_str(backend.to_str().replace('"trim_offsets":true', '"trim_offsets":false'))
    copy.no_truncation()
    copy.no_padding()
    return copy


def _is_lossless(backend: Tokenizer) -> bool:
    """Whether the tokens of two parts of a text, put together, always stand for the whole text."""
    pre_tokenizer = repr(backend.pre_tokenizer)
    return backend.normalizer is None and "ByteLevel" in pre_tokenizer and "add_prefix_space=True" not in pre_tokenizer
