"""A real fleet for tests, however it was started: read through its files, struck by pid."""

from __future__ import annotations

import json
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from redis import Redis
from redis.exceptions import ConnectionError as RedisGone

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.plain import to_plain
from diloco_fleet.metrics import RunMetrics, read_metrics
from diloco_fleet.run_files import FleetFile, RunFiles, read_fleet
from diloco_fleet.status import LEADING, StatusClient, who_leads

T = TypeVar("T")

PATIENCE_S = 150.0
"""How long a condition may take to come true; no test asserts that it took less."""

Lines = list[dict[str, Any]]


def wait_for(condition: Callable[[], T], what: str, *, alive: Callable[[], str] = lambda: "") -> T:
    """Polls until the condition is truthy and returns it.

    Args:
        condition: what is waited for.
        what: the same in words.
        alive: says why the condition can no longer come true; empty while it can.
    """
    give_up = time.monotonic() + PATIENCE_S
    while True:
        ended = alive()
        found = condition()
        if found:
            return found
        assert not ended, f"waited for {what}: {ended}"
        assert time.monotonic() < give_up, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.05)


def read_lines(path: Path) -> Lines:
    """Reads JSON lines; the last one may be half written, and that of a killed life torn."""
    lines: Lines = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return lines
    for line in text.split("\n"):
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


class FleetView(ABC):
    """What tests look at and do to the processes of a fleet.

    Args:
        files: the run directory.
        standby: whether there are two synchronizers.
    """

    def __init__(self, files: RunFiles, *, standby: bool) -> None:
        self.files = files
        self.synchronizers = ("synchronizer-0", "synchronizer-1") if standby else ("synchronizer",)

    @abstractmethod
    def ended(self) -> str:
        """Why nothing more will happen; empty while the fleet is at work."""

    def wait_until(self, condition: Callable[[], T], what: str) -> T:
        """Waits for a condition; fails at once where the fleet has ended."""
        return wait_for(condition, what, alive=self.ended)

    # -- looking ----------------------------------------------------------------------------------

    def state(self) -> FleetFile:
        """What ``fleet.json`` says."""
        return read_fleet(self.files.fleet)

    def lines(self, process: str, *kinds: str) -> Lines:
        """Metrics lines of a process, of these kinds or all."""
        lines = read_lines(self.files.metrics_of(process))
        return [line for line in lines if not kinds or line["kind"] in kinds]

    def rounds(self) -> Lines:
        """Committed rounds of all synchronizers in the order in which they were written."""
        return self.synchronizer_lines("round")

    def synchronizer_lines(self, *kinds: str) -> Lines:
        """Metrics lines of all synchronizers in the order in which they were written."""
        lines = [line for name in self.synchronizers for line in self.lines(name, *kinds)]
        return sorted(lines, key=lambda line: float(line["time"]))

    def metrics(self) -> RunMetrics:
        """Everything that was written so far, as the report reads it."""
        return read_metrics(self.files.metrics)

    def steps(self, index: int) -> Lines:
        """Inner steps of a learner."""
        return self.lines(f"learner-{index}", "step")

    def global_step(self) -> int:
        """The last committed global step that was written down."""
        rounds = self.rounds()
        return int(rounds[-1]["global_step"]) if rounds else 0

    def wait_for_rounds(self, number: int) -> Lines:
        """Waits until so many more rounds are committed; returns them."""
        before = len(self.rounds())
        what = f"{number} more rounds"
        self.wait_until(lambda: len(self.rounds()) >= before + number, what)
        return self.rounds()[before:]

    def status(self) -> dict[str, Any]:
        """What the synchronizer sees now, by its admin service; empty while it does not answer."""
        client = StatusClient(self.state().address)
        try:
            plain = to_plain(client.status())
        except DilocoError as error:
            if error.reason is not Reason.UNAVAILABLE:
                raise
            return {}
        finally:
            client.close()
        assert isinstance(plain, dict)
        return plain

    def roles(self) -> dict[str, str]:
        """Role of every synchronizer by name: leading, following, waiting or away."""
        client = StatusClient(self.state().address)
        try:
            seen = client.look()
        except DilocoError as error:
            if error.reason is not Reason.UNAVAILABLE:
                raise
            return dict.fromkeys(self.synchronizers, "away")
        finally:
            client.close()
        leading = who_leads(seen)
        return {
            name: "deposed" if entry.role == LEADING and entry is not leading else entry.role
            for name, entry in zip(self.synchronizers, seen, strict=True)
        }

    def leader(self) -> str | None:
        """Name of the synchronizer that leads; None while none does."""
        return self._of_role(LEADING)

    def follower(self) -> str | None:
        """Name of a synchronizer that follows; None while none does."""
        return self._of_role("following")

    def _of_role(self, role: str) -> str | None:
        return next((name for name, found in self.roles().items() if found == role), None)

    def in_sync(self) -> bool:
        """Whether a take-over now would lose nothing: a standby is in sync, says the leader."""
        replication = self.status().get("replication") or {}
        return any(entry["in_sync"] for entry in replication.get("replicas", ()))

    def report(self) -> dict[str, Any]:
        """Content of ``report.json``."""
        report: dict[str, Any] = json.loads((self.files.root / "report.json").read_text())
        return report

    # -- disturbing -------------------------------------------------------------------------------

    def process_pid(self, name: str) -> int | None:
        """Pid of a process of the fleet while it runs."""
        return next(entry.pid for entry in self.state().processes if entry.name == name)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> float:
        """Sends a signal to a process of this fleet; returns the unix time just before."""
        # What is being started has no command line yet; what has ended may still be written down.
        pid = self.wait_until(lambda: self._own_pid(name), f"{name} to run")
        now = time.time()
        os.kill(pid, number)
        return now

    def _own_pid(self, name: str) -> int | None:
        """Pid of a process of the fleet, once it is seen to be this fleet's."""
        pid = self.process_pid(name)
        return pid if pid in self.pids() else None

    def freeze(self, name: str) -> float:
        """Stops a process where it stands; returns the unix time just before."""
        return self.kill(name, signal.SIGSTOP)

    def thaw(self, name: str) -> float:
        """Lets a frozen process go on; returns the unix time just before."""
        return self.kill(name, signal.SIGCONT)

    def hold_back(self, name: str, pid: int) -> None:
        """Stops the next life of a process as it begins; `thaw` lets it go on.

        A leader that is started again at once may be back before its lease has ended, and lead on.

        Args:
            name: the process.
            pid: of the life that has ended.
        """
        self.wait_until(lambda: self.process_pid(name) not in {None, pid}, f"{name} to come back")
        self.freeze(name)

    def redis(self) -> Redis:
        """A client of the fleet's own Redis; its process is called ``redis``."""
        lines = self.files.redis_config.read_text().splitlines()
        config = dict(line.split(" ", 1) for line in lines)
        return Redis(
            port=int(config["port"]), password=config["requirepass"], socket_timeout=PATIENCE_S
        )

    def redis_answers(self) -> bool:
        """Whether the fleet's Redis is there."""
        try:
            with self.redis() as client:
                return bool(client.ping())
        except RedisGone:
            return False

    def empty_redis(self) -> float:
        """Takes everything out of the fleet's Redis; returns the unix time just before."""
        now = time.time()
        with self.redis() as client:
            client.flushall()
        return now

    def pids(self) -> set[int]:
        """Every process on this machine that works on this run directory, ``diloco run`` too."""
        return set(pids_naming(str(self.files.root)))


def pids_naming(word: str) -> Iterator[int]:
    """Processes with a word in their command line or that work below a folder of that name.

    A zombie has neither; a redis-server writes a command line of its own.
    """
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            place = str((folder / "cwd").readlink())
        except OSError:
            continue
        if word in command or Path(place).is_relative_to(word):
            yield int(folder.name)
