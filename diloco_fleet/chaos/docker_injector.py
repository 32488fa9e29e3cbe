"""Injector `docker`: faults for the containers of a composed fleet, which runs already and goes on.

A crash is SIGKILL from the host, so that restart policies act: what is killed by ``docker kill``
stays down. That is how Redis is taken away.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from decoupled_diloco.channel import channel_options, parse_address
from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.settings import PROTOCOL_VERSION
from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc
from diloco_fleet.chaos.conductor import Arm, Begin
from diloco_fleet.chaos.docker_fleet import ComposedFleet, call_engine, exists, setting
from diloco_fleet.chaos.docker_host import Host
from diloco_fleet.chaos.docker_links import LinkedContainer, Links
from diloco_fleet.chaos.docker_partition import Partitions, networks_of
from diloco_fleet.chaos.injector import Injector
from diloco_fleet.chaos.sample import Sample
from diloco_fleet.chaos.scenario import Fault, FaultKind
from diloco_fleet.chaos.targets import LEARNER, REDIS, is_learner
from diloco_fleet.chaos.undo import Undo
from diloco_fleet.chaos.watch import Watch, make_sample
from diloco_fleet.metrics import RunMetrics, is_synchronizer

if TYPE_CHECKING:
    from docker.client import DockerClient
    from docker.models.containers import Container

_SIGNALS: Final = {FaultKind.KILL: signal.SIGKILL, FaultKind.RESTART: signal.SIGTERM}
_OF_LINKS: Final = frozenset({FaultKind.BANDWIDTH, FaultKind.LATENCY, FaultKind.LOSS})
_ALL_ENDED: Final = "no learner runs any more; is the run complete?"
_LOOK_S: Final = 1.0
_DEADLINE_S: Final = 5.0


def connect(project: str) -> DockerInjector:
    """Returns the injector for a composed fleet of this machine's engine.

    Raises:
        UsageError: ENGINE_UNAVAILABLE where no engine can be asked, TARGET_NOT_FOUND where it has
            no such fleet.
    """
    try:
        import docker
    except ImportError as error:
        raise UsageError(
            Reason.ENGINE_UNAVAILABLE,
            "injector docker needs the Python package docker; install decoupled-diloco[chaos]",
        ) from error
    return DockerInjector(open_engine(docker.from_env), project)


def open_engine(make: Callable[[], DockerClient]) -> DockerClient:
    """Returns an engine that answers.

    Args:
        make: connects to it.

    Raises:
        UsageError: ENGINE_UNAVAILABLE, saying whether it does not run or may not be used.
    """
    import requests
    from docker.errors import DockerException

    try:
        client = make()
        client.ping()
    except (DockerException, requests.RequestException, OSError) as error:
        if "permission denied" in str(error).lower():
            message = (
                "no permission to the socket of the container engine; use a user of its group "
                "(docker), or root"
            )
        else:
            message = (
                f"the container engine does not answer; start it ({' '.join(str(error).split())})"
            )
        raise UsageError(Reason.ENGINE_UNAVAILABLE, message) from error
    return client


class DockerInjector(Injector):
    """Strikes the containers of a composed fleet.

    Args:
        client: the engine.
        project: of the composed fleet.
        host: the machine on which it runs.
        links: disturbs the links of its containers.
    """

    name: ClassVar[str] = "docker"

    def __init__(
        self,
        client: DockerClient,
        project: str,
        host: Host | None = None,
        links: Links | None = None,
    ) -> None:
        self._client = client
        self._host = host if host is not None else Host()
        self._links = Links(self._host) if links is None else links
        self._fleet = ComposedFleet(client, project)
        self._partitions = Partitions(client, self._fleet)
        self._undo = Undo()
        self._stack = ExitStack()
        self._stack.callback(client.close)
        self._looked_at_s = 0.0
        self._running: list[str] = []
        self._addresses: dict[str, str] = {}

    def refusal(self, fault: Fault) -> str:
        """See `Injector.refusal`."""
        kind = fault.fault
        if fault.at_point or kind is FaultKind.CLOCK_SKEW:
            return "the processes of containers were started without faults; use injector process"
        if kind is FaultKind.DISK_FULL and not all(map(self._has_small_store, self._stores())):
            return (
                "a store lies on a disk of the host, which must not be filled; give the "
                "synchronizers a tmpfs for it (compose/small-disks.yaml)"
            )
        if kind in _SIGNALS:
            return self._host.refusal() or self._not_here() or self._stays_down(fault.who)
        if kind in _OF_LINKS:
            return self._links.refusal(fault) or self._not_here()
        return ""

    def _not_here(self) -> str:
        """Says that the containers run on another machine; empty where they do not."""
        for name in self._fleet.names():
            container = self._fleet.container(name)
            pid = int(container.attrs["State"]["Pid"])
            if pid > 0 and not self._host.owns(pid, str(container.id)) and exists(container):
                if pid != int(container.attrs["State"]["Pid"]):
                    continue  # it has just been started again
                return (
                    "the engine runs its containers on another machine, or in a virtual one; run "
                    "it where they are"
                )
        return ""

    def _stays_down(self, who: str) -> str:
        """Says who would not be started again; empty where everybody is."""
        role = who.rpartition(" ")[2]
        names = self._fleet.names()
        of_role = is_learner if role == LEARNER else is_synchronizer
        for name in sorted({who} & names or set(filter(of_role, names))):
            policy = self._fleet.container(name).attrs["HostConfig"].get("RestartPolicy") or {}
            if policy.get("Name") in {None, "", "no"}:
                return f"{name} has no restart policy, so nobody starts it again"
        return ""

    def _stores(self) -> list[str]:
        return [name for name in self._fleet.names() if is_synchronizer(name)]

    def _has_small_store(self, name: str) -> bool:
        container = self._fleet.container(name)
        attrs = container.attrs
        mounts = {entry["Destination"] for entry in attrs["Mounts"] if entry["Type"] == "tmpfs"}
        return setting(container, "store") in {*mounts, *(attrs["HostConfig"].get("Tmpfs") or {})}

    def names(self) -> frozenset[str]:
        """See `Injector.names`."""
        return self._fleet.names()

    def __enter__(self) -> DockerInjector:
        try:
            self._addresses = self._fleet.addresses()
            self._watch = self._stack.enter_context(Watch(self._addresses))
        except BaseException:
            self._stack.close()
            raise
        self._stack.callback(self.heal_all)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def look(self) -> Sample:
        """See `Injector.look`."""
        now = time.monotonic()
        if now - self._looked_at_s > _LOOK_S:
            self._fleet.refresh()
            self._running, self._restarts = self._fleet.running(), self._fleet.restarts()
            self._ids = self._fleet.learner_ids()
            self._looked_at_s = now
        sample = make_sample(
            self._watch.answers(),
            at_s=now,
            running=self._running,
            restarts=self._restarts,
            ended="" if any(map(is_learner, self._running)) else _ALL_ENDED,
        )
        return with_names(sample, self._ids)

    def begin(self, action: Begin) -> None:
        """See `Injector.begin`."""
        kind, names = action.fault.fault, action.groups[0]
        if kind in _SIGNALS:
            for name in names:
                pid, container = self._fleet.pid(name), self._fleet.container(name)
                self._host.signal(pid, str(container.id), _SIGNALS[kind])
        elif kind is FaultKind.FREEZE:
            for name in names:
                self._freeze(action.number, self._fleet.container(name))
        elif kind is FaultKind.PARTITION:
            keep = partial(self._undo.add, action.number)
            self._partitions.cut(action.number, action.groups, keep)
        elif kind is FaultKind.REDIS_LOSS:
            self._undo.add(action.number, self._start_redis)
            call_engine(self._fleet.container(REDIS).kill, REDIS)
        elif kind is FaultKind.REDIS_EMPTY:
            self._execute(self._fleet.container(REDIS), REDIS, ["redis-cli", "flushall"])
        elif kind is FaultKind.DISK_FULL:
            for name in names:
                self._fill(action.number, name)
        else:
            for name in names:
                self._disturb(action.number, action.fault, name)

    def arm(self, action: Arm) -> None:
        """Containers strike themselves at no point of the protocol; refused before."""
        raise DilocoError(Reason.FAULT_IMPOSSIBLE, self.refusal(action.fault))

    def heal(self, number: int) -> None:
        """See `Injector.heal`."""
        self._undo.heal(number)
        self._links.check(number)

    def heal_all(self) -> list[str]:
        """See `Injector.heal_all`."""
        return self._undo.heal_all()

    def settle(self) -> None:
        """The fleet goes on."""

    def metrics(self) -> RunMetrics:
        """See `Injector.metrics`."""
        return self._fleet.metrics()

    def sync_interval(self) -> int | None:
        """See `Injector.sync_interval`."""
        import grpc

        for text in self._addresses.values():
            address = parse_address(text)
            options = channel_options(address, "chaos")
            with grpc.insecure_channel(text, options=options) as channel:
                request = admin_pb2.GetRunRequest(protocol_version=PROTOCOL_VERSION)
                try:
                    run = admin_pb2_grpc.AdminServiceStub(channel).GetRun(
                        request, timeout=_DEADLINE_S
                    )
                except grpc.RpcError:
                    continue
                return int(run.settings.sync_interval)
        return None

    def _start_redis(self) -> None:
        call_engine(self._fleet.container(REDIS).start, REDIS)

    def _freeze(self, number: int, container: Container) -> None:
        def thaw() -> None:
            # Who was killed or made anew meanwhile is frozen no more.
            if exists(container) and container.status == "paused":
                call_engine(container.unpause, str(container.name))

        self._undo.add(number, thaw)
        call_engine(container.pause, str(container.name))

    def _disturb(self, number: int, fault: Fault, name: str) -> None:
        pid = self._fleet.pid(name)
        container = self._fleet.container(name)
        linked = LinkedContainer(
            name=name,
            container_id=str(container.id),
            pid=pid,
            ipv6=any(x.get("GlobalIPv6Address") for x in networks_of(container).values()),
        )
        self._links.disturb(number, fault, linked, partial(self._undo.add, number))

    def _fill(self, number: int, name: str) -> None:
        container = self._fleet.container(name)
        filler = f"{setting(container, 'store')}/.filler"

        def make_room() -> None:
            # Where it does not run, its disk is gone, and what filled it, too.
            if exists(container) and container.status == "running":
                self._execute(container, name, ["rm", "-f", filler])

        self._undo.add(number, make_room)
        command = ["dd", "if=/dev/zero", f"of={filler}", "bs=64k"]
        done = call_engine(lambda: container.exec_run(command), name)
        said = " ".join(done.output.decode(errors="replace").split())
        if "No space left" not in said:
            raise DilocoError(Reason.FAULT_IMPOSSIBLE, f"dd in {name}: {said}")
        # A store makes room as it goes, by removing what is outdated: that is taken, too.
        again = f"{' '.join(command)} oflag=append conv=nocreat,notrunc"
        keep_full = f"while [ -e {filler} ]; do {again}; sleep 0.1; done"
        call_engine(lambda: container.exec_run(["sh", "-c", keep_full], detach=True), name)

    @staticmethod
    def _execute(container: Container, name: str, command: list[str]) -> None:
        done = call_engine(lambda: container.exec_run(command), name)
        if done.exit_code != 0:
            said = " ".join(done.output.decode(errors="replace").split())
            raise DilocoError(Reason.FAULT_IMPOSSIBLE, f"{command[0]} in {name}: {said}")


def with_names(sample: Sample, ids: dict[str, str]) -> Sample:
    """Returns a sample with learners under the names of their containers; others are left out."""
    named = {ids[x]: seen for x, seen in sample.learners.items() if x in ids}
    return replace(sample, learners=named)
