"""``diloco-health``: what a container engine is told, and that it costs little to ask."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from decoupled_diloco import health as ours
from decoupled_diloco.errors import DilocoError, Reason


@pytest.fixture
def service() -> Iterator[tuple[str, health.HealthServicer]]:
    """A health service and its address."""
    servicer = health.HealthServicer()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", servicer
    server.stop(None).wait()


def ask(*arguments: str) -> Result:
    result = CliRunner().invoke(ours.cli, list(arguments), standalone_mode=False)
    if isinstance(result.exception, Exception):
        raise result.exception
    return result


def unwell(*arguments: str) -> str:
    with pytest.raises(DilocoError) as caught:
        ask(*arguments)
    assert caught.value.reason is Reason.UNAVAILABLE
    return caught.value.message


def test_a_server_is_well_while_it_says_so(service) -> None:
    address, servicer = service
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert ask("serving", address).return_value == 0
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert "answers NOT_SERVING" in unwell("serving", address)


def test_nobody_there_is_not_well() -> None:
    assert "127.0.0.1:1 does not answer" in unwell("serving", "127.0.0.1:1", "--timeout", "0.5")


def test_a_learner_is_well_while_it_writes_its_steps(tmp_path: Path) -> None:
    name = tmp_path / "learner-id"
    arguments = ("writing", str(tmp_path), "--name-file", str(name), "--max-age", "60")
    assert "learner-id cannot be read yet" in unwell(*arguments)
    name.write_text("learner-7\n")
    assert "learner-7.jsonl cannot be read yet" in unwell(*arguments)
    journal = tmp_path / "metrics" / "learner-7.jsonl"
    journal.parent.mkdir()
    journal.touch()
    assert ask(*arguments).return_value == 0
    os.utime(journal, (0, 0))
    assert "at most 60 s are usual" in unwell(*arguments)
    assert ask("writing", str(tmp_path), "--name", "learner-7").return_value == 0


def test_it_imports_neither_torch_nor_our_messages() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.modules['decoupled_diloco.v1'] = None; "
        "from decoupled_diloco.health import main; main()"
    )
    command = [sys.executable, "-c", script, "serving", "127.0.0.1:1", "--timeout", "0.5"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 75
    assert done.stderr.startswith("error: UNAVAILABLE: 127.0.0.1:1 does not answer")
