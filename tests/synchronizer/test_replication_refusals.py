"""Who may follow whom: runs, settings, keys, terms, and strangers on either side."""

from __future__ import annotations

import dataclasses

import grpc.aio
import pytest

from decoupled_diloco.channel import error_from_rpc
from decoupled_diloco.claims import Claim, claim_from
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import replication_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from synchronizer_server.replication.leader import MAX_STANDBYS
from synchronizer_server.replication.messages import run_message
from synchronizer_server.store import MemoryStore
from tests.synchronizer.fake_learner import make_settings, until
from tests.synchronizer.replication_kit import (
    DESCRIPTION,
    KEY,
    SETTINGS,
    Lineage,
    Scripted,
    Standby,
    claim_of,
    hello,
    leading,
    messages_of,
    raw_stream,
    serve,
    stream_of,
)

pytestmark = pytest.mark.asyncio

ACK = pb.ReplicateRequest(ack=pb.ReplicateAck(term=1, global_step=0))


async def refusal(address: str, *requests: pb.ReplicateRequest, key: bytes = KEY) -> DilocoError:
    """Why a leader ends a hand-made standby's stream."""
    try:
        async with raw_stream(address, *requests, key=key) as call:
            while await call.read() is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    raise AssertionError("the stream ended without a reason")


# -- strangers at the leader ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (ACK, Reason.MALFORMED),
        (pb.ReplicateRequest(), Reason.MALFORMED),
        (hello(standby_id=""), Reason.MALFORMED),
        (hello(standby_id="x" * 200), Reason.MALFORMED),
        (hello(run_id="another"), Reason.RUN_MISMATCH),
        (
            hello(held=[types_pb2.FragmentVersion(version=types_pb2.Version(digest=b"short"))]),
            Reason.MALFORMED,
        ),
        (hello(claim=claim_of(1, key=b"another key").to_proto()), Reason.BAD_CLAIM),
        (hello(claim=claim_of(9, key=b"another key").to_proto()), Reason.BAD_CLAIM),
        (hello(claim=claim_of(9, key=b"").to_proto()), Reason.BAD_CLAIM),
    ],
)
async def test_a_hello_that_cannot_be_right_is_refused(
    first: pb.ReplicateRequest, reason: Reason
) -> None:
    async with leading(Lineage()) as led:
        assert (await refusal(led.address, first)).reason is reason
        assert led.heard.log == []


async def test_a_higher_claim_is_reported_and_ends_the_stream() -> None:
    async with leading(Lineage()) as led:
        claim = claim_of(7, "leader-2")
        error = await refusal(led.address, hello(claim=claim.to_proto()))
        assert error.reason is Reason.NOT_LEADING
        assert led.heard.claims == [claim]


@pytest.mark.parametrize(
    "second",
    [
        pb.ReplicateRequest(ack=pb.ReplicateAck(term=1, global_step=99)),
        hello(),
        pb.ReplicateRequest(),
    ],
    ids=["ack of nothing sent", "second hello", "nothing"],
)
async def test_what_is_no_due_acknowledgement_ends_the_stream(second: pb.ReplicateRequest) -> None:
    async with leading(Lineage()) as led:
        assert (await refusal(led.address, hello(), second)).reason is Reason.MALFORMED
        await until(lambda: led.heard.log[-1:] == [("lost", "standby-1")])
        assert not [entry for entry in led.heard.log if entry[0] == "acked"]


async def test_a_later_stream_of_the_same_standby_takes_the_place_of_the_earlier_one() -> None:
    async with leading() as led, raw_stream(led.address, hello()) as earlier:
        await earlier.read()
        async with raw_stream(led.address, hello()) as later:
            await later.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await earlier.read()
            assert error_from_rpc(caught.value).reason is Reason.FENCED
            connected, lost = ("connected", "standby-1"), ("lost", "standby-1")
            assert led.heard.log == [connected, lost, connected]
        await until(lambda: led.heard.log == [connected, lost, connected, lost])


async def test_there_is_room_for_so_many_standbys_and_no_more() -> None:
    async with leading() as led:
        streams = [raw_stream(led.address, hello(standby_id=f"s{i}")) for i in range(MAX_STANDBYS)]
        for stream in streams:
            await (await stream.__aenter__()).read()
        error = await refusal(led.address, hello(standby_id="one more"[:3]))
        assert error.reason is Reason.TOO_MANY_STREAMS
        await streams[0].__aexit__(None, None, None)
        await until(lambda: ("lost", "s0") in led.heard.log)
        async with raw_stream(led.address, hello(standby_id="another")) as call:
            assert (await call.read()).WhichOneof("kind") == "run"
        for stream in streams[1:]:
            await stream.__aexit__(None, None, None)


async def test_who_does_not_lead_says_who_does() -> None:
    async with leading() as led:
        led.leader = None
        error = await refusal(led.address, hello())
        assert error.reason is Reason.NOT_LEADING
        assert "leader-2" in error.message


async def test_a_leader_that_stopped_serves_nobody() -> None:
    async with leading() as led:
        assert led.leader is not None
        led.leader.close(DilocoError(Reason.DRAINING, "stops"))
        assert (await refusal(led.address, hello())).reason is Reason.DRAINING


# -- strangers at the standby ---------------------------------------------------------------------


async def refused_by_standby(
    *messages: pb.ReplicateResponse, standby: Standby | None = None, highest: Claim | None = None
) -> DilocoError:
    """Why a standby ends a scripted leader's stream."""
    follower = standby if standby is not None else Standby()
    claims = [claim_from(x.run.claim) for x in messages if x.WhichOneof("kind") == "run"]
    async with serve(Scripted(messages, claim=next(iter(claims), None))) as address:
        error = await follower.follow_once(address, highest)
    follower.runner.close()
    assert not follower.follower.streaming
    return error


def run(claim: Claim, settings: object = SETTINGS) -> pb.ReplicateResponse:
    return run_message(claim, DESCRIPTION, settings, proof=b"")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (claim_of(1, key=b"another key"), Reason.BAD_CLAIM),
        (claim_of(1, key=b""), Reason.BAD_CLAIM),
        (claim_of(0), Reason.BAD_CLAIM),
        (dataclasses.replace(claim_of(1), term=9), Reason.BAD_CLAIM),
        (dataclasses.replace(claim_of(1), run_id="another"), Reason.RUN_MISMATCH),
    ],
    ids=["other key", "unsigned", "no term", "raised term", "other run"],
)
async def test_a_leader_without_a_good_claim_is_not_followed(claim: Claim, reason: Reason) -> None:
    standby = Standby()
    assert (await refused_by_standby(run(claim), standby=standby)).reason is reason
    assert standby.store.read_run() is None


async def test_a_leader_of_a_lower_term_than_heard_is_not_followed() -> None:
    error = await refused_by_standby(run(claim_of(3)), highest=claim_of(4, "leader-2"))
    assert error.reason is Reason.STALE_TERM


async def test_two_leaders_of_one_term_are_not_followed() -> None:
    error = await refused_by_standby(run(claim_of(3)), highest=claim_of(3, "leader-2"))
    assert error.reason is Reason.BAD_CLAIM
    assert "leader-1 and leader-2 both claim term 3" in error.message


async def test_a_leader_of_a_lower_term_than_the_stores_is_not_followed() -> None:
    store = MemoryStore()
    store.load()
    store.begin_term(4)
    error = await refused_by_standby(run(claim_of(3)), standby=Standby(store))
    assert error.reason is Reason.STALE_TERM


async def test_a_standby_tells_the_highest_claim_that_it_heard() -> None:
    service = Scripted(stream_of(Lineage()), waits=False)
    standby = Standby()
    async with serve(service) as address:
        await standby.follow_once(address, claim_of(1))
    standby.runner.close()
    (first,) = service.hellos
    assert first.claim == claim_of(1).to_proto()
    assert (first.run_id, first.standby_id) == (SETTINGS.run_id, "standby-1")


async def test_settings_that_differ_are_refused_and_named() -> None:
    standby = Standby(settings=make_settings(num_fragments=3, outer_momentum=0.5))
    async with leading(Lineage()) as led:
        error = await standby.follow_once(led.address)
    standby.runner.close()
    assert error.reason is Reason.CONFIG_CONFLICT
    assert "outer_momentum is 0.5 here and 0.0 at the leader" in error.message
    assert standby.store.load() is None


async def test_a_store_of_another_model_is_refused() -> None:
    store = MemoryStore()
    store.load()
    store.open_run({"layout": "another"})
    store.install(Lineage().record, Lineage().states)
    error = await refused_by_standby(run(claim_of(1)), standby=Standby(store))
    assert error.reason is Reason.RUN_MISMATCH
    assert "empty directory" in error.message


def bad_streams() -> dict[str, list[pb.ReplicateResponse]]:
    claim, lineage = claim_of(1), Lineage()
    good = stream_of(lineage)
    described = pb.ReplicateResponse()
    described.CopyFrom(good[0])
    described.run.description_json = '{"layout":{"tensors":7}}'
    return {
        "no run": good[1:],
        "nothing": [pb.ReplicateResponse()],
        "nothing later": [good[0], pb.ReplicateResponse()],
        "record before description": [run_message(claim, None, SETTINGS, proof=b""), *good[1:]],
        "no layout": [described],
        "run within a record": [*good[:2], good[0]],
        "another leader's run": [good[0], run(claim_of(2))],
        "another leader's record": [good[0], *messages_of(claim_of(2), lineage.whole())],
    }


@pytest.mark.parametrize("name", bad_streams())
async def test_a_stream_that_makes_no_sense_is_ended(name: str) -> None:
    standby = Standby()
    error = await refused_by_standby(*bad_streams()[name], standby=standby)
    assert error.reason in (Reason.MALFORMED, Reason.BAD_CLAIM)
    assert (error.reason is Reason.BAD_CLAIM) == name.startswith("another")
    assert standby.store.load() is None


async def test_a_record_that_does_not_fit_the_store_is_not_acknowledged() -> None:
    """A leader that leaves out a fragment which the standby does not have."""
    lineage = Lineage()
    transfer = lineage.round()
    service = Scripted([run(claim_of(1)), *messages_of(claim_of(1), transfer)])
    standby = Standby()
    async with serve(service) as address:
        error = await standby.follow_once(address)
        assert service.acks == []
    standby.runner.close()
    assert error.reason is Reason.STORE_CORRUPT
    assert standby.store.load() is None


async def test_nobody_at_the_address_is_said_so() -> None:
    standby = Standby()
    error = await standby.follow_once("127.0.0.1:1")
    standby.runner.close()
    assert error.reason is Reason.UNAVAILABLE
