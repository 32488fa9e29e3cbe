"""Faults of processes: nothing is done to nobody, and what was done is undone whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from decoupled_diloco.errors import DilocoError
from diloco_fleet.chaos import own_fleet
from diloco_fleet.chaos.conductor import Arm, Begin
from diloco_fleet.chaos.disks import Disks
from diloco_fleet.chaos.frozen import Frozen
from diloco_fleet.chaos.own_fleet import OwnFleet
from diloco_fleet.chaos.point_faults import PointFaults
from diloco_fleet.chaos.process_faults import ProcessFaults, no_such_fault_because
from diloco_fleet.chaos.scenario import Fault, FaultKind, Hypothesis, Scenario
from diloco_fleet.chaos.schedule import draw_schedule
from tests.fleet.chaos_bench import (
    AT,
    CUT,
    FREEZE,
    KILL,
    PATIENCE_S,
    SLOW,
    Processes,
    is_frozen,
    until,
)


def test_a_partition_cuts_no_link_within_a_group(tmp_path: Path) -> None:
    bench = Processes(tmp_path)
    try:
        bench.strike(0, CUT)
        cut = {link.name for link in bench.proxies.links if link.state}
        assert cut == {
            "learner-1 to synchronizer-0", "learner-0 to synchronizer-1",
            "learner-2 to synchronizer-1", "synchronizer-0 to synchronizer-1",
            "synchronizer-1 to synchronizer-0", "synchronizer-1 to redis",
        }  # fmt: skip
    finally:
        bench.close()


def test_a_partition_that_would_cut_no_link_is_no_fault(tmp_path: Path) -> None:
    """Learners have no link among themselves: nothing would happen, and pass."""
    apart = Fault(
        fault=FaultKind.PARTITION, between=("learner-0", "every learner"), duration_s=5.0, **AT
    )
    assert "no link" in no_such_fault_because(apart, attached=False)
    assert no_such_fault_because(CUT, attached=False) == ""
    bench = Processes(tmp_path)
    try:
        with pytest.raises(DilocoError, match="no link"):
            bench.hands.begin(Begin(number=0, fault=CUT, groups=(("learner-0",), ("redis",))))
        assert bench.hands.heal_all() == []
    finally:
        bench.close()


def test_who_is_frozen_is_let_go_on_though_its_fleet_is_known_no_more(tmp_path: Path) -> None:
    """The file of a fleet that was attached to may be gone by then; its processes are not."""
    bench = Processes(tmp_path)
    try:
        bench.strike(0, FREEZE)
        until(lambda: "learner-1" in bench.disturbed(), "it is frozen")
        everybody = bench.pids
        bench.pids = dict  # type: ignore[method-assign, assignment]
        bench.hands.heal(0)
        bench.pids = everybody  # type: ignore[method-assign]
        until(lambda: not bench.disturbed(), "it goes on")
    finally:
        bench.close()


def test_who_is_frozen_goes_on_when_whoever_froze_it_is_killed(tmp_path: Path) -> None:
    """Kill -9 leaves nobody to heal, and a fleet that was attached to goes on."""
    bench = Processes(tmp_path)
    victim = bench.popens["learner-1"].pid
    script = (
        "import os, sys, time\n"
        "from diloco_fleet.chaos.frozen import Frozen\n"
        "frozen = Frozen(os.pidfd_open(int(sys.argv[1])))\n"
        "time.sleep(600)\n"
    )
    injector = subprocess.Popen([sys.executable, "-c", script, str(victim)])
    try:
        until(lambda: is_frozen(victim), "it is frozen")
        injector.kill()
        until(lambda: not is_frozen(victim), "it goes on")
    finally:
        injector.kill()
        injector.wait(PATIENCE_S)
        bench.close()


def test_who_may_not_be_frozen_leaves_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    process = os.pidfd_open(os.getpid())
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    with pytest.raises(PermissionError):
        Frozen(process)
    assert os.listdir("/proc/self/fd") == before
    os.close(process)


def test_healing_one_who_stopped_itself_leaves_another_one_alone(tmp_path: Path) -> None:
    """And is done also where it got to its point just before it was disarmed."""
    stop = Fault(fault=FaultKind.FREEZE, who="random learner", on="mid_push", duration_s=5.0)
    chosen = Scenario(
        name="x", about="", duration_s=9.0, faults=(stop, stop), steady=Hypothesis(expired=0)
    )
    points = PointFaults(tmp_path / "faults", chosen, draw_schedule(chosen, 0))
    points.environment()
    bench = Processes(tmp_path)
    bench.hands = ProcessFaults(bench, bench.wiring, points, "")
    log = tmp_path / "faults" / "faults.jsonl"
    try:
        for number in (0, 1):
            bench.hands.arm(Arm(number=number, fault=stop, process=f"learner-{number}"))
        bench.hands.heal(0)
        assert [x.name for x in log.parent.glob("arm-*")] == ["arm-1"]
        with log.open("a") as file:
            for number in (0, 1):
                os.kill(bench.popens[f"learner-{number}"].pid, signal.SIGSTOP)
                file.write(json.dumps({"name": str(number), "process": f"learner-{number}"}) + "\n")
        until(lambda: bench.disturbed() == {"learner-0", "learner-1"}, "both stopped themselves")
        bench.hands.heal(0)
        until(lambda: bench.disturbed() == {"learner-1"}, "one goes on")
        assert bench.hands.heal_all() == []
        until(lambda: not bench.disturbed(), "both do")
    finally:
        bench.close()


def test_a_link_that_cannot_be_healed_is_tried_again(tmp_path: Path) -> None:
    bench = Processes(tmp_path)
    try:
        bench.strike(0, SLOW)
        link = next(x for x in bench.proxies.links if x.state)
        heal, link.heal = link.heal, lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(DilocoError, match="not healed: ZeroDivisionError"):
            bench.hands.heal(0)
        link.heal = heal  # type: ignore[method-assign]
        assert bench.hands.heal_all() == []
        assert not bench.disturbed()
    finally:
        bench.close()


def test_a_pid_that_is_somebody_elses_gets_no_signal(tmp_path: Path) -> None:
    """The file of a fleet may name a pid that another process has by now."""
    bench = Processes(tmp_path)
    try:
        type(bench).parent_pid = property(lambda _: 1)  # type: ignore[method-assign, assignment]
        with pytest.raises(DilocoError, match="learner-1 is not running"):
            bench.strike(0, KILL)
        assert not bench.renewed("learner-1")
    finally:
        type(bench).parent_pid = property(lambda _: os.getpid())  # type: ignore[method-assign, assignment]
        bench.close()


def test_to_ask_for_the_end_once_more_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it says when it drains; Ctrl-C at the beginning of a scenario is no second one."""
    ended, requests = threading.Event(), list[int]()

    def request_stop() -> None:
        requests.append(len(asked))
        if len(requests) > 1:
            ended.set()

    monkeypatch.setattr(own_fleet, "_LOOK_S", 0.01)
    fleet = object.__new__(OwnFleet)
    fleet._thread = threading.Thread(target=ended.wait, args=(60.0,))
    fleet._supervisor = SimpleNamespace(request_stop=request_stop)
    fleet._journal = SimpleNamespace(record=lambda *_, **__: None)
    fleet._disks, fleet._outcome = Disks(), None
    fleet._thread.start()
    asked = [1, 1, 1, 2]
    fleet.drain(lambda: asked.pop(0) if len(asked) > 1 else asked[0])
    assert requests == [4, 1], "not before it was asked for once more"
