"""One suite for everybody who does faults: what is begun shows, what is healed is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from diloco_fleet.chaos.conductor import Arm, Begin
from diloco_fleet.chaos.docker_injector import DockerInjector
from diloco_fleet.chaos.point_faults import PointFaults
from diloco_fleet.chaos.process_faults import ProcessFaults, no_such_fault_because
from diloco_fleet.chaos.proxy import Cut
from diloco_fleet.chaos.scenario import Fault, FaultKind, Hypothesis, Scenario
from diloco_fleet.chaos.schedule import draw_schedule
from diloco_fleet.chaos.undo import Undo
from diloco_fleet.chaos.wiring import Wiring
from diloco_fleet.plan import Plan
from diloco_fleet.process import ProcessSpec
from diloco_fleet.run_files import RunFiles
from diloco_fleet.standby import RedisPlan
from tests.fleet.fake_engine import PROJECT, FakeEngine, FakeHost

PATIENCE_S = 60.0
AT: dict[str, Any] = {"at_s": (1.0,)}
FREEZE = Fault(fault=FaultKind.FREEZE, who="learner-1", duration_s=5.0, **AT)
CUT = Fault(
    fault=FaultKind.PARTITION, between=("learner-1, synchronizer-1", "rest"), duration_s=5.0, **AT
)
SLOW = Fault(fault=FaultKind.BANDWIDTH, who="learner-1", mbit_per_s=10.0, duration_s=5.0, **AT)
LATE = Fault(fault=FaultKind.LATENCY, who="learner-1", delay_s=0.1, duration_s=5.0, **AT)
NO_REDIS = Fault(fault=FaultKind.REDIS_LOSS, duration_s=5.0, **AT)
KILL = Fault(fault=FaultKind.KILL, who="learner-1", **AT)

ONE = ("learner-1",)
GROUPS: dict[str, tuple[tuple[str, ...], ...]] = {
    FaultKind.PARTITION: (
        ("learner-1", "synchronizer-1"),
        ("learner-0", "learner-2", "synchronizer-0", "redis"),
    ),
    FaultKind.REDIS_LOSS: (("redis",),),
}


def until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.005)


class Bench(ABC):
    """A fleet that is struck."""

    hands: ProcessFaults | DockerInjector

    @abstractmethod
    def disturbed(self) -> set[str]:
        """What is not as it should be."""

    @abstractmethod
    def renewed(self, name: str) -> bool:
        """Whether a process has ended, or begun a new life."""

    @abstractmethod
    def end(self, name: str) -> None:
        """A process ends, and does not come back."""

    def strike(self, number: int, fault: Fault) -> None:
        groups = GROUPS.get(fault.fault, (ONE,))
        self.hands.begin(Begin(number=number, fault=fault, groups=groups))

    @abstractmethod
    def close(self) -> None:
        """Ends what is there."""


class FakeLink:
    def __init__(self, name: str) -> None:
        self.name, self.address, self.state = name, f"127.0.0.1:{9000 + len(name)}", set[str]()

    def cut(self, how: Cut) -> None:
        self.state.add(f"cut {how}")

    def delay(self, seconds: float) -> None:
        self.state.add(f"delay {seconds}")

    def limit(self, bytes_per_s: float) -> None:
        self.state.add(f"limit {bytes_per_s}")

    def heal(self) -> None:
        self.state.clear()


class FakeProxies:
    def __init__(self) -> None:
        self.links: list[FakeLink] = []

    def link(self, name: str, _target: str) -> FakeLink:
        self.links.append(FakeLink(name))
        return self.links[-1]


class Processes(Bench):
    """Real processes that sleep, and links that remember."""

    def __init__(self, folder: Path) -> None:
        names = ("learner-0", "learner-1", "learner-2", "synchronizer-0", "synchronizer-1", "redis")
        self.files = RunFiles(folder)
        self.popens = {name: subprocess.Popen(["sleep", "600"]) for name in names}
        self.proxies = FakeProxies()
        self.wiring = self._wiring()
        self.hands = ProcessFaults(self, self.wiring, None, "")

    def _wiring(self) -> Wiring:
        addresses = ("127.0.0.1:7001", "127.0.0.1:7002")

        def spec(name: str, *command: str) -> ProcessSpec:
            environment = {"DILOCO_REDIS": "redis://:x@127.0.0.1:7003"} if "sync" in name else {}
            return ProcessSpec(name=name, command=command, log=Path("log"), environment=environment)

        synchronizers = tuple(
            spec(f"synchronizer-{i}", "--peers", addresses[1 - i], "--advertise", addresses[i])
            for i in range(2)
        )
        learners = tuple(spec(f"learner-{i}", "--address", ",".join(addresses)) for i in range(3))
        plan = Plan(
            addresses=addresses,
            synchronizers=synchronizers,
            evaluator=spec("evaluator", "--address", ",".join(addresses)),
            learners=learners,
            redis=RedisPlan(url="redis://:x@127.0.0.1:7003"),
        )
        wiring = Wiring(cast("Any", self.proxies), plan)
        for each in (*synchronizers, *learners):
            wired = wiring.wired(each)
            assert not any(address in " ".join(wired.command) for address in addresses)
        return wiring

    @property
    def parent_pid(self) -> int:
        return os.getpid()

    @property
    def ended(self) -> str:
        return ""

    def pids(self) -> dict[str, int | None]:
        return {n: None if p.poll() is not None else p.pid for n, p in self.popens.items()}

    def restarts(self) -> dict[str, int]:
        return dict.fromkeys(self.popens, 0)

    def disturbed(self) -> set[str]:
        links = {f"{link.name}: {what}" for link in self.proxies.links for what in link.state}
        return links | {name for name, pid in self.pids().items() if pid and is_frozen(pid)}

    def renewed(self, name: str) -> bool:
        return self.popens[name].poll() is not None

    def end(self, name: str) -> None:
        self.popens[name].kill()
        self.popens[name].wait(PATIENCE_S)

    def close(self) -> None:
        for popen in self.popens.values():
            popen.kill()
            popen.wait(PATIENCE_S)


def is_frozen(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class Containers(Bench):
    """An engine of a few dictionaries."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.host = FakeHost(self.engine)
        self.hands = DockerInjector(cast("Any", self.engine), PROJECT, self.host)
        self.before = self.networks()

    def networks(self) -> dict[str, list[str]]:
        return {x.id: sorted(x.networks) for x in self.engine.all}

    def disturbed(self) -> set[str]:
        found = {x.id for x in self.engine.all if x.status != "running"}
        found |= {name for name, nets in self.networks().items() if nets != self.before[name]}
        return found | set(self.host.shaped) | {str(x.name) for x in self.engine.made}

    def renewed(self, name: str) -> bool:
        assert name == "learner-1"
        return self.host.signals == [("learner-2", signal.SIGKILL)]

    def close(self) -> None:
        assert not self.disturbed() - {"learner-2"}

    def end(self, name: str) -> None:
        assert name == "learner-1"
        [container] = [x for x in self.engine.all if x.id == "learner-2"]
        container.kill()


@pytest.fixture(params=["process", "docker"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made: Bench = Processes(tmp_path) if request.param == "process" else Containers()
    try:
        yield made
    finally:
        made.hands.heal_all()
        made.close()


@pytest.mark.parametrize("fault", [FREEZE, CUT, SLOW, LATE, NO_REDIS], ids=lambda x: str(x.fault))
def test_what_lasts_shows_until_it_is_healed(bench: Bench, fault: Fault) -> None:
    bench.strike(0, fault)
    until(lambda: bool(bench.disturbed()), "it shows")
    bench.hands.heal(0)
    until(lambda: not bench.disturbed(), "it is gone")
    bench.hands.heal(0)
    assert bench.hands.heal_all() == []


def test_a_kill_ends_a_life_and_leaves_nothing_to_heal(bench: Bench) -> None:
    bench.strike(0, KILL)
    until(lambda: bench.renewed("learner-1"), "it is dead")
    assert bench.hands.heal_all() == []
    assert not bench.disturbed()


def test_one_healing_leaves_the_other_faults_alone(bench: Bench) -> None:
    bench.strike(0, SLOW)
    slow = bench.disturbed()
    bench.strike(1, NO_REDIS)
    bench.strike(2, CUT)
    bench.hands.heal(2)
    bench.hands.heal(1)
    assert bench.disturbed() == slow
    bench.hands.heal(0)
    assert not bench.disturbed()


def test_everything_is_healed_at_once(bench: Bench) -> None:
    for number, fault in enumerate((SLOW, CUT, FREEZE, NO_REDIS)):
        bench.strike(number, fault)
    assert bench.hands.heal_all() == []
    until(lambda: not bench.disturbed(), "all is as before")


def test_who_dies_while_it_is_frozen_is_no_trouble(bench: Bench) -> None:
    bench.strike(0, FREEZE)
    bench.end("learner-1")
    bench.hands.heal(0)
    assert bench.hands.heal_all() == []


def test_who_is_not_there_cannot_be_struck(bench: Bench) -> None:
    bench.end("learner-1")
    with pytest.raises(DilocoError) as caught:
        bench.strike(0, KILL)
    assert caught.value.reason is Reason.TARGET_NOT_FOUND
    assert "learner-1" in caught.value.message


def test_an_undoing_that_fails_stops_no_other_and_is_tried_again() -> None:
    """Whatever it raises: nobody foresees every way in which an engine or a disk may fail."""
    undo, left, done = Undo(), {"b"}, []

    def undoing(name: str) -> None:
        if name in left:
            raise RuntimeError(name)
        done.append(name)

    for number, name in enumerate("abc"):
        undo.add(number % 2, partial(undoing, name))
    unhealed = undo.heal_all()
    assert (done, len(unhealed)) == (["c", "a"], 1)
    assert "RuntimeError: b" in unhealed[0]
    left.clear()
    assert undo.heal_all() == []
    assert done == ["c", "a", "b"]


# -- processes ------------------------------------------------------------------------------------


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
