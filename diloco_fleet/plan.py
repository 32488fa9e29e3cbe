"""What ``diloco run`` starts: commands, environment, port and devices of every process."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from decoupled_diloco.config import ENV_PREFIX
from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.setting_fields import Setting, settings_of
from decoupled_diloco.settings import RunSettings
from diloco_fleet.fleet_settings import Resolved
from diloco_fleet.metrics import EVALUATOR, SYNCHRONIZER
from diloco_fleet.process import ProcessSpec
from diloco_fleet.run_files import RunFiles

MAX_LOCAL_LEARNERS: Final = 256
"""Learners that `diloco run` starts at most: each is a process with its own PyTorch."""

_HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The processes of a fleet.

    Attributes:
        address: of the synchronizer, host:port.
        synchronizer: its process.
        evaluator: its process.
        learners: their processes, by index.
    """

    address: str
    synchronizer: ProcessSpec
    evaluator: ProcessSpec
    learners: tuple[ProcessSpec, ...]


def make_plan(
    resolved: Resolved, files: RunFiles, environ: Mapping[str, str], *, log_format: str = "text"
) -> Plan:
    """Decides everything that is needed to start the fleet.

    Raises:
        UsageError: PORT_IN_USE, DEVICE_UNAVAILABLE, CONFIG_INVALID for no device.
    """
    run, fleet = resolved.run.value, resolved.fleet.value
    _check_size(run.num_learners)
    devices = [learner_device(fleet.device, index) for index in range(run.num_learners)]
    address = f"{_HOST}:{free_port(fleet.port)}"
    environment = child_environment(environ, num_learners=run.num_learners)
    factors = fleet.slow_factors(run.num_learners)

    def spec(name: str, module: str, *arguments: str) -> ProcessSpec:
        is_server = name == SYNCHRONIZER
        # Not as a flag: everybody on the machine could read the password in it.
        secrets = {f"{ENV_PREFIX}REDIS": fleet.redis} if is_server and fleet.redis else {}
        command = (sys.executable, "-m", module, *arguments, "--log-format", log_format)
        return ProcessSpec(
            name=name,
            command=command,
            log=files.log_of(name),
            environment=environment | secrets,
            finishes=not is_server,
        )

    common = ("--address", address, "--run-dir", str(files.root))
    learners = []
    for index, device in enumerate(devices):
        arguments = ["--learner-id", f"learner-{index}", "--device", device]
        arguments += ["--pace", repr(fleet.pace)] if fleet.pace else []
        arguments += ["--slow", repr(factors[index])] if index in factors else []
        learners.append(
            spec(f"learner-{index}", "learner_client.cli", "train", *common, *arguments)
        )
    evaluator = spec(
        EVALUATOR,
        "learner_client.cli",
        *("evaluate", *common, "--every", str(fleet.evaluate_every), "--device", devices[0]),
    )
    synchronizer = spec(
        SYNCHRONIZER,
        "synchronizer_server.cli",
        *("serve", "--address", address, "--store", str(files.store)),
        *("--journal", str(files.metrics_of(SYNCHRONIZER))),
        *("--trainer-json-file", str(files.trainer)),
        *run_flags(run),
    )
    return Plan(
        address=address,
        synchronizer=synchronizer,
        evaluator=evaluator,
        learners=tuple(learners),
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


def free_port(port: int) -> int:
    """Returns a port of the loopback interface that nobody listens on.

    Args:
        port: the port wanted; 0 for any.

    Raises:
        UsageError: PORT_IN_USE.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
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
