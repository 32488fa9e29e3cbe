"""A composed fleet as its engine knows it: which container is who, and what its processes wrote."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from diloco_fleet.metrics import RunMetrics, parse_metrics

if TYPE_CHECKING:
    from docker.client import DockerClient
    from docker.models.containers import Container

_PROJECT: Final = "com.docker.compose.project"
_SERVICE: Final = "com.docker.compose.service"
_NUMBER: Final = "com.docker.compose.container-number"
_ONE_OFF: Final = "com.docker.compose.oneoff"
_ROLE: Final = "org.decoupled-diloco.role"
_ROLES: Final = ("learner", "synchronizer", "redis", "evaluator")
_EVERYWHERE: Final = MappingProxyType({"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"})
_MAX_BYTES: Final = 1 << 30


class _Place(NamedTuple):
    """What compose calls a container, also when it makes it anew."""

    role: str
    service: str
    number: int


class ComposedFleet:
    """The containers of a composed fleet.

    Learners are called ``learner-0`` and so on, in the order of service and number, whatever id
    they have in the run; synchronizers ``synchronizer-0``, then ``synchronizer-1``. A name is kept
    by whoever has that service and number: also by a container that was made anew.

    Args:
        client: the engine.
        project: of the composed fleet.

    Raises:
        UsageError: TARGET_NOT_FOUND where the engine has no such fleet.
    """

    def __init__(self, client: DockerClient, project: str) -> None:
        self._client = client
        self.project = project
        found = call_engine(self._list, project)
        self._places = _name_places(found.values())
        self._containers: dict[str, Container] = {}
        self._there: set[str] = set()
        self._ids: dict[str, str] = {}
        self._id_of: dict[str, str] = {}
        self._restarts: Counter[str] = Counter()
        self._take(found)
        if not any(name.startswith("learner") for name in self._places):
            raise UsageError(
                Reason.TARGET_NOT_FOUND,
                f"the engine has no learner of project {project}; start the fleet with `docker "
                "compose up`, or name it with --project",
            )

    def refresh(self) -> None:
        """Looks which containers there are now.

        Raises:
            DilocoError: ENGINE_UNAVAILABLE.
        """
        self._take(call_engine(self._list, self.project))

    def _list(self) -> dict[_Place, Container]:
        found = self._client.containers.list(
            all=True, filters={"label": f"{_PROJECT}={self.project}"}, ignore_removed=True
        )
        lasting = [x for x in found if x.labels.get(_ONE_OFF) != "True"]
        # While one is made anew there are two for a moment; the newer one counts.
        lasting.sort(key=lambda container: str(container.attrs.get("Created", "")))
        return {_place(container): container for container in lasting}

    def _take(self, found: Mapping[_Place, Container]) -> None:
        here = {name: found[place] for name, place in self._places.items() if place in found}
        self._there = set(here)
        for name, container in here.items():
            before = self._containers.get(name)
            if before is not None and before.id != container.id:
                # Made anew: it counts from 0, and may have another id in the run.
                self._restarts[name] += _num_restarts(before)
                self._ids.pop(self._id_of.pop(name, ""), None)
        self._containers |= here

    def names(self) -> frozenset[str]:
        """Everybody of the fleet."""
        return frozenset(self._places)

    def container(self, name: str) -> Container:
        """The container of a name, as it is now.

        Raises:
            DilocoError: TARGET_NOT_FOUND where there is none.
        """
        if not exists(self._containers[name]):
            self.refresh()
            if name not in self._there:
                raise DilocoError(Reason.TARGET_NOT_FOUND, f"the container of {name} is gone")
        return self._containers[name]

    def there(self) -> frozenset[str]:
        """Names of those that have a container now, running or not."""
        self.refresh()
        return frozenset(self._there)

    def running(self) -> list[str]:
        """Names of those that ran at the last `refresh`, frozen or not."""
        return [name for name in self._there if _pid(self._containers[name]) > 0]

    def restarts(self) -> dict[str, int]:
        """How often the engine had started each container again, at the last `refresh`."""
        return {
            name: self._restarts[name] + _num_restarts(container)
            for name, container in self._containers.items()
        }

    def pid(self, name: str) -> int:
        """Pid of the first process of a container, on the host.

        Raises:
            DilocoError: TARGET_NOT_FOUND where it is not running.
        """
        pid = _pid(self.container(name))
        if pid <= 0:
            raise DilocoError(Reason.TARGET_NOT_FOUND, f"{name} is not running now")
        return pid

    def addresses(self) -> dict[str, str]:
        """Where the synchronizers are reached from here.

        Raises:
            UsageError: TARGET_NOT_FOUND where a port is not published.
        """
        addresses = {}
        for name in self._places:
            if not name.startswith("synchronizer"):
                continue
            container = self.container(name)
            ports = container.attrs["NetworkSettings"].get("Ports") or {}
            # It may publish its status page, too.
            port = setting(container, "address").rpartition(":")[2]
            entries = ports.get(f"{port}/tcp") or [x for each in ports.values() for x in each or ()]
            if not entries:
                raise UsageError(
                    Reason.TARGET_NOT_FOUND,
                    f"{name} publishes no port, so nobody can watch it from here; publish its port "
                    "on 127.0.0.1, and see that it runs",
                )
            host = _EVERYWHERE.get(entries[0]["HostIp"], entries[0]["HostIp"])
            addresses[name] = f"{f'[{host}]' if ':' in host else host}:{entries[0]['HostPort']}"
        return addresses

    def learner_ids(self) -> dict[str, str]:
        """Names of learners by their id in the run, as far as they have one yet."""
        for name, container in self._containers.items():
            if not name.startswith("learner") or name in self._id_of:
                continue
            learner_id = setting(container, "learner_id")
            path = setting(container, "learner_id_file")
            if not learner_id and path:
                learner_id = self._read(container, path).get(path.rpartition("/")[2], "").strip()
            if learner_id:
                self._ids[learner_id], self._id_of[name] = name, learner_id
        return self._ids

    def metrics(self) -> RunMetrics:
        """What the processes wrote, with learners under their names here; empty without any."""
        ids = self.learner_ids()
        texts: dict[str, str] = {}
        for container in self._containers.values():
            folder = setting(container, "run_dir")
            if folder and not texts:
                texts = self._read(container, f"{folder}/metrics")
        named = {
            ids.get(stem, stem): text
            for name, text in texts.items()
            if (stem := name.removesuffix(".jsonl")) != name
        }
        metrics = parse_metrics(named)
        rounds = tuple(
            replace(
                entry,
                contributors=tuple(ids.get(x, x) for x in entry.contributors),
                live=tuple(ids.get(x, x) for x in entry.live),
            )
            for entry in metrics.rounds
        )
        return replace(metrics, rounds=rounds)

    def _read(self, container: Container, path: str) -> dict[str, str]:
        """Files of a container at a path, by name; empty where there is none."""
        try:
            content = call_engine(lambda: _archive(container, path), str(container.name))
        except DilocoError as error:
            if error.reason in {Reason.TARGET_NOT_FOUND, Reason.FAULT_IMPOSSIBLE}:
                return {}
            raise
        files = {}
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive.getmembers():
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    name = member.name.rpartition("/")[2]
                    files[name] = file.read().decode("utf-8", errors="replace")
        return files


def _archive(container: Container, path: str) -> bytes:
    content = bytearray()
    for chunk in container.get_archive(path)[0]:
        content += chunk
        if len(content) > _MAX_BYTES:
            raise DilocoError(Reason.OVERSIZED, f"{path} of {container.name} is too large to read")
    return bytes(content)


def exists(container: Container) -> bool:
    """Brings what is known of a container up to date; returns False where it is gone.

    Raises:
        DilocoError: ENGINE_UNAVAILABLE, FAULT_IMPOSSIBLE with the words of the engine.
    """
    try:
        call_engine(container.reload, str(container.name))
    except DilocoError as error:
        if error.reason is Reason.TARGET_NOT_FOUND:
            return False
        raise
    return True


def call_engine(work: Any, what: str) -> Any:  # noqa: ANN401 - whatever the engine answers
    """Asks the engine for something.

    Raises:
        DilocoError: TARGET_NOT_FOUND, ENGINE_UNAVAILABLE or FAULT_IMPOSSIBLE with its words.
    """
    import requests
    from docker.errors import APIError, DockerException, NotFound

    try:
        return work()
    except NotFound as error:
        raise DilocoError(
            Reason.TARGET_NOT_FOUND, f"{what} is gone: {error.explanation}"
        ) from error
    except APIError as error:
        raise DilocoError(
            Reason.FAULT_IMPOSSIBLE, f"the engine refuses it for {what}: {error.explanation}"
        ) from error
    except (DockerException, requests.RequestException) as error:
        raise DilocoError(
            Reason.ENGINE_UNAVAILABLE, f"the engine does not answer for {what}: {error}"
        ) from error


def _place(container: Container) -> _Place:
    labels: Mapping[str, str] = container.labels
    number = labels.get(_NUMBER, "0")
    return _Place(
        role=labels.get(_ROLE, ""),
        service=labels.get(_SERVICE, ""),
        number=int(number) if number.isdigit() else 0,
    )


def _name_places(containers: Iterable[Container]) -> dict[str, _Place]:
    by_role: dict[str, list[_Place]] = {role: [] for role in _ROLES}
    for place in sorted(map(_place, containers), key=_order):
        if place.role in by_role:
            by_role[place.role].append(place)
    named: dict[str, _Place] = {}
    for role, places in by_role.items():
        alone = len(places) == 1 and role != "learner"
        named |= {
            (role if alone else f"{role}-{index}"): place for index, place in enumerate(places)
        }
    return named


def _order(place: _Place) -> tuple[bool, str, int]:
    # Of two synchronizers the one whose service is called like its role is the first.
    return (place.service != place.role, place.service, place.number)


def _pid(container: Container) -> int:
    return int(container.attrs["State"]["Pid"])


def _num_restarts(container: Container) -> int:
    return int(container.attrs.get("RestartCount", 0))


def setting(container: Container, name: str) -> str:
    """A setting of a container's command, by its option or its variable; empty for neither."""
    flag = f"--{name.replace('_', '-')}"
    words = [str(word) for word in container.attrs.get("Args") or ()]
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    variable = f"DILOCO_{name.upper()}="
    environment = [str(word) for word in container.attrs["Config"].get("Env") or ()]
    found = [word.partition("=")[2] for word in environment if word.startswith(variable)]
    return found[-1] if found else ""
