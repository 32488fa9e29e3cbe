"""The run directory: where everything of one run lies, and how others find a running fleet."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.snapshots import part_name

RUNS_FOLDER: Final = Path("runs")
"""Where runs go when nothing else is said, below the current folder."""

_LOCK_WAIT_S = 2.0
_WORDS = (
    "alder",
    "amber",
    "aspen",
    "basil",
    "birch",
    "brook",
    "cedar",
    "cider",
    "clove",
    "coral",
    "crane",
    "delta",
    "dune",
    "ember",
    "fern",
    "fjord",
    "flint",
    "gale",
    "grove",
    "hazel",
    "heath",
    "holly",
    "iris",
    "ivory",
    "jade",
    "juniper",
    "kelp",
    "laurel",
    "lilac",
    "linden",
    "lotus",
    "maple",
)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths inside one run directory.

    Attributes:
        root: the run directory.
    """

    root: Path

    @property
    def config(self) -> Path:
        """Resolved settings of the run, TOML."""
        return self.root / "config.toml"

    @property
    def trainer(self) -> Path:
        """Settings of the trainer as the synchronizer serves them, JSON."""
        return self.root / "trainer.json"

    @property
    def synchronizer_config(self) -> Path:
        """Settings of the run for synchronizers that `diloco run` does not start, TOML."""
        return self.root / "synchronizer.toml"

    @property
    def data(self) -> Path:
        """The corpus of the run."""
        return self.root / "data"

    @property
    def store(self) -> Path:
        """The store of the only synchronizer, or of the first."""
        return self.store_of(0)

    @property
    def key(self) -> Path:
        """The secret that signs claims of leadership; runs with a standby have one."""
        return self.root / "synchronizer.key"

    @property
    def redis(self) -> Path:
        """Folder of the fleet's own Redis."""
        return self.root / "redis"

    @property
    def redis_config(self) -> Path:
        """Configuration of the fleet's own Redis, with its password."""
        return self.redis / "redis.conf"

    @property
    def snapshots(self) -> Path:
        """Snapshots of the whole fleet."""
        return self.root / "snapshots"

    def resume_part(self, learner_id: str) -> Path:
        """Part of a snapshot that a learner is to go on from at the start of the fleet."""
        return self.root / "resume" / part_name(learner_id)

    @property
    def logs(self) -> Path:
        """Folder of one log per process."""
        return self.root / "logs"

    @property
    def metrics(self) -> Path:
        """Folder of one JSONL file per process."""
        return self.root / "metrics"

    @property
    def model(self) -> Path:
        """Folder of the exported model."""
        return self.root / "model"

    @property
    def report(self) -> Path:
        """The figures of the run, Markdown."""
        return self.root / "report.md"

    @property
    def fleet(self) -> Path:
        """Pids, address and state of the fleet, JSON."""
        return self.root / "fleet.json"

    @property
    def lock(self) -> Path:
        """Held for as long as ``diloco run`` is at work in this directory."""
        return self.root / ".lock"

    def store_of(self, index: int) -> Path:
        """Returns the store of a synchronizer; a run without a standby has the first."""
        return self.root / (f"store-{index}" if index else "store")

    def log_of(self, process: str) -> Path:
        """Returns the log file of a process."""
        return self.logs / f"{process}.log"

    def metrics_of(self, process: str) -> Path:
        """Returns the metrics file of a process."""
        return self.metrics / f"{process}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEntry:
    """One process as ``fleet.json`` shows it.

    Attributes:
        name: ``synchronizer``, ``evaluator`` or ``learner-0`` and so on.
        pid: process id, or None while none is running.
        state: ``running``, ``waiting`` (for its restart), ``done``, ``stopped`` or ``failed``.
        restarts: how often it was started again.
        exit_code: of its last life; minus the signal's number where a signal ended it.
        log: path of its log, relative to the run directory.
    """

    name: str
    pid: int | None
    state: str
    restarts: int
    exit_code: int | None
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFile:
    """What ``fleet.json`` holds.

    Attributes:
        run_id: id of the run.
        address: host:port of the synchronizer; of several, separated by commas.
        pid: of ``diloco run``.
        state: ``running``, ``finishing``, ``draining`` or ``ended``.
        started: unix time.
        processes: every process of the fleet.
        pages: where a browser finds the status page of each synchronizer.
    """

    run_id: str
    address: str
    pid: int
    state: str
    started: float
    processes: tuple[ProcessEntry, ...]
    pages: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all.

        Raises:
            DilocoError: DISK_FULL or STORAGE_FAILED.
        """
        # Not at the top: learner_client imports torch, for which `diloco status` does not wait.
        from learner_client.files import write_atomically

        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        write_atomically(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def read_fleet(path: Path) -> FleetFile:
    """Reads ``fleet.json``.

    Raises:
        UsageError: RUN_NOT_FOUND when it is missing or is not such a file.
    """
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        processes = tuple(ProcessEntry(**entry) for entry in values.pop("processes"))
        pages = tuple(str(page) for page in values.pop("pages", ()))
        return FleetFile(processes=processes, pages=pages, **values)
    except OSError as error:
        raise UsageError(
            Reason.RUN_NOT_FOUND,
            f"{path} cannot be read ({error.strerror}); name a run directory of `diloco run`",
            path=path,
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(
            Reason.RUN_NOT_FOUND,
            f"{path} does not describe a fleet; name a run directory of `diloco run`",
            path=path,
        ) from error


def new_run_id(now: datetime, randomness: random.Random) -> str:
    """Returns an id that sorts by date and can be spoken, as in ``20260131-0930-amber``."""
    return f"{now:%Y%m%d-%H%M}-{randomness.choice(_WORDS)}"


@contextmanager
def hold_run(files: RunFiles) -> Iterator[None]:
    """Keeps the run directory for this process; the kernel lets go of it when the process dies.

    Raises:
        UsageError: CONFIG_CONFLICT when another fleet is at work there.
        DilocoError: DISK_FULL or STORAGE_FAILED.
    """
    from learner_client.files import storage_errors

    with storage_errors(files.lock, "opening"):
        descriptor = os.open(files.lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        # A look by `diloco status` takes the lock for an instant.
        give_up = time.monotonic() + _LOCK_WAIT_S
        while not _try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > give_up:
                raise _occupied(files)
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def is_running(files: RunFiles) -> bool:
    """Says whether ``diloco run`` is at work in this run directory."""
    try:
        descriptor = os.open(files.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def refuse_running(files: RunFiles) -> None:
    """Refuses a run directory in which a fleet is at work.

    Raises:
        UsageError: CONFIG_CONFLICT.
    """
    if is_running(files):
        raise _occupied(files)


def _occupied(files: RunFiles) -> UsageError:
    return UsageError(
        Reason.CONFIG_CONFLICT,
        f"a fleet is running in {files.root}; stop it first, or choose another --name",
        path=files.root,
    )


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def find_run(runs_folder: Path, *, running: bool) -> RunFiles:
    """Returns the newest run below a folder, by the time its fleet was started.

    Args:
        runs_folder: the folder that holds run directories.
        running: only look among runs whose fleet is at work.

    Raises:
        UsageError: RUN_NOT_FOUND.
    """
    candidates = []
    for path in runs_folder.glob("*/fleet.json"):
        files = RunFiles(path.parent)
        try:
            started = read_fleet(path).started
        except UsageError:
            continue
        if not running or is_running(files):
            candidates.append((started, files))
    if not candidates:
        kind = "running fleet" if running else "run"
        raise UsageError(
            Reason.RUN_NOT_FOUND,
            f"no {kind} under {runs_folder.resolve()}; give --run-dir, or start one with "
            "`diloco run`",
        )
    return max(candidates, key=lambda candidate: candidate[0])[1]
