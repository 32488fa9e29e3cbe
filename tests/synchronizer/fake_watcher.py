"""A hand-made watcher that checks every update it gets."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio
import torch

from decoupled_diloco.channel import error_from_rpc
from decoupled_diloco.codecs import get_codec, payload_digest
from decoupled_diloco.errors import DilocoError
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from decoupled_diloco.versions import Version
from decoupled_diloco.wire import version_to
from tests.synchronizer.fake_learner import Fleet, digest_of_vector


class FakeWatcher:
    """Applies updates as a learner does, and checks every digest on the way."""

    def __init__(self, fleet: Fleet, **request: object) -> None:
        self.held: dict[int, tuple[Version, torch.Tensor]] = {}
        self.kinds: list[tuple[int, int]] = []
        self.caught_up: list[types_pb2.Clock] = []
        self.error: DilocoError | None = None
        self._fleet = fleet
        self._request = request
        self._task: asyncio.Task[None] | None = None

    def start(self, held: dict[int, tuple[Version, torch.Tensor]] | None = None) -> FakeWatcher:
        self.held = dict(held or {})
        self.call = self._fleet.stub.Watch(self.request())
        self._task = asyncio.ensure_future(self._run())
        return self

    def request(self) -> pb.WatchRequest:
        messages = [
            types_pb2.FragmentVersion(fragment=i, version=version_to(v))
            for i, (v, _) in self.held.items()
        ]
        return pb.WatchRequest(**({"watcher_id": "watcher"} | self._request), held=messages)

    async def _run(self) -> None:
        try:
            header, payload = None, b""
            async for message in self.call:
                match message.WhichOneof("kind"):
                    case "header":
                        header, payload = message.header, b""
                    case "chunk":
                        assert message.chunk.offset_bytes == len(payload)
                        payload += message.chunk.data
                    case "caught_up":
                        self.caught_up.append(message.caught_up.clock)
                if header is not None and len(payload) == header.encoding.payload_bytes:
                    self._apply(header, payload)
                    header = None
        except grpc.aio.AioRpcError as error:
            self.error = error_from_rpc(error)

    def _apply(self, header: pb.UpdateHeader, payload: bytes) -> None:
        assert payload_digest(payload) == header.encoding.digest
        vector = get_codec(header.encoding.codec).decode(payload, header.encoding.num_elements)
        if header.kind == pb.UPDATE_KIND_DELTA:
            version, copy = self.held[header.fragment]
            assert header.base.digest == version.digest
            vector = copy + vector
        result = header.result
        assert digest_of_vector(vector) == result.digest
        version = Version(result.term, result.global_step, result.digest)
        self.held[header.fragment] = version, vector
        self.kinds.append((header.fragment, header.kind))

    def follows(self) -> bool:
        """Whether it holds what is published, bit for bit."""
        ours = {i: (v.digest, t.numpy().tobytes()) for i, (v, t) in self.held.items()}
        published = {i: (v.digest, data) for i, (v, data) in self._fleet.published().items()}
        return bool(published) and ours == published

    async def stop(self) -> None:
        self.call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
