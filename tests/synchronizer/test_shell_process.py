"""The synchronizer as a process of its own: exit codes, one line per error, health, drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decoupled_diloco.channel import error_from_rpc
from decoupled_diloco.codecs import get_codec, payload_digest
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.settings import PROTOCOL_VERSION
from decoupled_diloco.settings_proto import settings_from_proto
from decoupled_diloco.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    replication_pb2,
    replication_pb2_grpc,
    synchronizer_pb2_grpc,
    types_pb2,
)
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.wire import tensors_to
from synchronizer_server.cli import main
from synchronizer_server.server import Server
from synchronizer_server.settings import ServerSettings
from tests.synchronizer.fake_learner import TENSORS, layout_of, make_settings, vector_for

pytestmark = pytest.mark.integration

PATIENCE_S = 60.0
FLAGS = ("--num-fragments", "4", "--num-learners", "1", "--no-grace", "--drain-s", "0.2")


def poll(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


class Process:
    """A synchronizer started with the command line."""

    def __init__(self, directory: Path, *flags: str) -> None:
        directory.mkdir(exist_ok=True)
        self.log = directory / f"log-{len(list(directory.iterdir()))}"
        command = [sys.executable, "-m", "synchronizer_server.cli", "serve"]
        command += ["--address", "127.0.0.1:0", "--store", str(directory / "store"), *FLAGS, *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=Path(__file__).parents[2]
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def port(self) -> int:
        pattern = r"serves run \S+ on port (\d+)"
        poll(lambda: re.search(pattern, self.text) or self.process.poll() is not None)
        found = re.search(pattern, self.text)
        assert found is not None, self.text
        return int(found[1])

    def channel(self) -> contextlib.AbstractContextManager[grpc.Channel]:
        return grpc.insecure_channel(f"127.0.0.1:{self.port}")

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts synchronizers, and leaves none behind."""
    started: list[Process] = []

    def make(*flags: str) -> Process:
        started.append(Process(tmp_path, *flags))
        return started[-1]

    yield make
    for process in started:
        process.kill()


COMMAND_LINES: dict[str, tuple[list[str], int, list[str]]] = {
    "unknown flag": (["--quorun", "1"], 64, ["CONFIG_UNKNOWN_KEY", "--quorum"]),
    "unknown key": (
        ["--config", "{directory}/config.toml"],
        64,
        ["CONFIG_UNKNOWN_KEY", "quorun", "did you mean quorum", "config.toml"],
    ),
    "quorum above learners": (
        ["--quorum", "2"], 64, ["QUORUM_ABOVE_LEARNERS", "quorum is 2", "1 learners"]
    ),
    "no address": (["--address", "nowhere"], 64, ["CONFIG_INVALID", "host:port"]),
    "no address of a page": (["--http-address", "8080"], 64, ["CONFIG_INVALID", "host:port"]),
    "trainer file": (["--trainer-json-file", "/no/such"], 64, ["CONFIG_INVALID", "/no/such"]),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_settings_that_cannot_be_are_told_in_one_line(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags, code, words = COMMAND_LINES[name]
    (tmp_path / "config.toml").write_text("[run]\nquorun = 1\n")
    flags = [flag.format(directory=tmp_path) for flag in flags]
    monkeypatch.setattr(sys, "argv", ["diloco-synchronizer", "serve", *FLAGS, *flags])
    with pytest.raises(SystemExit) as caught:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == code
    assert line.startswith(f"error: {words[0]}: ")
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("changes", "reason", "word"),
    [
        ({"address": "0.0.0.0:0"}, Reason.CONFIG_CONFLICT, "--insecure"),
        ({"http_address": "0.0.0.0:0"}, Reason.CONFIG_CONFLICT, "--insecure"),
        ({"journal": Path("/dev/null/x")}, Reason.STORAGE_FAILED, "/dev/null/x"),
        ({"store": Path("/dev/null")}, Reason.STORAGE_FAILED, "/dev/null"),
        ({"redis": "redis://127.0.0.1:1"}, Reason.MEMBERSHIP_UNAVAILABLE, "127.0.0.1:1"),
    ],
    ids=["not loopback", "page not on loopback", "journal", "store is a file", "no redis"],
)
def test_what_cannot_start_ends_with_the_reason(
    tmp_path: Path, changes: dict[str, object], reason: Reason, word: str
) -> None:
    settings = {"address": "127.0.0.1:0", "store": tmp_path / "store"} | changes
    with pytest.raises(DilocoError) as caught:
        asyncio.run(serve_with(settings))
    assert caught.value.reason is reason
    assert word in caught.value.message


async def serve_with(settings: dict[str, object]) -> int:
    return await Server(make_settings(), ServerSettings(**settings)).serve()


@pytest.mark.parametrize("flag", ["--address", "--http-address"])
def test_a_port_in_use_is_one_line_and_exit_64(flag: str, start: Callable[..., Process]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(flag, f"127.0.0.1:{port}")
        assert process.exit_code() == 64
    (line,) = [x for x in process.text.splitlines() if x.startswith("error: ")]
    assert line.startswith(f"error: PORT_IN_USE: cannot listen on 127.0.0.1:{port}")
    assert "Traceback" not in process.text


def test_the_page_of_a_process_says_what_its_rpc_says(start: Callable[..., Process]) -> None:
    process = start("--http-address", "127.0.0.1:0", "--drain-s", "60")
    with process.channel() as channel:
        status = admin_pb2_grpc.AdminServiceStub(channel).GetStatus(
            admin_pb2.GetStatusRequest(), wait_for_ready=True
        )
    poll(lambda: "status page at" in process.text)
    (url,) = re.findall(r"status page at (\S+)", process.text)
    with urllib.request.urlopen(f"{url}status.json") as answer:
        facts = json.load(answer)
    assert facts["address"] == f"127.0.0.1:{process.port}"
    assert facts["leader"]["leader_id"] == status.claim.leader_id
    assert [x["text"] for x in facts["events"]] == ["term 1 begins at global step 0"]
    with urllib.request.urlopen(url) as answer:
        assert b"<title>" in answer.read()
    with urllib.request.urlopen(f"{url}metrics") as answer:
        assert b"\ndiloco_leader 1.0\n" in answer.read()
    process.terminate()
    assert process.exit_code() == 143, "who looks is no reason to stay"


def refused(call: Callable[[], object]) -> tuple[DilocoError, grpc.StatusCode]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return error_from_rpc(caught.value), caught.value.code()


class Health:
    """The health of one service, over a stream that began before."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        stub = health_pb2_grpc.HealthStub(channel)
        self._call = stub.Watch(health_pb2.HealthCheckRequest(service=service))

    def next(self) -> str:
        return health_pb2.HealthCheckResponse.ServingStatus.Name(next(self._call).status)


def test_health_drain_and_what_is_not_served(start: Callable[..., Process]) -> None:
    process = start("--log-format", "json")
    with process.channel() as channel:
        health = [Health(channel, x) for x in ("", "decoupled_diloco.v1.SynchronizerService")]
        seen = [h.next() for h in health]
        assert set(seen) <= {"SERVING", "NOT_SERVING"}
        while set(seen) != {"SERVING"}:
            seen = [s if s == "SERVING" else h.next() for s, h in zip(seen, health, strict=True)]
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        calls: list[Callable[[], object]] = [
            lambda: admin.Promote(admin_pb2.PromoteRequest()),
            lambda: next(
                replication_pb2_grpc.ReplicationServiceStub(channel).Replicate(
                    iter([replication_pb2.ReplicateRequest()])
                )
            ),
        ]
        for call in calls:
            error, code = refused(call)
            assert error.reason is Reason.UNIMPLEMENTED
            assert code is grpc.StatusCode.UNIMPLEMENTED
        error, _ = refused(lambda: admin.GetRun(admin_pb2.GetRunRequest(protocol_version=9)))
        assert error.reason is Reason.PROTOCOL_MISMATCH
        run = admin.GetRun(admin_pb2.GetRunRequest(protocol_version=PROTOCOL_VERSION))
        assert settings_from_proto(run.settings).num_fragments == 4
        process.terminate()
        assert [h.next() for h in health] == ["NOT_SERVING"] * 2
        assert process.exit_code() == 143
    assert all(line.startswith("{") for line in process.text.splitlines()), process.text


class Trainer:
    """A learner of one process, in blocking calls."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = synchronizer_pb2_grpc.SynchronizerServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.joined = self._stub.Join(
            pb.JoinRequest(
                protocol_version=PROTOCOL_VERSION,
                learner_id="a",
                request_id="request",
                tensors=tensors_to(TENSORS),
            )
        )
        self.layout = layout_of(settings_from_proto(self.joined.settings))

    def seed(self) -> None:
        for fragment in self.layout.fragments:
            vector = vector_for(fragment.index, fragment.num_elements, 0)
            answer = self._push("fp32", vector, fragment.index, kind=pb.PUSH_KIND_SEED)
            assert answer.outcome == pb.PUSH_OUTCOME_ACCEPTED, answer

    def _push(self, codec: str, vector: object, fragment: int, **fields: object) -> pb.PushResponse:
        payload = bytes(get_codec(codec).encode(vector))
        encoding = types_pb2.Encoding(
            codec=codec,
            num_elements=vector.numel(),
            payload_bytes=len(payload),
            digest=payload_digest(payload),
        )
        header = pb.PushHeader(
            learner_id="a",
            incarnation=self.joined.incarnation,
            term=self.joined.claim.term,
            fragment=fragment,
            encoding=encoding,
            **fields,
        )
        chunk = types_pb2.Chunk(data=payload)
        return self._stub.Push(iter([pb.PushRequest(header=header), pb.PushRequest(chunk=chunk)]))

    def train(self, num_rounds: int) -> None:
        """Reports steps and answers pulls until so many rounds are accepted."""
        steps, local_step = [self.joined.local_step], self.joined.local_step

        def requests() -> Iterator[pb.ReportRequest]:
            hello = pb.ReportHello(learner_id="a", incarnation=self.joined.incarnation)
            yield pb.ReportRequest(hello=hello)
            while not done:
                if steps:
                    clock = types_pb2.Clock(own_step=steps.pop() + 1)
                    step = pb.InnerStep(clock=clock, num_tokens=8, num_steps=1)
                    yield pb.ReportRequest(inner_step=step)
                time.sleep(0.002)

        done: list[bool] = []
        call = self._stub.Report(requests())
        for message in call:
            if message.WhichOneof("kind") != "pull":
                continue
            local_step += 1
            self._answer(message.pull, local_step)
            num_rounds -= 1
            if not num_rounds:
                break
            steps.append(local_step)
        done.append(True)
        poll(lambda: self.status().global_step == message.pull.global_step)
        call.cancel()

    def status(self) -> admin_pb2.GetStatusResponse:
        return self.admin.GetStatus(admin_pb2.GetStatusRequest())

    def _answer(self, pull: pb.Pull, local_step: int) -> None:
        versions = {v.fragment: v.version for v in self.status().versions}
        vector = vector_for(pull.fragment, self.layout.fragments[pull.fragment].num_elements, 1)
        answer = self._push(
            "bf16",
            vector,
            pull.fragment,
            kind=pb.PUSH_KIND_OUTER_GRADIENT,
            global_step=pull.global_step,
            base=versions[pull.fragment],
            local_step=local_step,
            num_tokens=8,
            num_steps=1,
        )
        assert answer.outcome == pb.PUSH_OUTCOME_ACCEPTED, answer


def test_kill_and_go_on_to_the_end_then_damage(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    """One life that is killed, one that completes the run, and one that finds damage."""
    first = start("--total-global-steps", "4")
    with first.channel() as channel:
        trainer = Trainer(channel)
        assert trainer.joined.seed
        trainer.seed()
        trainer.train(2)
        versions = [v.SerializeToString() for v in trainer.status().versions]
    first.kill()

    second = start("--total-global-steps", "4")
    with second.channel() as channel:
        trainer = Trainer(channel)
        assert [v.SerializeToString() for v in trainer.status().versions] == versions
        assert (trainer.joined.incarnation.term, trainer.joined.incarnation.number) == (2, 2)
        assert not trainer.joined.seed
        trainer.train(2)
        poll(lambda: trainer.status().state == "complete")
        second.terminate()
        assert second.exit_code() == 0

    for path in (tmp_path / "store").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
    third = start()
    assert third.exit_code() == 74
    assert third.text.splitlines()[-1].startswith("error: STORE_CORRUPT: "), third.text
