"""A leader's lineage, a leader that serves it on loopback, and standbys, all in this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import torch

from decoupled_diloco.channel import add_port, open_channel, server_options
from decoupled_diloco.claims import Claim, claim_from
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import Layout, Strategy, TensorSpec, build_layout
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.v1 import replication_pb2 as pb
from decoupled_diloco.v1 import replication_pb2_grpc as rpc
from decoupled_diloco.versions import Version
from synchronizer_server.commits import layout_description
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.proofs import Handshake, new_nonce
from synchronizer_server.replication.follower import Follower
from synchronizer_server.replication.leader import ReplicationLeader
from synchronizer_server.replication.messages import (
    Transfer,
    challenge_message,
    encode_tensor,
    record_message,
    run_message,
)
from synchronizer_server.runner import ThreadRunner
from synchronizer_server.service.replicate import ReplicationService
from synchronizer_server.store import MemoryStore, RoundStore
from tests.synchronizer.fake_learner import make_settings, until

KEY = b"a key that only synchronizers hold"
SETTINGS = make_settings(num_fragments=3)
TENSORS = [
    TensorSpec(name="a", shape=(7, 4), dtype="float32"),
    TensorSpec(name="b", shape=(3,), dtype="float32"),
    TensorSpec(name="big", shape=(600, 512), dtype="float32"),  # two chunks
]
LAYOUT: Layout = build_layout(
    TENSORS, strategy=Strategy(SETTINGS.strategy), num_fragments=3, overlap=SETTINGS.overlap
)
DESCRIPTION: dict[str, object] = {"layout": layout_description(LAYOUT)}

Fragments = dict[int, FragmentState]


def claim_of(term: int, leader_id: str = "leader-1", key: bytes = KEY) -> Claim:
    claim = Claim(run_id=SETTINGS.run_id, term=term, leader_id=leader_id)
    return claim.signed_with(key)


def believes(claim: Claim) -> bool:
    return claim.run_id == SETTINGS.run_id and claim.is_signed_with(KEY)


def drawn_state(fragment: int, term: int, global_step: int) -> FragmentState:
    """Random tensors with a denormal and a negative zero, fixed by the arguments."""
    seed = fragment + 100 * global_step + 100_000 * term
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(3, LAYOUT.fragments[fragment].num_elements, generator=generator)
    drawn[:, 0] = torch.tensor([2.0**-149, -0.0, 3.4e38])
    return FragmentState(published=drawn[0], residual=drawn[1], momentum=drawn[2])


class Lineage:
    """What a leader has committed.

    Attributes:
        record: the newest record.
        states: its fragments.
    """

    def __init__(self, term: int = 1) -> None:
        self.states = {p: drawn_state(p, term, 0) for p in range(LAYOUT.num_fragments)}
        self.record = RoundRecord(
            run_id=SETTINGS.run_id, group=0, term=term, global_step=0, fragment=None,
            versions=tuple(Version(term, 0, s.digest()) for s in self.states.values()),
            contributions=(), dropped=(), incarnations={}, shards={"a": 0}, local_steps={"a": 3},
            quorum=1, leases=(), num_tokens_merged=0, tokens_merged_by_learner={},
            layout_fingerprint=LAYOUT.fingerprint,
        )  # fmt: skip

    def fork(self) -> Lineage:
        other = Lineage.__new__(Lineage)
        other.record, other.states = self.record, dict(self.states)
        return other

    def round(self) -> Transfer:
        """One more round."""
        step = self.record.global_step + 1
        fragment = step % LAYOUT.num_fragments
        state = drawn_state(fragment, self.record.term, step)
        versions = list(self.record.versions)
        versions[fragment] = Version(self.record.term, step, state.digest())
        self.states = self.states | {fragment: state}
        self.record = dataclasses.replace(
            self.record, global_step=step, fragment=fragment, versions=tuple(versions)
        )
        return Transfer(record=self.record, fragments={fragment: state})

    def take_over(self, term: int) -> Transfer:
        """Goes on under another term."""
        self.record = dataclasses.replace(self.record, term=term, fragment=None)
        return self.whole()

    def whole(self) -> Transfer:
        return Transfer(record=self.record, fragments=dict(self.states))


def bits(fragments: Mapping[int, FragmentState]) -> dict[int, dict[str, bytes]]:
    return {
        p: {name: tensor.numpy().tobytes() for name, tensor in state.named().items()}
        for p, state in fragments.items()
    }


def assert_equal(store: RoundStore, lineage: Lineage) -> None:
    """The store holds the leader's cut, all three tensors bit for bit."""
    loaded = store.load()
    assert loaded is not None
    assert loaded[0] == lineage.record
    assert bits(loaded[1]) == bits(lineage.states)


def store_with(lineage: Lineage, store: RoundStore | None = None) -> RoundStore:
    """A store that holds a lineage's newest cut."""
    made = store if store is not None else MemoryStore()
    made.load()
    made.open_run(DESCRIPTION)
    made.install(lineage.record, lineage.states)
    return made


def messages_of(
    claim: Claim, transfer: Transfer, codec: str = "fp32"
) -> Iterator[pb.ReplicateResponse]:
    """Everything that is sent for a record."""
    yield record_message(claim, transfer)
    for fragment, state in sorted(transfer.fragments.items()):
        for name, tensor in state.named().items():
            yield from encode_tensor(fragment, name, tensor, codec).messages()


def stream_of(lineage: Lineage, term: int = 1) -> list[pb.ReplicateResponse]:
    """All that an empty standby gets of a cut."""
    claim = claim_of(term)
    run = run_message(claim, DESCRIPTION, SETTINGS, proof=b"")
    return [run, *messages_of(claim, lineage.whole())]


@dataclass
class Heard:
    """Writes down what the leader's core would hear.

    Attributes:
        log: ("connected" | "acked" | "lost", standby id, ...).
        claims: what hellos claimed.
    """

    log: list[tuple[object, ...]] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    def connected(self, standby_id: str) -> None:
        self.log.append(("connected", standby_id))

    def acked(self, standby_id: str, term: int, global_step: int) -> None:
        self.log.append(("acked", standby_id, term, global_step))

    def lost(self, standby_id: str) -> None:
        self.log.append(("lost", standby_id))

    def believe(self, claim: Claim) -> bool:
        self.claims.append(claim)
        return believes(claim)

    def has_acked(self, standby_id: str, record: RoundRecord) -> bool:
        return ("acked", standby_id, record.term, record.global_step) in self.log


@dataclass
class Led:
    """A leader on loopback.

    Attributes:
        leader: serves standbys; a test may put the next term's here, or None.
        heard: what it heard.
        address: where.
    """

    leader: ReplicationLeader | None
    heard: Heard
    address: str
    runner: ThreadRunner

    def next_leader(self, term: int, settings: RunSettings = SETTINGS) -> ReplicationLeader:
        self.leader = ReplicationLeader(
            claim_of(term),
            settings,
            events=self.heard,
            heard=self.heard.believe,
            key=KEY,
            runner=self.runner,
        )
        return self.leader

    def send(self, transfer: Transfer) -> None:
        assert self.leader is not None
        self.leader.send(transfer.record, transfer.fragments)


@contextlib.asynccontextmanager
async def serve(servicer: rpc.ReplicationServiceServicer) -> AsyncIterator[str]:
    server = grpc.aio.server(options=server_options())
    rpc.add_ReplicationServiceServicer_to_server(servicer, server)
    port = add_port(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def leading(
    lineage: Lineage | None = None, *, term: int = 1, settings: RunSettings = SETTINGS
) -> AsyncIterator[Led]:
    """A leader that has committed a lineage, or nothing yet."""
    runner = ThreadRunner("replication")
    led = Led(None, Heard(), "", runner)
    leader = led.next_leader(term, settings)
    if lineage is not None:
        leader.describe(DESCRIPTION)
        led.send(lineage.whole())
    service = ReplicationService(lambda: led.leader, not_leading)
    async with serve(service) as led.address:
        try:
            yield led
        finally:
            runner.close()


def not_leading() -> DilocoError:
    return DilocoError(Reason.NOT_LEADING, "leader-2 leads; ask there")


class Scripted(rpc.ReplicationServiceServicer):
    """A leader that says what it was told, then waits; it proves that it holds a key.

    Args:
        streams: the messages of each stream in turn, after challenge and hello.
        waits: False where it ends the stream instead.
        claim: its claim in the challenge.
        key: what it signs with.
    """

    def __init__(
        self, *streams: Iterable[pb.ReplicateResponse], waits: bool = True,
        claim: Claim | None = None, key: bytes = KEY,
    ) -> None:  # fmt: skip
        self._streams = iter(streams)
        self._waits = waits
        self._claim = claim if claim is not None else claim_of(1)
        self._key = key
        self.hellos: list[pb.ReplicateHello] = []
        self.acks: list[tuple[int, int]] = []

    async def Replicate(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        del context
        nonce = new_nonce()
        yield challenge_message(self._claim, nonce)
        said: pb.ReplicateHello = (await anext(request_iterator)).hello
        self.hellos.append(said)
        handshake = Handshake(
            claim=self._claim, standby_id=said.standby_id, leader_nonce=nonce,
            standby_nonce=said.nonce,
        )  # fmt: skip
        for message in next(self._streams):
            if message.WhichOneof("kind") == "run":
                message.run.proof = handshake.leader_proof(self._key)
            yield message
        while self._waits:
            request = await anext(request_iterator, None)
            if request is None:
                return
            self.acks.append((request.ack.term, request.ack.global_step))


class Standby:
    """A follower with its store, that dials again whenever it is cut off.

    Attributes:
        follower: the follower.
        store: its store.
        errors: what ended its streams.
    """

    def __init__(
        self, store: RoundStore | None = None, *, standby_id: str = "standby-1",
        settings: RunSettings = SETTINGS,
    ) -> None:  # fmt: skip
        self.store = store if store is not None else MemoryStore()
        self.standby_id = standby_id
        self.runner = ThreadRunner(standby_id)
        self.follower = Follower(
            self.store, self.runner, settings, standby_id=standby_id, heard=believes, key=KEY
        )
        self.errors: list[DilocoError] = []

    async def follow_once(self, address: str, highest: Claim | None = None) -> DilocoError:
        """Follows until something ends it."""
        try:
            await self.follower.follow(address, highest)
        except DilocoError as error:
            self.errors.append(error)
            return error
        raise AssertionError("follow returned")

    async def _again_and_again(self, address: str) -> None:
        while True:
            await self.follow_once(address)
            await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def following(self, address: str) -> AsyncIterator[Standby]:
        task = asyncio.create_task(self._again_and_again(address))
        try:
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            self.runner.close()

    async def has(self, lineage: Lineage) -> None:
        """Waits until the lineage's newest record is persisted here."""
        record = lineage.record
        await until(lambda: self.follower.persisted == (record.term, record.global_step))
        assert_equal(self.store, lineage)


@contextlib.asynccontextmanager
async def raw_stream(
    address: str, *requests: pb.ReplicateRequest, key: bytes = KEY
) -> AsyncIterator[Any]:
    """A hand-made standby's call, after the challenge; hellos without a proof are signed."""
    channel = open_channel(address, "test")
    try:
        call = rpc.ReplicationServiceStub(channel).Replicate()
        first = await call.read()
        for request in requests:
            due = pb.ReplicateRequest()
            due.CopyFrom(request)
            if due.WhichOneof("kind") == "hello" and not due.hello.proof:
                due.hello.MergeFrom(signed(due.hello, first.challenge, key))
            await call.write(due)
        yield call
    finally:
        await channel.close()


def signed(
    said: pb.ReplicateHello, challenge: pb.ReplicateChallenge, key: bytes = KEY
) -> pb.ReplicateHello:
    """What makes a hello the answer to a challenge."""
    handshake = Handshake(
        claim=claim_from(challenge.claim),
        standby_id=said.standby_id,
        leader_nonce=challenge.nonce,
        standby_nonce=new_nonce(),
    )
    return pb.ReplicateHello(
        nonce=handshake.standby_nonce, proof=handshake.standby_proof(key) if key else b""
    )


def hello(**changes: object) -> pb.ReplicateRequest:
    values: dict[str, Any] = {"run_id": SETTINGS.run_id, "standby_id": "standby-1"}
    return pb.ReplicateRequest(hello=pb.ReplicateHello(**(values | changes)))
