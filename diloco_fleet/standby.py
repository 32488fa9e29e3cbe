"""What a fleet with a standby has beside its synchronizers: a key, and a Redis of its own.

The Redis keeps nothing on disk. What it held is in the round records, and an emptied Redis claims
nothing, while one that came back from an old file could name a standby as in sync that is not.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from decoupled_diloco.errors import Reason, UsageError
from diloco_fleet.process import ProcessSpec
from diloco_fleet.run_files import RunFiles

REDIS: Final = "redis"
"""Name of the fleet's own Redis among its processes."""

_KEY_BYTES: Final = 32
_CONFIG: Final = """\
bind 127.0.0.1
port {port}
requirepass {password}
save ""
appendonly no
dir "{folder}"
daemonize no
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisPlan:
    """The Redis that a fleet uses.

    Attributes:
        url: its address for the synchronizers; may hold a password.
        process: the fleet's own redis-server; None where Redis is somebody else's.
        config: content of that server's configuration file; empty without a server.
    """

    url: str
    process: ProcessSpec | None = None
    config: str = ""


def plan_redis(
    url: str | None, files: RunFiles, port: int, environ: Mapping[str, str]
) -> RedisPlan:
    """Decides on which Redis synchronizers with a standby meet.

    Args:
        url: the user's own, if any.
        files: the run directory.
        port: free port of the loopback interface for a server of the fleet's own.
        environ: its environment; ``PATH`` finds the program.

    Raises:
        UsageError: CONFIG_INVALID where there is neither a Redis nor a redis-server.
    """
    if url:
        return RedisPlan(url=url)
    program = shutil.which("redis-server", path=environ.get("PATH", os.defpath))
    if program is None:
        raise UsageError(
            Reason.CONFIG_INVALID,
            "standby needs a Redis, and there is no redis-server on PATH; install Redis, or give "
            "--redis redis://HOST:PORT",
        )
    password = secrets.token_hex(_KEY_BYTES)
    process = ProcessSpec(
        name=REDIS,
        command=(program, str(files.redis_config)),
        log=files.log_of(REDIS),
        environment=environ,
        finishes=False,
    )
    return RedisPlan(
        url=f"redis://:{password}@127.0.0.1:{port}",
        process=process,
        config=_CONFIG.format(port=port, password=password, folder=files.redis),
    )


def write_standby(files: RunFiles, redis: RedisPlan) -> None:
    """Writes the key, which a run keeps, and the configuration of Redis; nobody else reads them.

    Raises:
        DilocoError: DISK_FULL or STORAGE_FAILED.
    """
    from learner_client.files import storage_errors

    write_key(files.key)
    with storage_errors(files.root, "writing"):
        if redis.config:
            files.redis.mkdir(exist_ok=True)
            _write_secret(files.redis_config, redis.config)


def write_key(path: Path) -> None:
    """Writes a new secret that signs claims of leadership, unless there is one.

    Raises:
        DilocoError: DISK_FULL or STORAGE_FAILED.
    """
    from learner_client.files import storage_errors

    with storage_errors(path, "writing"):
        if not path.exists():
            new = path.with_suffix(".new")
            _write_secret(new, secrets.token_hex(_KEY_BYTES) + "\n")
            new.replace(path)


def _write_secret(path: os.PathLike[str], text: str) -> None:
    """Writes a file that only this user can read, whatever was there before."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
