"""Strangers between synchronizers: who lacks the run's key is no standby, leader or peer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from decoupled_diloco.channel import MAX_MESSAGE_BYTES, error_from_rpc, open_channel, server_options
from decoupled_diloco.claims import Claim
from decoupled_diloco.errors import Reason
from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc
from decoupled_diloco.v1 import replication_pb2 as pb
from decoupled_diloco.v1 import replication_pb2_grpc as rpc
from synchronizer_server.core.lease import Holder, Peer
from synchronizer_server.peers import PeerAsker
from synchronizer_server.proofs import NONCE_BYTES, Handshake, new_nonce, signed_status
from synchronizer_server.service.switchboard import Switchboard, SwitchedAdmin
from tests.synchronizer.replication_kit import (
    KEY,
    SETTINGS,
    Led,
    Lineage,
    Scripted,
    Standby,
    claim_of,
    hello,
    leading,
    raw_stream,
    serve,
    signed,
    stream_of,
)

OTHER_KEY = b"a key of somebody else, and as long"


@asynccontextmanager
async def recorded(led: Led, said: pb.ReplicateHello) -> AsyncIterator[pb.ReplicateHello]:
    """A good hello of a standby, as an eavesdropper keeps it; its stream is open meanwhile."""
    channel = open_channel(led.address, "recorded")
    try:
        call = rpc.ReplicationServiceStub(channel).Replicate()
        kept = pb.ReplicateHello()
        kept.CopyFrom(said)
        kept.MergeFrom(signed(said, (await call.read()).challenge))
        await call.write(pb.ReplicateRequest(hello=kept))
        assert (await call.read()).WhichOneof("kind") == "run"
        yield kept
    finally:
        await channel.close()


async def answer_to(address: str, said: pb.ReplicateHello, key: bytes) -> str | Reason | None:
    """The answer to a hostile standby's hello: the kind of a message, or why it is refused."""
    try:
        async with raw_stream(address, pb.ReplicateRequest(hello=said), key=key) as call:
            message: pb.ReplicateResponse = await call.read()
            return message.WhichOneof("kind")
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            return error_from_rpc(error).reason
        raise


@pytest.mark.asyncio
@pytest.mark.parametrize("key", [b"", OTHER_KEY], ids=["no key", "another key"])
async def test_a_standby_without_the_key_gets_nothing_and_is_never_heard_of(
    key: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    claims = [None, claim_of(1).to_proto()]  # every learner knows the leader's claim
    async with leading(Lineage()) as led:
        assert led.leader is not None
        for i in range(6):
            said = hello(standby_id=f"stranger-{i}", claim=claims[i % 2]).hello
            assert await answer_to(led.address, said, key) is Reason.BAD_CLAIM
        assert led.heard.log == []
        assert led.heard.claims == []
        assert led.leader.num_unproven == 6
        assert len([x for x in caplog.records if x.message.startswith("hello: BAD_CLAIM")]) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("term", [1, 2], ids=["in the same term", "to the leader of another term"])
@pytest.mark.parametrize("standby_id", ["standby-1", "standby-2"], ids=["its own id", "another id"])
async def test_a_hello_that_is_repeated_is_refused_and_fences_nobody(
    term: int, standby_id: str
) -> None:
    async with leading(Lineage()) as led, recorded(led, hello().hello) as kept:
        log = list(led.heard.log)
        if term != 1:
            led.next_leader(term)
        kept.standby_id = standby_id
        assert await answer_to(led.address, kept, b"") is Reason.BAD_CLAIM
        assert led.heard.log == log


@pytest.mark.asyncio
async def test_a_stranger_does_not_take_the_place_of_a_standby() -> None:
    lineage = Lineage()
    async with leading(lineage) as led, Standby().following(led.address) as standby:
        await standby.has(lineage)
        assert await answer_to(led.address, hello().hello, OTHER_KEY) is Reason.BAD_CLAIM
        led.send(lineage.round())
        await standby.has(lineage)
        assert standby.errors == []


CHANGES: dict[str, Callable[[Handshake], Handshake]] = {
    "term": lambda x: dataclasses.replace(x, claim=claim_of(2)),
    "leader": lambda x: dataclasses.replace(x, claim=claim_of(1, "leader-2")),
    "run": lambda x: dataclasses.replace(x, claim=dataclasses.replace(x.claim, run_id="another")),
    "standby": lambda x: dataclasses.replace(x, standby_id="standby-2"),
    "leader's nonce": lambda x: dataclasses.replace(x, leader_nonce=new_nonce()),
    "standby's nonce": lambda x: dataclasses.replace(x, standby_nonce=new_nonce()),
    "fields that run together": lambda x: dataclasses.replace(
        x, claim=claim_of(1, "leader-"), standby_id="1standby-1"
    ),
}


def handshake() -> Handshake:
    return Handshake(
        claim=claim_of(1), standby_id="standby-1", leader_nonce=new_nonce(),
        standby_nonce=new_nonce(),
    )  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_proof_is_good_for_one_stream_alone(change: str) -> None:
    before = handshake()
    after = CHANGES[change](before)
    proof = before.standby_proof(KEY)
    assert before.proves_standby(proof, KEY)
    assert not after.proves_standby(proof, KEY)
    assert before.proves_leader(before.leader_proof(KEY), KEY)
    assert not after.proves_leader(before.leader_proof(KEY), KEY)


def test_a_signature_of_one_kind_is_none_of_another() -> None:
    both = handshake()
    assert not both.proves_standby(both.leader_proof(KEY), KEY)
    assert not both.proves_leader(both.standby_proof(KEY), KEY)
    for proof in (both.standby_proof(KEY), both.leader_proof(KEY)):
        assert not dataclasses.replace(both.claim, signature=proof).is_signed_with(KEY)
        assert not both.proves_standby(both.claim.signature, KEY)


def test_nothing_is_believed_without_a_key_or_a_nonce_of_full_length() -> None:
    both = handshake()
    assert not both.proves_standby(both.standby_proof(b""), b"")
    short = dataclasses.replace(both, standby_nonce=bytes(NONCE_BYTES - 1))
    assert not short.proves_leader(short.leader_proof(KEY), KEY)
    assert not short.proves_standby(short.standby_proof(KEY), KEY)


# -- strangers where a leader should be -----------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("key", [b"", OTHER_KEY], ids=["no key", "another key"])
async def test_who_repeats_a_leaders_claim_is_not_followed(key: bytes) -> None:
    """Learners hold claims, too: a record of theirs would replace the store's."""
    standby = Standby()
    async with serve(Scripted(stream_of(Lineage()), key=key)) as address:
        error = await standby.follow_once(address)
    standby.runner.close()
    assert error.reason is Reason.BAD_CLAIM
    assert standby.store.load() is None
    assert standby.store.read_run() is None
    assert standby.follower.claim is None


@pytest.mark.asyncio
async def test_nothing_is_signed_for_a_leader_whose_claim_is_not() -> None:
    standby = Standby()
    service = Scripted(stream_of(Lineage()), claim=claim_of(1, key=OTHER_KEY))
    async with serve(service) as address:
        error = await standby.follow_once(address)
    standby.runner.close()
    assert error.reason is Reason.BAD_CLAIM
    assert service.hellos == []


# -- strangers where a peer should be -------------------------------------------------------------


class SaysAnything(admin_pb2_grpc.AdminServiceServicer):
    """Answers with what it was given, whoever asks."""

    def __init__(self, status: admin_pb2.GetStatusResponse) -> None:
        self.status = status
        self.nonces: list[bytes] = []

    async def GetStatus(  # noqa: N802
        self, request: admin_pb2.GetStatusRequest, context: Any
    ) -> admin_pb2.GetStatusResponse:
        del context
        self.nonces.append(request.nonce)
        return self.status


@asynccontextmanager
async def answering(servicer: admin_pb2_grpc.AdminServiceServicer) -> AsyncIterator[str]:
    server = grpc.aio.server(options=server_options())
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def status_of(claim: Claim, role: str = "leading") -> admin_pb2.GetStatusResponse:
    return admin_pb2.GetStatusResponse(
        run_id=SETTINGS.run_id, claim=claim.to_proto(), role=role, record_term=4, global_step=9
    )


class Asking:
    """A synchronizer that asks one peer.

    Attributes:
        heard: claims and the addresses that they came with.
        asker: under test.
    """

    def __init__(self, address: str) -> None:
        self.heard: list[tuple[Claim, str]] = []
        self.asker = PeerAsker(
            [address], run_id=SETTINGS.run_id, key=KEY, heard=self.hear, insecure=False
        )

    def hear(self, claim: Claim, address: str) -> bool:
        self.heard.append((claim, address))
        return claim.is_signed_with(KEY)


@pytest.mark.asyncio
@pytest.mark.parametrize("role", ["leading", "following"])
async def test_a_peer_that_holds_the_key_is_believed(role: str) -> None:
    claim = claim_of(4)
    board = Switchboard(key=KEY, follower_status=lambda: status_of(claim, role))
    async with answering(SwitchedAdmin(board)) as address:
        asking = Asking(address)
        leads = Holder(term=4, leader_id="leader-1", address=address)
        expected = Peer(position=(4, 9), leads=leads if role == "leading" else None)
        assert await asking.asker.ask() == [expected]
        assert asking.heard == [(claim, address if role == "leading" else "")]
        assert asking.asker.num_unproven == 0


@pytest.mark.asyncio
async def test_a_peer_of_a_large_fleet_is_heard() -> None:
    """A status of ten thousand learners would be more than a message may hold."""
    status = status_of(claim_of(4))
    labels = {"host": "h" * 256, "pid": "p" * 256}
    status.learners.extend(
        admin_pb2.LearnerStatus(learner_id=f"{i:05}", labels=labels) for i in range(10_000)
    )
    assert status.ByteSize() > MAX_MESSAGE_BYTES
    board = Switchboard(key=KEY, follower_status=lambda: status)
    async with answering(SwitchedAdmin(board)) as address:
        assert [peer.position for peer in await Asking(address).asker.ask()] == [(4, 9)]


@pytest.mark.asyncio
async def test_what_a_stranger_says_of_itself_is_not_believed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It could keep every standby from a bid with many rounds, or call one to it with few."""
    caplog.set_level(logging.WARNING)
    stranger = SaysAnything(status_of(claim_of(4)))
    async with answering(stranger) as address:
        asking = Asking(address)
        assert await asking.asker.ask() == []
        stranger.status = signed_status(stranger.status, OTHER_KEY, stranger.nonces[-1])
        assert await asking.asker.ask() == []
        # The answer to the question before.
        stranger.status = signed_status(stranger.status, KEY, stranger.nonces[-1])
        assert await asking.asker.ask() == []
        assert asking.heard == []
        assert asking.asker.num_unproven == 3
        assert len(set(stranger.nonces)) == 3
        assert len([x for x in caplog.records if "BAD_CLAIM" in x.message]) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("field", "value"),
    [("global_step", 8), ("record_term", 5), ("role", "following"), ("run_id", "another")],
)
async def test_an_answer_that_was_changed_on_the_way_is_not_believed(
    field: str, value: object
) -> None:
    class Changes(SwitchedAdmin):
        async def GetStatus(  # noqa: N802
            self, request: admin_pb2.GetStatusRequest, context: Any
        ) -> admin_pb2.GetStatusResponse:
            status = await super().GetStatus(request, context)
            setattr(status, field, value)
            return status

    board = Switchboard(key=KEY, follower_status=lambda: status_of(claim_of(4)))
    async with answering(Changes(board)) as address:
        asking = Asking(address)
        assert await asking.asker.ask() == []
        assert asking.asker.num_unproven == 1


@pytest.mark.asyncio
async def test_who_does_not_ask_for_a_proof_needs_none_and_gets_none() -> None:
    board = Switchboard(key=KEY, follower_status=lambda: status_of(claim_of(4)))
    async with answering(SwitchedAdmin(board)) as address:
        channel = open_channel(address, "operator")
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        assert (status.global_step, status.proof) == (9, b"")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetStatus(admin_pb2.GetStatusRequest(nonce=b"short"))
        assert error_from_rpc(caught.value).reason is Reason.MALFORMED
        await channel.close()
