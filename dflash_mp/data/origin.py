"""What was noted beside a file of generated answers: the target's tokenizer, chat template and thinking mode.

Answers of another template or mode would be supervised as if the target spoke so; `check_origin` refuses them. It costs one small file per source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_mp.errors import DataError

_REMEDIES = {
    "thinking": "set data.thinking to the mode of the answers, or generate them anew with dflash-mp regenerate --thinking",
    "tokenizer": "prepare for the target that wrote the answers, or let this one write them: dflash-mp regenerate",
    "chat_template": "prepare for the target that wrote the answers, or let this one write them: dflash-mp regenerate",
}


def settings_file(answers: Path) -> Path:
    """Where the settings lie with which `answers` were generated."""
    return answers.with_name(answers.name + ".settings.json")


def check_origin(answers: Path, settings: Mapping[str, Any]) -> None:
    """Raise `DataError` if the settings beside `answers`, where there are any, name another of these than `settings` do."""
    file = settings_file(answers)
    try:
        noted = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file}, the settings of {answers}: {error}", "repair or remove it") from None
    if not isinstance(noted, dict):
        raise DataError(f"{file} does not hold the settings of {answers}", "repair or remove it")
    for key, remedy in _REMEDIES.items():
        if key in noted and noted[key] != settings[key]:
            raise DataError(
                f"{answers} was generated with {key} {noted[key]}, and is prepared with {key} {settings[key]}", remedy
            )
