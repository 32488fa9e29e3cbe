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
from typing import TYPE_CHECKING, Any, ClassVar, Final

from decoupled_diloco.channel import channel_options, parse_address
from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.settings import PROTOCOL_VERSION
from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc
from diloco_fleet.chaos.conductor import Arm, Begin
from diloco_fleet.chaos.docker_fleet import ComposedFleet, call_engine
from diloco_fleet.chaos.docker_host import Host, latency, loss, rate_limit
from diloco_fleet.chaos.injector import Injector
from diloco_fleet.chaos.sample import Sample
from diloco_fleet.chaos.scenario import Fault, FaultKind
from diloco_fleet.chaos.targets import is_learner
from diloco_fleet.chaos.undo import Undo
from diloco_fleet.chaos.watch import Watch, make_sample
from diloco_fleet.metrics import RunMetrics

if TYPE_CHECKING:
    from docker.client import DockerClient
    from docker.models.containers import Container
    from docker.models.networks import Network

_SIGNALS: Final = {FaultKind.KILL: signal.SIGKILL, FaultKind.RESTART: signal.SIGTERM}
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
    """

    name: ClassVar[str] = "docker"

    def __init__(self, client: DockerClient, project: str, host: Host | None = None) -> None:
        self._client = client
        self._host = host if host is not None else Host()
        self._fleet = ComposedFleet(client, project)
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
            return self._host.refusal()
        if kind is FaultKind.BANDWIDTH:
            return self._host.refusal(*rate_limit(1.0))
        if kind is FaultKind.LATENCY:
            return self._host.refusal(*latency(0.001))
        if kind is FaultKind.LOSS:
            return self._host.refusal(*loss(0.01))
        return ""

    def _stores(self) -> list[str]:
        return [name for name in self._fleet.names() if name.startswith("synchronizer")]

    def _has_small_store(self, name: str) -> bool:
        attrs = self._fleet.container(name).attrs
        store = self._store_of(attrs)
        mounts = {entry["Destination"] for entry in attrs["Mounts"] if entry["Type"] == "tmpfs"}
        return store in {*mounts, *(attrs["HostConfig"].get("Tmpfs") or {})}

    @staticmethod
    def _store_of(attrs: dict[str, Any]) -> str:
        words = [*(attrs.get("Args") or ()), *(attrs["Config"].get("Env") or ())]
        for word in words:
            for prefix in ("--store=", "DILOCO_STORE="):
                if word.startswith(prefix):
                    return str(word).partition("=")[2]
        return ""

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
            self._running, self._ids = self._fleet.running(), self._fleet.learner_ids()
            self._restarts = self._fleet.restarts()
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
                self._host.signal(self._fleet.pid(name), _SIGNALS[kind])
        elif kind is FaultKind.FREEZE:
            for name in names:
                self._freeze(action.number, self._fleet.container(name))
        elif kind is FaultKind.PARTITION:
            self._partition(action.number, action.groups)
        elif kind is FaultKind.REDIS_LOSS:
            redis = self._fleet.container("redis")
            self._undo.add(action.number, lambda: call_engine(redis.start, "redis"))
            call_engine(redis.kill, "redis")
        elif kind is FaultKind.REDIS_EMPTY:
            self._execute("redis", ["redis-cli", "flushall"])
        elif kind is FaultKind.DISK_FULL:
            for name in names:
                self._fill(action.number, name)
        else:
            for name in names:
                self._shape(action.number, action.fault, name)

    def arm(self, action: Arm) -> None:
        """Containers strike themselves at no point of the protocol; refused before."""
        raise DilocoError(Reason.FAULT_IMPOSSIBLE, self.refusal(action.fault))

    def heal(self, number: int) -> None:
        """See `Injector.heal`."""
        self._undo.heal(number)

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

    def _freeze(self, number: int, container: Container) -> None:
        def thaw() -> None:
            call_engine(container.reload, str(container.name))
            # Who was killed meanwhile is frozen no more.
            if container.status == "paused":
                call_engine(container.unpause, str(container.name))

        self._undo.add(number, thaw)
        call_engine(container.pause, str(container.name))

    def _shape(self, number: int, fault: Fault, name: str) -> None:
        pid = self._fleet.pid(name)
        if fault.mbit_per_s is not None:
            discipline = rate_limit(fault.mbit_per_s)
        elif fault.delay_s is not None:
            discipline = latency(fault.delay_s)
        else:
            assert fault.share is not None, "checked"
            discipline = loss(fault.share)
        both = fault.fault is not FaultKind.LOSS
        for command in self._host.shape(pid, discipline, both=both):
            self._undo.add(number, lambda command=command: self._unshape(name, pid, command))  # type: ignore[misc]

    def _unshape(self, name: str, pid: int, command: list[str]) -> None:
        try:
            self._host.run(*command)
        except DilocoError:
            # A container that was started again has new links, undisturbed.
            if self._fleet.container(name).attrs["State"]["Pid"] == pid:
                raise

    def _fill(self, number: int, name: str) -> None:
        filler = f"{self._store_of(self._fleet.container(name).attrs)}/.filler"
        self._undo.add(number, lambda: self._execute(name, ["rm", "-f", filler]))
        # It ends with an error by itself once the disk is full.
        container = self._fleet.container(name)
        command = ["dd", "if=/dev/zero", f"of={filler}", "bs=64k"]
        call_engine(lambda: container.exec_run(command), name)

    def _execute(self, name: str, command: list[str]) -> None:
        container = self._fleet.container(name)
        done = call_engine(lambda: container.exec_run(command), name)
        if done.exit_code != 0:
            said = " ".join(done.output.decode(errors="replace").split())
            raise DilocoError(Reason.FAULT_IMPOSSIBLE, f"{command[0]} in {name}: {said}")

    # -- partitions -------------------------------------------------------------------------------

    def _partition(self, number: int, groups: tuple[tuple[str, ...], ...]) -> None:
        """Takes the first group off every network that it shares with the second one.

        Where it is more than one, its members get a network of their own, under the same names.
        """
        one, other = groups
        elsewhere = {
            network
            for name in other
            for network in self._fleet.container(name).attrs["NetworkSettings"]["Networks"]
        }
        aliases: dict[str, list[str]] = {}
        for name in one:
            container = self._fleet.container(name)
            for network_name, settings in list(_networks(container).items()):
                if network_name in elsewhere:
                    aliases.setdefault(name, []).extend(settings.get("Aliases") or ())
                    self._take_off(number, container, network_name, settings)
        if len(one) > 1:
            self._give_network(number, aliases)

    def _take_off(
        self, number: int, container: Container, network_name: str, settings: dict[str, Any]
    ) -> None:
        network = call_engine(lambda: self._client.networks.get(network_name), network_name)
        fixed = (settings.get("IPAMConfig") or {}).get("IPv4Address")
        names = settings.get("Aliases") or []

        def put_back() -> None:
            call_engine(container.reload, str(container.name))
            if network_name not in _networks(container):
                call_engine(
                    lambda: network.connect(container, aliases=names, ipv4_address=fixed),
                    str(container.name),
                )

        self._undo.add(number, put_back)
        call_engine(lambda: network.disconnect(container, force=True), str(container.name))

    def _give_network(self, number: int, aliases: dict[str, list[str]]) -> None:
        name = f"{self._fleet.project}-chaos-{number}"
        network = call_engine(lambda: self._client.networks.create(name, internal=True), name)
        self._undo.add(number, lambda: self._drop_network(network))
        for member, names in aliases.items():
            container = self._fleet.container(member)
            call_engine(
                lambda container=container, names=names: network.connect(container, aliases=names),
                member,
            )

    @staticmethod
    def _drop_network(network: Network) -> None:
        call_engine(network.reload, str(network.name))
        for container in network.containers:
            call_engine(
                lambda container=container: network.disconnect(container, force=True),
                str(network.name),
            )
        call_engine(network.remove, str(network.name))


def _networks(container: Container) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = container.attrs["NetworkSettings"]["Networks"]
    return found


def with_names(sample: Sample, ids: dict[str, str]) -> Sample:
    """Returns a sample with learners under the names of their containers; others are left out."""
    named = {ids[x]: seen for x, seen in sample.learners.items() if x in ids}
    return replace(sample, learners=named)
