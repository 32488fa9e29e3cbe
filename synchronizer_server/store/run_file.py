"""The run's description on disk, and whose store this is."""

from __future__ import annotations

from decoupled_diloco.errors import DilocoError, Reason
from synchronizer_server.store.base import RunDescription
from synchronizer_server.store.envelope import decode_run
from synchronizer_server.store.files import read_if_exists
from synchronizer_server.store.paths import StorePaths


def read_run(paths: StorePaths, run_id: str) -> RunDescription | None:
    """See ``RoundStore.read_run``."""
    path = paths.run
    data = read_if_exists(path)
    if data is None:
        if paths.records():
            raise DilocoError(
                Reason.STORE_LOST,
                f"{path} is missing, but rounds are there; restore it from a backup, or begin "
                "a new run in an empty directory",
                path=path,
            )
        return None
    try:
        held, description = decode_run(data)
    except DilocoError as error:
        raise DilocoError(
            Reason.STORE_CORRUPT,
            f"{path} is damaged: {error.message}; restore it from a backup, or begin a new "
            "run in an empty directory",
            path=path,
        ) from error
    if held != run_id:
        raise DilocoError(
            Reason.RUN_MISMATCH,
            f"{paths.root} holds run {held!r}, not {run_id!r}; give this run a "
            "directory of its own",
            path=paths.root,
        )
    return description
