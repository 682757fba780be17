"""The rule of CONTRIBUTING.md about versions: what carries the same number is read, what carries another is refused with what to do.

`tests/formats/` holds what the first release of each number wrote.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgpack
import pytest
import synthetic_rows
import torch
from synthetic_rows import SyntheticRows, make_config, make_trainer

from dflash_mp.data import manifest
from dflash_mp.data.store import PreparedDataset
from dflash_mp.drafter import checkpoint, state
from dflash_mp.drafter.report import Reporter
from dflash_mp.drafter.trainer import train
from dflash_mp.errors import CheckpointError, DataError
from dflash_mp.stream import messages as m
from dflash_mp.stream import ring_messages
from dflash_mp.stream.layout import RowLayout

FORMATS = Path(__file__).parent / "formats"
OLD_FRAMES: dict[str, str] = json.loads((FORMATS / "messages-1.json").read_text())


# -- messages ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OLD_FRAMES)
def test_a_message_of_the_first_release_is_read_and_answered_in_its_own_words(name: str) -> None:
    frame = bytes.fromhex(OLD_FRAMES[name])
    message = m.decode(frame)
    assert type(message).__name__ == name
    assert m.encode(message) == frame  # nothing is added that an older peer wouldn't know


@pytest.mark.parametrize("version", [m.VERSION - 1, m.VERSION + 1])
@pytest.mark.parametrize("name", ["Hello", "Welcome"])
def test_another_version_of_the_protocol_is_refused_before_anything_else_is_read(name: str, version: int) -> None:
    tree: dict[str, Any] = {**msgpack.unpackb(bytes.fromhex(OLD_FRAMES[name])), "version": version, "unheard of": 1}
    with pytest.raises(m.VersionError, match=f"version {version}, this side version {m.VERSION}") as caught:
        m.decode(msgpack.packb(tree))
    assert "install the same version of dflash-mp on both sides" in caught.value.remedy


def test_a_fact_that_is_not_known_is_named_and_not_guessed() -> None:
    tree = {**msgpack.unpackb(bytes.fromhex(OLD_FRAMES["Ping"])), "temperature": 3}
    with pytest.raises(m.ProtocolError, match="temperature"):
        m.decode(msgpack.packb(tree))


# -- checkpoints ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Synthetic rows of the small target that the stored checkpoint was trained on."""
    plan = state.plan_of(checkpoint.read_state(FORMATS / "checkpoint-1"), FORMATS / "checkpoint-1")
    vocab, hidden = plan.target.vocab_size, plan.target.hidden_size
    embedding = (torch.arange(vocab * hidden, dtype=torch.float32).reshape(vocab, hidden) * 0.37).sin()
    values = {"VOCAB": vocab, "HIDDEN": hidden, "TOKENS": plan.data.row_tokens, "PLAN": plan, "EMBEDDING": embedding}
    for name, value in {**values, "LAYOUT": RowLayout.of(plan)}.items():
        monkeypatch.setattr(synthetic_rows, name, value)


def test_training_goes_on_from_a_checkpoint_of_the_first_release(tmp_path: Path, small_rows: None) -> None:
    shutil.copytree(FORMATS / "checkpoint-1", tmp_path / "checkpoints" / "step-00000002")
    config = make_config(tmp_path, steps=4, objective="decay", schedule="cosine")
    config = config.model_copy(update={"drafter": config.drafter.model_copy(update={"layers": 1})})
    rows = SyntheticRows()
    trainer = make_trainer(config, rows, checkpoint.find(tmp_path))
    assert trainer.step == 2
    with Reporter(tmp_path, enabled=True) as report:
        assert train(trainer, rows, report, state.save, lambda: False)
    expected = json.loads((FORMATS / "checkpoint-1-goes-on.json").read_text())
    trained = checkpoint.load(tmp_path / "checkpoints" / "step-00000004").weights
    assert trained.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(trained[name].flatten()[:4], torch.tensor(values), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("number", [checkpoint.FORMAT - 1, checkpoint.FORMAT + 1])
def test_a_checkpoint_of_another_format_is_refused_with_what_to_do(tmp_path: Path, number: int) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(FORMATS / "checkpoint-1", directory)
    facts = json.loads((directory / "state.json").read_text())
    (directory / "state.json").write_text(json.dumps({**facts, "format": number}))
    for read in (checkpoint.read_state, checkpoint.load, checkpoint.load_weights):
        with pytest.raises(CheckpointError, match=f"format {number}; this version .* reads format") as caught:
            read(directory)  # type: ignore[operator]
        assert "resume with the version that wrote it, or start in a new run_dir" in caught.value.remedy


def test_facts_that_a_later_release_adds_to_a_checkpoint_do_no_harm(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(FORMATS / "checkpoint-1", directory)
    facts = json.loads((directory / "state.json").read_text())
    (directory / "state.json").write_text(json.dumps({**facts, "weather": "fine"}))
    assert checkpoint.load(directory).step == 2


# -- datasets ---------------------------------------------------------------------------------------------------------------------


def test_a_dataset_of_the_first_release_is_read() -> None:
    dataset = PreparedDataset.open(FORMATS / "dataset-1")
    assert dataset.rows("train") >= 1
    row = dataset.row("train", 0)
    assert len(row.input_ids) == dataset.manifest.row_tokens == 128
    assert 0 < row.loss_mask.sum() < 128


@pytest.mark.parametrize("number", [manifest.FORMAT - 1, manifest.FORMAT + 1])
def test_a_dataset_of_another_format_is_refused_with_what_to_do(tmp_path: Path, number: int) -> None:
    shutil.copytree(FORMATS / "dataset-1", tmp_path / "data")
    facts = json.loads((tmp_path / "data" / manifest.FILE).read_text())
    (tmp_path / "data" / manifest.FILE).write_text(json.dumps({**facts, "format": number}))
    with pytest.raises(DataError, match=f"has format {number}; this version reads {manifest.FORMAT}") as caught:
        PreparedDataset.open(tmp_path / "data")
    assert "dflash-mp prepare --force" in caught.value.remedy


# -- the rule, written down -------------------------------------------------------------------------------------------------------


def test_the_changelog_names_the_numbers_of_the_release() -> None:
    root = Path(__file__).parent.parent
    newest = re.split(r"^## ", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    assert f"Messages {m.VERSION}, checkpoints {checkpoint.FORMAT}, prepared datasets {manifest.FORMAT}" in newest
    assert f"shared memory {ring_messages.VERSION}" in newest
    told = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for file in ("stream/messages.py", "stream/ring_messages.py", "drafter/checkpoint.py", "data/manifest.py"):
        assert f"`{file}`" in told
