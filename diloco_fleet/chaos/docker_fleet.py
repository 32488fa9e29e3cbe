"""A composed fleet as its engine knows it: which container is who, and what its processes wrote."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from diloco_fleet.metrics import RunMetrics, parse_metrics

if TYPE_CHECKING:
    from docker.client import DockerClient
    from docker.models.containers import Container

_PROJECT: Final = "com.docker.compose.project"
_SERVICE: Final = "com.docker.compose.service"
_NUMBER: Final = "com.docker.compose.container-number"
_ROLE: Final = "org.decoupled-diloco.role"
_ROLES: Final = ("learner", "synchronizer", "redis", "evaluator")
_MAX_BYTES: Final = 1 << 30


class ComposedFleet:
    """The containers of a composed fleet.

    Learners are called ``learner-0`` and so on, in the order of service and number, whatever id
    they have in the run; synchronizers ``synchronizer-0``, then ``synchronizer-1``.

    Args:
        client: the engine.
        project: of the composed fleet.

    Raises:
        UsageError: TARGET_NOT_FOUND where the engine has no such fleet.
    """

    def __init__(self, client: DockerClient, project: str) -> None:
        self._client = client
        self.project = project
        self._containers = self._find()
        self._ids: dict[str, str] = {}
        if not any(name.startswith("learner") for name in self._containers):
            raise UsageError(
                Reason.TARGET_NOT_FOUND,
                f"the engine has no learner of project {project}; start the fleet with `docker "
                "compose up`, or name it with --project",
            )

    def _find(self) -> dict[str, Container]:
        found = self._client.containers.list(
            all=True, filters={"label": f"{_PROJECT}={self.project}"}
        )
        by_role: dict[str, list[Container]] = {role: [] for role in _ROLES}
        for container in sorted(found, key=_order):
            role = container.labels.get(_ROLE)
            if role in by_role:
                by_role[role].append(container)
        named: dict[str, Container] = {}
        for role, containers in by_role.items():
            alone = len(containers) == 1 and role != "learner"
            named |= {
                (role if alone else f"{role}-{index}"): container
                for index, container in enumerate(containers)
            }
        return named

    def names(self) -> frozenset[str]:
        """Everybody of the fleet."""
        return frozenset(self._containers)

    def container(self, name: str) -> Container:
        """The container of a name, as it is now.

        Raises:
            DilocoError: TARGET_NOT_FOUND where it is gone.
        """
        container = self._containers[name]
        call_engine(container.reload, name)
        return container

    def running(self) -> list[str]:
        """Names of those that run, frozen or not."""
        found = call_engine(
            lambda: self._client.containers.list(
                filters={"label": f"{_PROJECT}={self.project}"}, sparse=True
            ),
            self.project,
        )
        ids = {container.id for container in found}
        return [name for name, container in self._containers.items() if container.id in ids]

    def restarts(self) -> dict[str, int]:
        """How often the engine has started each container again."""
        return {
            name: int(self.container(name).attrs.get("RestartCount", 0)) for name in self.names()
        }

    def pid(self, name: str) -> int:
        """Pid of the first process of a container, on the host.

        Raises:
            DilocoError: TARGET_NOT_FOUND where it is not running.
        """
        pid = int(self.container(name).attrs["State"]["Pid"])
        if pid <= 0:
            raise DilocoError(Reason.TARGET_NOT_FOUND, f"{name} is not running now")
        return pid

    def addresses(self) -> dict[str, str]:
        """Where the synchronizers are reached from here.

        Raises:
            UsageError: TARGET_NOT_FOUND where a port is not published.
        """
        addresses = {}
        for name in self._containers:
            if not name.startswith("synchronizer"):
                continue
            ports = self.container(name).attrs["NetworkSettings"].get("Ports") or {}
            published = [entry for entries in ports.values() for entry in entries or ()]
            if not published:
                raise UsageError(
                    Reason.TARGET_NOT_FOUND,
                    f"{name} publishes no port, so nobody can watch it from here; publish its port "
                    "on 127.0.0.1, and see that it runs",
                )
            host = published[0]["HostIp"]
            host = "127.0.0.1" if host in {"", "0.0.0.0"} else host
            addresses[name] = f"{host}:{published[0]['HostPort']}"
        return addresses

    def learner_ids(self) -> dict[str, str]:
        """Names of learners by their id in the run, as far as they have one yet."""
        for name, container in self._containers.items():
            if not name.startswith("learner") or name in self._ids.values():
                continue
            learner_id = _option(container, "--learner-id")
            path = _option(container, "--learner-id-file")
            if not learner_id and path:
                learner_id = self._read(container, path).get(path.rpartition("/")[2], "").strip()
            if learner_id:
                self._ids[learner_id] = name
        return self._ids

    def metrics(self) -> RunMetrics:
        """What the processes wrote, with learners under their names here; empty without any."""
        ids = self.learner_ids()
        texts: dict[str, str] = {}
        for container in self._containers.values():
            folder = _option(container, "--run-dir")
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
        from docker.errors import APIError

        try:
            chunks, _ = container.get_archive(path)
            content = b"".join(chunks)
        except APIError:
            return {}
        if len(content) > _MAX_BYTES:
            raise DilocoError(Reason.OVERSIZED, f"{path} of {container.name} is too large to read")
        files = {}
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive.getmembers():
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    name = member.name.rpartition("/")[2]
                    files[name] = file.read().decode("utf-8", errors="replace")
        return files


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


def _order(container: Container) -> tuple[bool, str, int]:
    labels: Mapping[str, str] = container.labels
    service = labels.get(_SERVICE, "")
    number = labels.get(_NUMBER, "0")
    # Of two synchronizers the one whose service is called like its role is the first.
    return (service != labels.get(_ROLE), service, int(number) if number.isdigit() else 0)


def _option(container: Container, flag: str) -> str:
    """Value of an option of a container's command; empty where it is not given."""
    words = [str(word) for word in container.attrs.get("Args") or ()]
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return ""
