"""The same over real gRPC on the loopback interface."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest
import torch
from scripted_synchronizer import ScriptedSynchronizer, until
from torch import nn

from decoupled_diloco.channel import add_port, server_options
from decoupled_diloco.codecs import CHUNK_BYTES
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.v1 import admin_pb2_grpc, synchronizer_pb2_grpc
from learner_client import Learner, State, wait_for_settings

NAME = "learner-0"


class Served:
    """A scripted synchronizer behind a real port, in a thread of its own."""

    def __init__(self, service: ScriptedSynchronizer) -> None:
        self.service = service
        self.address = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(20)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(20)

    def do(self, action) -> None:
        """Does something in the server's loop, and waits for it."""

        async def run() -> None:
            action()

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(20)

    def wait(self, condition) -> None:
        asyncio.run(until(condition))

    def away(self) -> None:
        """Stops the server; its port is refused from then on."""
        asyncio.run_coroutine_threadsafe(self._server.stop(0), self.loop).result(20)

    def back(self) -> None:
        """Starts a server on the same port."""
        asyncio.run_coroutine_threadsafe(self._start(self.address), self.loop).result(20)

    async def _start(self, address: str) -> None:
        self._server = grpc.aio.server(options=server_options())
        synchronizer_pb2_grpc.add_SynchronizerServiceServicer_to_server(self.service, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self.service, self._server)
        port = add_port(self._server, address)
        await self._server.start()
        self.address = f"127.0.0.1:{port}"

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        await self._start("127.0.0.1:0")
        self._ready.set()
        await self._ended.wait()
        await self._server.stop(0)


@contextlib.contextmanager
def served(**settings) -> Iterator[Served]:
    defaults = {"num_fragments": 3, "overlap": 1, "codec_up": "fp32"}
    running = Served(ScriptedSynchronizer(RunSettings(**(defaults | settings))))
    running.start()
    try:
        yield running
    finally:
        running.stop()


def make_model(width: int = 8) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))


def test_a_learner_trains_over_two_connections_of_its_own():
    """More than 1 MiB per fragment: several chunks each way, and the bits are the same."""
    model = make_model(700)
    with served() as running:
        service = running.service
        assert wait_for_settings(running.address, timeout_s=20) == RunSettings(
            num_fragments=3, overlap=1, codec_up="fp32", push_floor_s=1.0
        )
        with Learner(model, address=running.address, learner_id=NAME) as learner:
            layout = learner._layout()
            out = torch.empty(layout.fragments[1].num_elements)
            learner._parameters.read_fragment(layout.fragments[1], out)
            base = out.clone()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.125)
            learner.step(num_tokens=4, loss=3.0)
            learner._parameters.read_fragment(layout.fragments[1], out)
            running.wait(lambda: service.steps)
            service.push_offsets.clear()
            service.cut_push_at = 1
            running.do(lambda: service.pull(NAME, 1, 1))
            running.wait(lambda: service.pushes)
            assert service.push_offsets == [0, 0, CHUNK_BYTES], "resumed where it was staged"
            assert torch.equal(service.pushes[0].vector, base - out)
            running.do(lambda: service.publish(1, 1, torch.randn(out.numel())))
            running.wait(lambda: learner.status.num_updates == 4)
            learner.step(num_tokens=4)
            learner._parameters.read_fragment(layout.fragments[1], out)
            assert torch.equal(out, service.published[1][1])
            assert learner.status.bytes_down > 0
        sockets = {wire.split(" ", 1)[0]: wire.split(" ", 1)[1] for wire in service.wires}
        assert sockets["report"] != sockets["watch"]
        assert sockets["push"] == sockets["watch"]
        assert [leave.reason for leave in service.leaves] == ["done"]


def test_the_connection_comes_back_after_an_outage():
    with served(heartbeat_interval_s=0.05) as running:
        service = running.service
        with Learner(make_model(), address=running.address, learner_id=NAME) as learner:
            running.away()
            running.wait(lambda: not learner.status.online)
            learner.step(num_tokens=1)
            learner.step(num_tokens=1)
            assert learner.status.state is State.TRAINING
            running.back()
            running.wait(lambda: sum(step.num_steps for step in service.steps) == 2)
            running.wait(lambda: learner.status.online)
            running.wait(lambda: service.heartbeats > 1)


def test_a_refusal_arrives_with_reason_message_and_details():
    with served() as running:
        running.service.refuse_join = DilocoError(
            Reason.NO_SHARD_LEFT, "4 learners are planned; raise num_learners", learner="x"
        )
        with (
            pytest.raises(DilocoError, match="raise num_learners") as caught,
            Learner(make_model(), address=running.address, learner_id=NAME),
        ):
            pass
        assert caught.value.reason is Reason.NO_SHARD_LEFT
        assert caught.value.details["learner"] == "x"


def test_nobody_there_is_unavailable_and_says_so():
    with pytest.raises(DilocoError) as caught:
        wait_for_settings("127.0.0.1:1", timeout_s=0.5)
    assert caught.value.reason is Reason.UNAVAILABLE
    with (
        pytest.raises(DilocoError, match="check address") as caught,
        Learner(make_model(), address="127.0.0.1:1", learner_id=NAME, join_timeout_s=0.5),
    ):
        pass
    assert caught.value.reason is Reason.UNAVAILABLE
