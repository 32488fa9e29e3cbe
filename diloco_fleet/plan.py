"""What ``diloco run`` starts: commands, environment, port and devices of every process."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from decoupled_diloco.config import ENV_PREFIX
from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.fault_points import VARIABLE as FAULTS
from decoupled_diloco.fault_points import for_process
from decoupled_diloco.setting_fields import Setting, settings_of
from decoupled_diloco.settings import RunSettings
from diloco_fleet.fleet_settings import Resolved
from diloco_fleet.metrics import EVALUATOR, SYNCHRONIZER, is_synchronizer
from diloco_fleet.process import ProcessSpec
from diloco_fleet.run_files import RunFiles
from diloco_fleet.standby import RedisPlan, plan_redis

MAX_LOCAL_LEARNERS: Final = 256
"""Learners that `diloco run` starts at most: each is a process with its own PyTorch."""

_HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The processes of a fleet.

    Attributes:
        addresses: host:port of each synchronizer.
        synchronizers: their processes.
        evaluator: its process.
        learners: their processes, by index.
        redis: what the synchronizers meet on; None without a standby.
        pages: where a browser finds the status page of each synchronizer.
    """

    addresses: tuple[str, ...]
    synchronizers: tuple[ProcessSpec, ...]
    evaluator: ProcessSpec
    learners: tuple[ProcessSpec, ...]
    redis: RedisPlan | None = None
    pages: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """Where the synchronizers listen, separated by commas."""
        return ",".join(self.addresses)

    def synchronizer_at(self, address: str | None) -> str | None:
        """Returns the name of the synchronizer that listens at an address; None for no such."""
        names = {a: spec.name for a, spec in zip(self.addresses, self.synchronizers, strict=True)}
        return names.get(address or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planner:
    """What the commands of all processes are made from.

    Attributes:
        resolved: all settings.
        files: the run directory.
        environment: environment of every process.
        faults: script of faults of a test; empty without one.
        log_format: format of the logs.
    """

    resolved: Resolved
    files: RunFiles
    environment: Mapping[str, str]
    faults: str
    log_format: str

    def spec(self, name: str, module: str, *arguments: str) -> ProcessSpec:
        command = (sys.executable, "-m", module, *arguments, "--log-format", self.log_format)
        faults = {FAULTS: for_process(self.faults, name)} if self.faults else {}
        return ProcessSpec(
            name=name,
            command=command,
            log=self.files.log_of(name),
            environment={**self.environment, **faults},
            finishes=not is_synchronizer(name),
        )

    def synchronizer(
        self, name: str, index: int, address: str, page: str, *more: str
    ) -> ProcessSpec:
        return self.spec(
            name,
            "synchronizer_server.cli",
            *("serve", "--address", address, "--http-address", page),
            *("--store", str(self.files.store_of(index))),
            *("--snapshots", str(self.files.snapshots)),
            *("--journal", str(self.files.metrics_of(name))),
            *("--trainer-json-file", str(self.files.trainer)),
            *more,
            *run_flags(self.resolved.run.value),
        )

    def learners(self, devices: Sequence[str], *common: str) -> tuple[ProcessSpec, ...]:
        fleet = self.resolved.fleet.value
        factors = fleet.slow_factors(len(devices))
        specs = []
        for index, device in enumerate(devices):
            name = f"learner-{index}"
            arguments = ["train", *common, "--learner-id", name, "--device", device]
            arguments += ["--recover", fleet.recover]
            if fleet.recover == "checkpoint":
                arguments += ["--checkpoint-every-s", repr(fleet.checkpoint_every_s)]
            arguments += ["--snapshots", str(self.files.snapshots)]
            arguments += ["--resume-from", str(self.files.resume_part(name))]
            arguments += ["--pace", repr(fleet.pace)] if fleet.pace else []
            arguments += ["--slow", repr(factors[index])] if index in factors else []
            specs.append(self.spec(name, "learner_client.cli", *arguments))
        return tuple(specs)


def make_plan(
    resolved: Resolved, files: RunFiles, environ: Mapping[str, str], *, log_format: str = "text"
) -> Plan:
    """Decides everything that is needed to start the fleet.

    Raises:
        UsageError: PORT_IN_USE, DEVICE_UNAVAILABLE, CONFIG_INVALID for no device or no Redis,
            CONFIG_CONFLICT for a run that had a standby and shall have none.
    """
    run, fleet = resolved.run.value, resolved.fleet.value
    _check_size(run.num_learners)
    _check_stores(files, standby=fleet.standby)
    devices = [learner_device(fleet.device, index) for index in range(run.num_learners)]
    planner = _Planner(
        resolved=resolved,
        files=files,
        environment=child_environment(environ, num_learners=run.num_learners),
        faults=environ.get(FAULTS, ""),
        log_format=log_format,
    )
    num_synchronizers = 2 if fleet.standby else 1
    *ports, redis_port = free_ports(fleet.port, *[0] * (2 * num_synchronizers))
    redis = None
    if fleet.standby:
        redis = plan_redis(fleet.redis, files, redis_port, planner.environment)
    local = tuple(f"{_HOST}:{port}" for port in ports)
    addresses, pages = local[:num_synchronizers], local[num_synchronizers:]
    common = ("--address", ",".join(addresses), "--run-dir", str(files.root))
    evaluator = planner.spec(
        EVALUATOR,
        "learner_client.cli",
        *("evaluate", *common, "--every", str(fleet.evaluate_every), "--device", devices[0]),
    )
    return Plan(
        addresses=addresses,
        synchronizers=_synchronizers(planner, addresses, pages, redis),
        evaluator=evaluator,
        learners=planner.learners(devices, *common),
        redis=redis,
        pages=tuple(f"http://{page}/" for page in pages),
    )


def _synchronizers(
    planner: _Planner,
    addresses: tuple[str, ...],
    pages: tuple[str, ...],
    redis: RedisPlan | None,
) -> tuple[ProcessSpec, ...]:
    """One synchronizer; or several that know of one another and meet on a Redis."""
    url = planner.resolved.fleet.value.redis if redis is None else redis.url
    # Not as a flag: everybody on the machine could read the password in it.
    secrets = {f"{ENV_PREFIX}REDIS": url} if url else {}
    specs = []
    for index, address in enumerate(addresses):
        name = SYNCHRONIZER
        more: tuple[str, ...] = ()
        if redis is not None:
            name = f"{SYNCHRONIZER}-{index}"
            peers = ",".join(other for other in addresses if other != address)
            more = ("--peers", peers, "--advertise", address, "--key-file", str(planner.files.key))
        spec = planner.synchronizer(name, index, address, pages[index], *more)
        environment = {**spec.environment, **secrets}
        specs.append(dataclasses.replace(spec, environment=environment))
    return tuple(specs)


def _check_stores(files: RunFiles, *, standby: bool) -> None:
    second = files.store_of(1)
    if not standby and second.exists():
        raise UsageError(
            Reason.CONFIG_CONFLICT,
            f"standby is off, but this run had one whose store {second.name} may hold the newest "
            "rounds; resume it with --standby",
            path=second,
        )


def _check_size(num_learners: int) -> None:
    if num_learners > MAX_LOCAL_LEARNERS:
        raise UsageError(
            Reason.CONFIG_INVALID,
            f"num_learners is {num_learners}; one machine runs at most {MAX_LOCAL_LEARNERS} "
            "learners as processes: lower --learners, or start learners on more machines",
        )


def run_flags(run: RunSettings) -> list[str]:
    """Returns the settings of a run as flags of the synchronizer, without the trainer's."""
    flags: list[str] = []
    for setting in settings_of(RunSettings):
        if setting.name != "trainer_json":
            flags += _flag(setting, getattr(run, setting.name))
    return flags


def _flag(setting: Setting, value: object) -> list[str]:
    if isinstance(value, bool):
        return [setting.flag if value else setting.flag.replace("--", "--no-", 1)]
    return [setting.flag, str(value)]


def child_environment(environ: Mapping[str, str], *, num_learners: int) -> dict[str, str]:
    """Returns the environment of the fleet's processes.

    Settings are resolved already, so their variables are left out; threads are shared out so
    that learners do not fight over the cores, unless OMP_NUM_THREADS is set.

    Args:
        environ: this process's environment.
        num_learners: planned learners.
    """
    threads = max(1, (os.cpu_count() or 1) // (num_learners + 1))
    kept = {key: value for key, value in environ.items() if not key.startswith(ENV_PREFIX)}
    return {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", **kept}


def free_ports(*ports: int) -> list[int]:
    """Returns ports of the loopback interface that nobody listens on, no two the same.

    Args:
        *ports: the ports wanted; 0 for any.

    Raises:
        UsageError: PORT_IN_USE.
    """
    with ExitStack() as probes:
        return [_free_port(probes, port) for port in ports]


def _free_port(probes: ExitStack, port: int) -> int:
    probe = probes.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((_HOST, port))
    except OSError as error:
        raise UsageError(
            Reason.PORT_IN_USE,
            f"port {port} of {_HOST} cannot be used ({error.strerror}); choose another --port, "
            "or leave it out for a free one",
            port=port,
        ) from error
    return int(probe.getsockname()[1])


def learner_device(name: str, index: int) -> str:
    """Returns the device of a learner; learner i of a GPU machine uses ``cuda:(i mod n)``.

    Raises:
        UsageError: CONFIG_INVALID for no device, DEVICE_UNAVAILABLE for one that is not there.
    """
    if name == "cpu":
        return name
    from learner_client.train.device import resolve_device

    return str(resolve_device(name, index))
