"""Fleets of sleeping processes and of pretended containers, for tests of injectors."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from diloco_fleet.chaos.conductor import Begin
from diloco_fleet.chaos.docker_injector import DockerInjector
from diloco_fleet.chaos.process_faults import ProcessFaults
from diloco_fleet.chaos.proxy import Cut
from diloco_fleet.chaos.scenario import Fault, FaultKind
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
