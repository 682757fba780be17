"""`dflash-mp bench prepare`: how close `prepare` comes to the speed of the tokenizer alone.

Both work on the same text in the same process, alternating: the tokenizer on a list of texts rendered beforehand, in batches and on all
cores (what `prepare` can't beat), and `prepare` from the source files to the finished dataset. The median of the ratios is what counts.
"""

from __future__ import annotations

import json
import re
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mp.config import DataConfig, SourceConfig
from dflash_mp.data.documents import to_document
from dflash_mp.data.prepare import prepare
from dflash_mp.data.sources import read_source

_BATCH_DOCUMENTS = 1024
_DEFINITION = re.compile(r"\n(?=(?:def|class|@)\b)")


@dataclass(frozen=True)
class PrepareSpeed:
    """Tokens per second of each measured pair, and what was read."""

    documents: int
    tokens: int
    prepare: list[float]
    tokenizer: list[float]

    @property
    def ratio(self) -> float:
        """Median over the pairs of `prepare`'s speed over the tokenizer's."""
        return statistics.median(p / t for p, t in zip(self.prepare, self.tokenizer, strict=True))

    def lines(self) -> list[str]:
        """The result in words."""
        return [
            f"text             {self.documents:,} documents, {self.tokens:,} tokens",
            f"tokenizer alone  {statistics.median(self.tokenizer):,.0f} tokens/s",
            f"prepare          {statistics.median(self.prepare):,.0f} tokens/s",
            f"ratio            {self.ratio:.2f} (median of {len(self.prepare)} pairs)",
        ]


def bench_prepare(
    tokenizer: Any, data: DataConfig | None = None, rounds: int = 5, megabytes: float = 8
) -> PrepareSpeed:
    """Measure `rounds` pairs on the sources and settings of `data`, or on `megabytes` of the standard library's source text."""
    with tempfile.TemporaryDirectory(prefix="dflash-mp-bench-") as directory:
        if data is None:
            path = Path(directory) / "library.jsonl"
            _write_library(path, int(megabytes * 1e6), conversations=bool(tokenizer.chat_template))
            data = DataConfig(
                path=Path(directory) / "prepared", sources=[SourceConfig.model_validate({"path": str(path)})]
            )
        data = data.model_copy(update={"path": Path(directory) / "prepared"})
        texts = [text for source in data.sources for text in _rendered(source, tokenizer)]
        tokens = _tokenize(texts, tokenizer)
        pairs = [_pair(data, texts, tokenizer, tokenizer_first=number % 2 == 0) for number in range(rounds)]
    return PrepareSpeed(len(texts), tokens, [tokens / p for _, p in pairs], [tokens / t for t, _ in pairs])


def _tokenize(texts: list[str], tokenizer: Any) -> int:
    batches = (texts[start : start + _BATCH_DOCUMENTS] for start in range(0, len(texts), _BATCH_DOCUMENTS))
    return sum(len(ids) for batch in batches for ids in tokenizer(batch, add_special_tokens=False)["input_ids"])


def _pair(data: DataConfig, texts: list[str], tokenizer: Any, tokenizer_first: bool) -> tuple[float, float]:
    """Seconds of the tokenizer alone and of `prepare`."""
    if tokenizer_first:
        alone = _timed(lambda: _tokenize(texts, tokenizer))
        return alone, _timed(lambda: _prepare(data, tokenizer))
    prepared = _timed(lambda: _prepare(data, tokenizer))
    return _timed(lambda: _tokenize(texts, tokenizer)), prepared


def _prepare(data: DataConfig, tokenizer: Any) -> None:
    prepare(data, tokenizer, seed=0, force=True)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _rendered(source: SourceConfig, tokenizer: Any) -> Iterator[str]:
    for record in read_source(source):
        document = to_document(record, source.format)
        if document.messages is None:
            yield document.text or ""
        else:
            yield tokenizer.apply_chat_template(document.messages, tools=document.tools, tokenize=False)


def _write_library(path: Path, size: int, conversations: bool) -> None:
    """JSON lines of the standard library's modules in pieces: questions and answers, or texts."""
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for module in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            for number, piece in enumerate(_DEFINITION.split(module.read_text(encoding="utf-8")), start=1):
                question = f"Write part {number} of the module {module.stem}."
                record = {"prompt": question, "response": piece} if conversations else {"text": piece}
                file.write(json.dumps(record) + "\n")
                written += len(piece)
                if written >= size:
                    return
