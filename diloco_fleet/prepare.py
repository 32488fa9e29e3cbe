"""Prepares a run directory: settings, corpus, folders."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from decoupled_diloco.errors import Reason, UsageError
from diloco_fleet.fleet_settings import Resolved
from diloco_fleet.run_files import RunFiles
from learner_client.files import storage_errors
from learner_client.train.corpus import open_corpus, write_corpus
from learner_client.train.data import num_windows
from learner_client.train.tokenizer import build_tokenizer


@contextmanager
def new_run(root: Path) -> Iterator[RunFiles]:
    """Creates a run directory; what was created goes again if the preparation fails.

    Raises:
        UsageError: CONFIG_CONFLICT when the directory exists and is not empty.
        DilocoError: DISK_FULL or STORAGE_FAILED.
    """
    with storage_errors(root, "creating"):
        occupied = any(root.iterdir()) if root.is_dir() else root.exists()
        if occupied:
            raise UsageError(
                Reason.CONFIG_CONFLICT,
                f"run directory {root} already exists; choose another --name, or --resume it",
                path=root,
            )
        root.mkdir(parents=True, exist_ok=True)
    try:
        yield RunFiles(root.resolve())
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise


def existing_run(*roots: Path) -> RunFiles:
    """Returns the run directory of an earlier run: the first of some that holds one.

    Raises:
        UsageError: RUN_NOT_FOUND when none does.
    """
    for root in roots:
        files = RunFiles(root.resolve())
        if files.config.is_file():
            return files
    raise UsageError(
        Reason.RUN_NOT_FOUND,
        f"there is no run in {' or '.join(map(str, dict.fromkeys(roots)))}: config.toml is "
        "missing; name a run directory",
        path=roots[0],
    )


def with_corpus(files: RunFiles, resolved: Resolved) -> Resolved:
    """Writes the corpus, where there is none yet; returns the settings with what follows from it.

    Raises:
        UsageError: DATA_MISSING, DATA_EMPTY, DATA_BINARY, DATA_MISMATCH, CONFIG_INVALID.
        DilocoError: DISK_FULL or STORAGE_FAILED.
    """
    trainer = resolved.trainer.value
    if files.data.exists():
        info = open_corpus(files.data, trainer.corpus_hash).info
    else:
        info = write_corpus(
            resolved.fleet.value.data,
            files.data,
            build_tokenizer(trainer.tokenizer),
            sequence_length=trainer.sequence_length,
        )
    return resolved.with_corpus(info.hash, num_windows(info.num_tokens, trainer.sequence_length))


def write_run(files: RunFiles, resolved: Resolved) -> None:
    """Writes the settings and creates the folders of a run.

    Raises:
        DilocoError: DISK_FULL or STORAGE_FAILED.
    """
    with storage_errors(files.root, "writing"):
        for folder in (files.logs, files.metrics, files.store):
            folder.mkdir(exist_ok=True)
        files.config.write_text(resolved.to_toml(), encoding="utf-8")
        files.trainer.write_text(resolved.trainer.value.to_json() + "\n", encoding="utf-8")
