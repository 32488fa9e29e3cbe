"""Which learner a process is: the id that it was given, or one that it keeps in a file."""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path
from typing import Final

from decoupled_diloco.errors import Reason, UsageError
from learner_client.files import storage_errors, write_atomically
from learner_client.settings import LearnerSettings

_MAX_BYTES: Final = 256
_RANDOM_BYTES: Final = 4


def identified(settings: LearnerSettings) -> LearnerSettings:
    """Returns the settings with an id: the given one, else that of the file, else a new one.

    A new id is written to the file before it is used, so that the next life is the same learner.

    Raises:
        UsageError: CONFIG_INVALID where there is neither an id nor a file for one, or the file
            holds none.
        DilocoError: DISK_FULL or STORAGE_FAILED.
    """
    path = settings.learner_id_file
    if settings.learner_id:
        return settings
    if path is None:
        raise UsageError(
            Reason.CONFIG_INVALID,
            "learner_id is empty; give --learner-id a stable name, or --learner-id-file a file "
            "that keeps one",
        )
    if path.exists():
        learner_id = _read(path)
    else:
        learner_id = f"learner-{secrets.token_hex(_RANDOM_BYTES)}"
        with storage_errors(path.parent, "creating"):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: _write(temporary, learner_id))
    return dataclasses.replace(settings, learner_id=learner_id)


def _read(path: Path) -> str:
    with storage_errors(path, "reading"), path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    text = content.decode("ascii", errors="replace").strip()
    if len(content) > _MAX_BYTES or not text or not all(c.isalnum() or c in "-_." for c in text):
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"learner_id_file {path} holds no id of letters, digits, '-', '_' and '.'; remove the "
            "file for a new id",
        )
    return text


def _write(path: Path, learner_id: str) -> None:
    path.write_text(learner_id + "\n", encoding="ascii")
