"""A container engine of a few dictionaries, as its SDK shows it, and the host beneath it."""

from __future__ import annotations

import io
import signal
import tarfile
from collections.abc import Iterator, Sequence
from copy import copy, deepcopy
from types import SimpleNamespace
from typing import Any

from docker.errors import APIError, NotFound

from decoupled_diloco.errors import DilocoError, Reason
from diloco_fleet.chaos.conductor import Begin
from diloco_fleet.chaos.docker_host import Host
from diloco_fleet.chaos.docker_injector import DockerInjector
from diloco_fleet.chaos.docker_links import Link, LinkedContainer
from diloco_fleet.chaos.scenario import Fault, FaultKind

PROJECT = "test"
ANYONE: dict[str, Any] = {"who": "random learner", "duration_s": 5.0, "at_s": (1.0,)}
SLOW = Fault(fault=FaultKind.BANDWIDTH, mbit_per_s=10.0, **ANYONE)
LATE = Fault(fault=FaultKind.LATENCY, delay_s=0.1, **ANYONE)


def strike(injector: DockerInjector, fault: Fault, name: str, number: int = 0) -> None:
    """Begins a fault of one container."""
    injector.begin(Begin(number=number, fault=fault, groups=((name,),)))


class FakeContainer:
    """One container."""

    def __init__(  # noqa: PLR0917
        self,
        engine: FakeEngine,
        service: str,
        number: int,
        role: str,
        networks: Sequence[str],
        args: Sequence[str] = (),
        files: dict[str, str] | None = None,
    ) -> None:
        self.id = f"{service}-{number}"
        self.name = f"{PROJECT}-{service}-{number}"
        self.labels = {
            "com.docker.compose.project": PROJECT,
            "com.docker.compose.service": service,
            "com.docker.compose.container-number": str(number),
            "org.decoupled-diloco.role": role,
        }
        self.status = "running"
        self.files = files or {}
        self.executed: list[list[str]] = []
        self.exit_code = 0
        self.output = b"what it said"
        self._engine = engine
        self.attrs: dict[str, Any] = {
            "State": {"Pid": engine.next_pid()},
            "Args": list(args),
            "Config": {"Env": ["DILOCO_STORE=/store"]},
            "Mounts": [{"Type": "volume", "Destination": "/store"}],
            "HostConfig": {"RestartPolicy": {"Name": "unless-stopped"}},
            "RestartCount": 0,
            "Created": "2026-01-01T00:00:00Z",
            "NetworkSettings": {
                "Ports": {"50051/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(50000 + number)}]},
                "Networks": {name: {"Aliases": [service]} for name in networks},
            },
        }

    @property
    def networks(self) -> dict[str, Any]:
        found: dict[str, Any] = self.attrs["NetworkSettings"]["Networks"]
        return found

    def reload(self) -> None:
        if self not in self._engine.all:
            raise NotFound("gone", explanation=f"no such container: {self.name}")

    def pause(self) -> None:
        if self.status != "running":
            raise APIError("not running", explanation=f"{self.name} is not running")
        self.status = "paused"

    def unpause(self) -> None:
        assert self.status == "paused"
        self.status = "running"

    def kill(self) -> None:
        self.status = "exited"
        self.attrs["State"]["Pid"] = 0

    def start(self) -> None:
        self.status = "running"
        self.attrs["State"]["Pid"] = self._engine.next_pid()

    def exec_run(self, command: list[str], *, detach: bool = False) -> Any:
        self.executed.append(command)
        return SimpleNamespace(exit_code=self.exit_code, output=self.output)

    def get_archive(self, path: str) -> tuple[Iterator[bytes], dict[str, Any]]:
        found = {name: text for name, text in self.files.items() if name.startswith(path)}
        if not found:
            raise NotFound("gone", explanation=f"no such path: {path}")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, text in found.items():
                entry = tarfile.TarInfo(name.lstrip("/"))
                entry.size = len(text.encode())
                archive.addfile(entry, io.BytesIO(text.encode()))
        return iter([buffer.getvalue()]), {}


class FakeNetwork:
    """One network."""

    def __init__(self, engine: FakeEngine, name: str) -> None:
        self.name = name
        self._engine = engine
        self.stuck = False

    def connect(
        self,
        container: FakeContainer,
        *,
        aliases: Sequence[str] = (),
        ipv4_address: str | None = None,
        ipv6_address: str | None = None,
        driver_opt: dict[str, str] | None = None,
    ) -> None:
        if self.stuck:
            raise APIError("stuck", explanation="the network is stuck")
        fixed = {"IPv4Address": ipv4_address, "IPv6Address": ipv6_address}
        container.networks[self.name] = {
            "Aliases": list(aliases),
            "IPAMConfig": {key: value for key, value in fixed.items() if value} or None,
            "DriverOpts": driver_opt,
        }

    def disconnect(self, container: FakeContainer, *, force: bool) -> None:
        assert force
        del container.networks[self.name]

    def remove(self) -> None:
        assert not [x for x in self._engine.all if self.name in x.networks]
        self._engine.made.remove(self)


class FakeEngine:
    """The engine: `containers` and `networks` as of the SDK's client."""

    def __init__(self) -> None:
        self._pid = 4000
        self.made: list[FakeNetwork] = []
        ids = {0: "amber", 1: "birch", 2: "cedar"}
        self.all: list[FakeContainer] = []
        everywhere = ("hub", "dc-a", "dc-b")
        start = '{"kind": "start", "time": 1.0}\n'
        metrics = {f"/run/metrics/{name}.jsonl": start for name in ids.values()}
        for service, number in (("standby", 2), ("synchronizer", 1)):
            self.all.append(FakeContainer(self, service, number, "synchronizer", everywhere))
        for index, (service, number) in enumerate(
            (("learner", 1), ("learner", 2), ("learner-b", 1))
        ):
            args = ["train", "--run-dir=/run", "--learner-id-file", "/self/learner-id"]
            networks = ["dc-b" if service == "learner-b" else "dc-a"]
            files = {"/self/learner-id": ids[index] + "\n", **metrics}
            self.all.append(FakeContainer(self, service, number, "learner", networks, args, files))
        self.all.append(FakeContainer(self, "redis", 1, "redis", ["hub"]))
        self.all.append(FakeContainer(self, "prepare", 1, "prepare", []))
        self._networks = {name: FakeNetwork(self, name) for name in everywhere}
        self.containers = SimpleNamespace(list=self._list)
        self.networks = SimpleNamespace(get=self._get, create=self._create)

    def close(self) -> None:
        pass

    def next_pid(self) -> int:
        self._pid += 1
        return self._pid

    def by_service(self, service: str) -> FakeContainer:
        return next(x for x in self.all if x.labels["com.docker.compose.service"] == service)

    def network(self, name: str) -> FakeNetwork:
        return self._networks[name]

    def make_anew(self, service: str) -> FakeContainer:
        """Compose makes a container anew: another id, the same place."""
        old = self.by_service(service)
        new = copy(old)
        new.id, new.status = f"{old.id}-anew", "running"
        new.attrs = deepcopy(old.attrs)
        new.attrs |= {"State": {"Pid": self.next_pid()}, "RestartCount": 0}
        new.attrs["Created"] = "2026-01-02T00:00:00Z"
        self.all[self.all.index(old)] = new
        return new

    def _list(
        self, *, filters: dict[str, str], all: bool, ignore_removed: bool
    ) -> list[FakeContainer]:
        assert all
        assert ignore_removed
        project = filters["label"].partition("=")[2]
        return [x for x in self.all if x.labels["com.docker.compose.project"] == project]

    def _get(self, name: str) -> FakeNetwork:
        return self._networks[name]

    def _create(self, name: str, *, internal: bool) -> FakeNetwork:
        assert internal
        self.made.append(FakeNetwork(self, name))
        return self.made[-1]


class FakeHost(Host):
    """A host whose processes are those of an engine's containers.

    Attributes:
        why_not: what it answers where it is asked whether it can.
        without: disciplines that its kernel lacks.
        shaped: devices that are shaped, each with how.
        failing: devices that cannot be shaped.
        elsewhere: whether the containers run on another machine.
    """

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.why_not = ""
        self.without: set[str] = set()
        self.shaped: dict[str, str] = {}
        self.failing: set[str] = set()
        self.elsewhere = False
        self.signals: list[tuple[str, signal.Signals]] = []

    def refusal(self, *probe: str) -> str:
        lacking = self.without & set(probe[:1])
        return self.why_not or "".join(f"the kernel of the host has no {x}" for x in lacking)

    def owns(self, pid: int, container_id: str) -> bool:
        if self.elsewhere:
            return False
        return (pid, container_id) in {(x.attrs["State"]["Pid"], x.id) for x in self._engine.all}

    def shares_network(self, pid: int) -> bool:
        return False

    def signal(self, pid: int, container_id: str, number: signal.Signals) -> None:
        assert self.owns(pid, container_id)
        [container] = [x for x in self._engine.all if x.id == container_id]
        self.signals.append((container.id, number))
        container.start()

    def run(self, *command: str) -> str:
        if "link" in command:
            inside = "nsenter" in command
            return "12: eth0@if31: <UP>\n" if inside else "31: veth9@if12: <UP>\n1: lo: <UP>\n"
        pid = int(command[2]) if command[0] == "nsenter" else 0
        if pid and pid not in {x.attrs["State"]["Pid"] for x in self._engine.all}:
            raise DilocoError(Reason.FAULT_IMPOSSIBLE, f"nsenter: no process {pid}")
        device = command[command.index("dev") + 1]
        if "add" in command:
            if device in self.failing:
                raise DilocoError(Reason.FAULT_IMPOSSIBLE, f"tc: {device} says no")
            self.shaped[device] = " ".join(command[command.index("root") + 1 :])
        elif "del" in command:
            del self.shaped[device]
        elif "show" in command:
            how = self.shaped.get(device)
            return f"qdisc {how.split()[0]} 8001: root\n" if how else "qdisc noqueue 0: root\n"
        return ""


class FakeHold:
    """Holds packets: a note among what is shaped."""

    def __init__(
        self, host: Host, container: LinkedContainer, links: Sequence[Link], fault: Fault
    ) -> None:
        assert isinstance(host, FakeHost)
        self.problem = ""
        self._shaped, self._container, self._fault = host.shaped, container, fault
        self._links = links

    def begin(self) -> None:
        figure = self._fault.delay_s if self._fault.share is None else self._fault.share
        protocols = "46" if self._container.ipv6 else "4"
        for link in self._links:
            self._shaped[link.outside] = f"{self._fault.fault} {figure} IPv{protocols}"

    def end(self) -> None:
        for link in self._links:
            self._shaped.pop(link.outside, None)
