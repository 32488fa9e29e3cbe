"""Striking a fleet that runs already: known by its run directory, and left running."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.errors import EXIT_USAGE, Reason, UsageError
from diloco_fleet.chaos.conductor import Begin
from diloco_fleet.chaos.injector import refuse_impossible
from diloco_fleet.chaos.process_injector import AttachedInjector
from diloco_fleet.chaos.scenario import Fault, FaultKind
from diloco_fleet.chaos.scenario_file import SHIPPED, load_scenario
from diloco_fleet.run_files import FleetFile, ProcessEntry, RunFiles, hold_run, read_fleet

NAMES = ("redis", "synchronizer-0", "synchronizer-1", "evaluator", "learner-0", "learner-1")
KILL = Fault(fault=FaultKind.KILL, who="learner-1", at_s=(1.0,))
FREEZE = Fault(fault=FaultKind.FREEZE, who="learner-1", at_s=(1.0,), duration_s=5.0)


@pytest.fixture
def children() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    popens = {name: subprocess.Popen(["sleep", "600"]) for name in NAMES}
    try:
        yield popens
    finally:
        for popen in popens.values():
            popen.kill()
            popen.wait(60)


@pytest.fixture
def files(tmp_path: Path, children: dict[str, subprocess.Popen[bytes]]) -> RunFiles:
    """A run directory as `diloco run` leaves it to others; nobody answers at its addresses."""
    files = RunFiles(tmp_path)
    files.config.write_text('[run]\nrun_id = "r"\nnum_learners = 2\nsync_interval = 6\n')
    files.metrics.mkdir()
    entries = tuple(
        ProcessEntry(name=name, pid=popen.pid, state="running", restarts=0, exit_code=None, log="l")
        for name, popen in children.items()
    )
    FleetFile(
        run_id="r", address="127.0.0.1:1,127.0.0.1:2", pid=os.getpid(), state="running",
        started=time.time(), processes=entries,
    ).write(files.fleet)  # fmt: skip
    return files


def test_processes_of_a_running_fleet_are_struck_and_it_goes_on(
    files: RunFiles, children: dict[str, subprocess.Popen[bytes]]
) -> None:
    with hold_run(files), AttachedInjector(files) as injector:
        assert injector.names() == set(NAMES)
        assert injector.sync_interval() == 6
        injector.begin(Begin(number=0, fault=KILL, groups=(("learner-1",),)))
        assert children["learner-1"].wait(60) == -signal.SIGKILL
        sample = injector.look()
        assert (sample.leader, sample.ended) == (None, "")
        injector.settle()
    assert all(popen.poll() is None for name, popen in children.items() if name != "learner-1")


def test_leaving_thaws_what_is_frozen(
    files: RunFiles, children: dict[str, subprocess.Popen[bytes]]
) -> None:
    with hold_run(files), AttachedInjector(files) as injector:
        injector.begin(Begin(number=0, fault=FREEZE, groups=(("learner-1",),)))
    children["learner-1"].terminate()
    assert children["learner-1"].wait(60) == -signal.SIGTERM, "who is frozen would not hear it"


def test_a_fleet_that_has_ended_is_noticed(files: RunFiles) -> None:
    with hold_run(files):
        injector = AttachedInjector(files).__enter__()
    try:
        assert "has ended" in injector.look().ended
    finally:
        injector.__exit__()


@pytest.mark.parametrize("state", ["finishing", "draining"])
def test_a_fleet_that_is_about_to_end_is_not_struck_any_more(files: RunFiles, state: str) -> None:
    with hold_run(files), AttachedInjector(files) as injector:
        dataclasses.replace(read_fleet(files.fleet), state=state).write(files.fleet)
        assert state in injector.look().ended


def test_a_run_that_is_not_running_is_refused(files: RunFiles) -> None:
    with pytest.raises(UsageError, match="no fleet is running") as caught:
        AttachedInjector(files)
    assert caught.value.reason is Reason.RUN_NOT_FOUND
    assert caught.value.exit_code == EXIT_USAGE


def test_what_needs_links_is_refused_and_the_rest_is_not(files: RunFiles) -> None:
    with hold_run(files):
        injector = AttachedInjector(files)
        refused = {}
        for name in SHIPPED:
            try:
                refuse_impossible(injector, load_scenario(name))
            except UsageError as error:
                refused[name] = error.message
    assert set(refused) == {"redis-kill", "datacenter-partition", "slow-link", "everything"}
    assert all("let it start its own fleet" in message for message in refused.values())


def test_who_would_not_come_back_is_not_killed(files: RunFiles) -> None:
    """A fleet that is told to let its dead lie would be left broken."""
    stop = Fault(fault=FaultKind.RESTART, who="learner-1", at_s=(1.0,))
    plain = files.config.read_text()
    for restart, refused in (("always", []), ("on-failure", [stop]), ("never", [KILL, stop])):
        files.config.write_text(plain + f'[fleet]\nrestart = "{restart}"\n')
        with hold_run(files):
            injector = AttachedInjector(files)
            assert [x for x in (KILL, stop, FREEZE) if injector.refusal(x)] == refused


def test_processes_of_another_machine_are_refused(
    files: RunFiles, children: dict[str, subprocess.Popen[bytes]]
) -> None:
    """A run directory may be shared; the pids in it mean nothing here."""
    content = read_fleet(files.fleet)
    dataclasses.replace(content, pid=1).write(files.fleet)
    with hold_run(files):
        assert "not on this machine" in AttachedInjector(files).refusal(KILL)
    assert all(popen.poll() is None for popen in children.values())


def test_processes_of_another_user_are_refused(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    with hold_run(files):
        assert "another user" in AttachedInjector(files).refusal(FREEZE)


def test_a_run_directory_that_goes_meanwhile_is_a_fleet_that_has_ended(
    files: RunFiles, children: dict[str, subprocess.Popen[bytes]]
) -> None:
    with hold_run(files), AttachedInjector(files) as injector:
        injector.begin(Begin(number=0, fault=FREEZE, groups=(("learner-1",),)))
        files.fleet.unlink()
        files.lock.unlink()
        sample = injector.look()
        assert "has ended" in sample.ended
        assert injector.heal_all() == []
    children["learner-1"].terminate()
    assert children["learner-1"].wait(60) == -signal.SIGTERM, "and who is frozen goes on"


def test_redis_of_somebody_else_is_not_emptied(files: RunFiles) -> None:
    empty = Fault(fault=FaultKind.REDIS_EMPTY, at_s=(1.0,))
    with hold_run(files):
        assert "not the fleet's own" in AttachedInjector(files).refusal(empty)
        files.redis.mkdir()
        files.redis_config.write_text("bind 127.0.0.1\nport 7000\nrequirepass secret\n")
        assert AttachedInjector(files).refusal(empty) == ""
