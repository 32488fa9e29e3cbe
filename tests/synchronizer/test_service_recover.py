"""Inner state relayed from a donor to a recovering learner, and everybody who disturbs that."""

from __future__ import annotations

import asyncio
import logging

import pytest

from decoupled_diloco.codecs import CHUNK_BYTES
from decoupled_diloco.errors import Reason
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from tests.synchronizer.fake_donor import (
    STATE,
    Donor,
    Recipient,
    chunks,
    donate,
    hello,
    huge,
    offer,
    recovering,
    trained,
    vector,
)
from tests.synchronizer.fake_learner import FakeLearner, Fleet, refusal, serving, until

pytestmark = pytest.mark.asyncio


async def test_a_learner_gets_the_inner_state_of_a_live_peer(tmp_path) -> None:
    async with serving(**recovering(), journal=tmp_path / "journal.jsonl") as fleet:
        (a,) = await trained(fleet, "a")
        x = await fleet.learner("x")
        recipient = Recipient(x)
        asked = await a.hear("donate")
        assert list(asked.known_global_steps) == vector(fleet)
        (wait,) = [w for w in (await fleet.status()).waits if w.subject == "recovery of x"]
        assert wait.reason == "donor_copy"
        assert "a copies" in wait.detail
        assert await Donor(a, offer(a, asked), *chunks(STATE)).end() is None
        assert await recipient.end() is None
        assert recipient.data == STATE
        (header,) = recipient.headers
        assert (header.donor_id, header.encoding.payload_bytes) == ("a", len(STATE))
        assert list(header.clock.known_global_steps) == vector(fleet)
        assert not [w for w in (await fleet.status()).waits if w.subject.startswith("recovery")]
    text = (tmp_path / "journal.jsonl").read_text()
    assert '"recovery"' in text
    assert '"recovered"' in text


async def test_before_anything_is_merged_there_is_no_donor() -> None:
    async with serving(**recovering()) as fleet:
        a, b = await fleet.seeded("a", "b")
        error = await Recipient(b).end()
        assert error is not None
        assert error.reason is Reason.NO_DONOR
        await a.step()


@pytest.mark.parametrize("after", [0, 1, 4])
async def test_a_donor_killed_in_mid_stream_is_replaced_and_the_recipient_starts_anew(
    after: int,
) -> None:
    async with serving(**recovering()) as fleet:
        learners = {x.learner_id: x for x in await trained(fleet, "a", "b")}
        x = await fleet.learner("x")
        recipient = Recipient(x)
        asked = await learners["a"].hear("donate")
        donor = Donor(
            learners["a"], offer(learners["a"], asked), *chunks(STATE)[:after], ends=False
        )
        await until(lambda: after == 0 or len(recipient.data) == 10_000 * after)
        donor.call.cancel()
        learners["a"].hang_up()
        await donate(learners["b"], STATE[::-1])
        assert await recipient.end() is None
        assert recipient.data == STATE[::-1]
        assert recipient.headers[-1].donor_id == "b"
        await asyncio.gather(donor.task, return_exceptions=True)


async def test_a_donor_without_inner_state_declines() -> None:
    async with serving(**recovering()) as fleet:
        a, b = await trained(fleet, "a", "b")
        x = await fleet.learner("x")
        recipient = Recipient(x)
        asked = await a.hear("donate")
        declined = hello(a, donor=True, recovery_id=asked.recovery_id)
        error = await Donor(a, declined).end()
        assert error is not None
        assert error.reason is Reason.NO_DONOR
        await donate(b)
        assert await recipient.end() is None
        assert [h.donor_id for h in recipient.headers] == ["b"]


WRONG = {
    "codec": (Reason.CODEC_MISMATCH, {"encoding": {"codec": "pickle"}}, None),
    "absurd": (Reason.OVERSIZED, {"encoding": {"payload_bytes": 1 << 50}}, None),
    "old": (Reason.MALFORMED, {"clock": types_pb2.Clock(known_global_steps=[0] * 4)}, None),
    "no clock": (Reason.MALFORMED, {"clock": types_pb2.Clock()}, None),
    "short": (Reason.TRUNCATED, {}, chunks(STATE)[:-1]),
    "more": (Reason.OVERSIZED, {"encoding": {"payload_bytes": 15_000}}, chunks(STATE)),
    "gap": (Reason.MALFORMED, {}, chunks(STATE)[1:]),
    "empty chunk": (Reason.MALFORMED, {}, [pb.RecoverRequest(chunk=types_pb2.Chunk())]),
    "large chunk": (
        Reason.MALFORMED,
        {"encoding": {"payload_bytes": CHUNK_BYTES + 1}},
        chunks(bytes(CHUNK_BYTES + 1), CHUNK_BYTES + 1),
    ),
    "kind": (Reason.MALFORMED, {}, [pb.RecoverRequest()]),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_hostile_donor_is_refused_and_the_next_one_asked(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reason, changes, messages = WRONG[name]
    async with serving(**recovering()) as fleet:
        a, b = await trained(fleet, "a", "b")
        x = await fleet.learner("x")
        recipient = Recipient(x)
        asked = await a.hear("donate")
        body = chunks(STATE) if messages is None else messages
        # Who still writes when it is refused may hear of a broken stream instead of the reason.
        error = await Donor(a, offer(a, asked, **changes), *body).end()
        assert error is not None
        assert error.reason in {reason, Reason.UNAVAILABLE}
        assert f"a gives no inner state to x, {reason}" in caplog.text
        await donate(b)
        assert await recipient.end() is None
        assert recipient.data == STATE
        # It is left out of this recovery alone: it trains on and reports.
        await a.step()
        await until(lambda: fleet.engine.core.state.roster.find("a").local_step == a.local_step)


async def test_a_stalling_donor_is_replaced_and_told() -> None:
    async with serving(**recovering(push_floor_s=0.2, push_timeout_s=0.5)) as fleet:
        a, b = await trained(fleet, "a", "b")
        x = await fleet.learner("x")
        recipient = Recipient(x)
        asked = await a.hear("donate")
        donor = Donor(a, offer(a, asked), *chunks(STATE)[:2], ends=False)
        await donate(b)
        assert await recipient.end() is None
        assert recipient.data == STATE
        error = await donor.end()
        assert error is not None
        assert error.reason is Reason.NO_PROGRESS
        donor.over.set()


async def test_a_recipient_that_does_not_read_is_cut_off_and_holds_nobody_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(**recovering(push_floor_s=0.3, push_timeout_s=0.5)) as fleet:
        (a,) = await trained(fleet, "a")
        x = await fleet.learner("x")
        fleet.engine.layout = huge(fleet)
        payload = bytes(24 * CHUNK_BYTES)
        body = chunks(payload, CHUNK_BYTES)
        unread = fleet.stub.Recover(iter([hello(x)]))
        asked = await a.hear("donate")
        donor = Donor(a, offer(a, asked, payload), *body)
        error = await donor.end()
        assert error is not None
        assert error.reason in {Reason.NO_PROGRESS, Reason.UNAVAILABLE}
        await until(lambda: "x has no inner state: NO_PROGRESS: x does not read" in caplog.text)
        await a.step()
        await until(lambda: fleet.engine.core.state.roster.find("a").local_step == a.local_step)
        unread.cancel()
        await until(lambda: fleet.engine.relays.find(asked.recovery_id) is None)


async def test_a_recipient_that_is_gone_ends_the_donation() -> None:
    async with serving(**recovering()) as fleet:
        (a,) = await trained(fleet, "a")
        x = await fleet.learner("x")
        recipient = Recipient(x)
        asked = await a.hear("donate")
        donor = Donor(a, offer(a, asked), *chunks(STATE)[:1], ends=False)
        await until(lambda: recipient.data)
        recipient.call.cancel()
        error = await donor.end()
        assert error is not None
        assert error.reason in {Reason.LEARNER_GONE, Reason.RECOVERY_VOID}
        await until(lambda: fleet.engine.relays.find(asked.recovery_id) is None)
        donor.over.set()
        await asyncio.gather(recipient.task, return_exceptions=True)


async def test_after_h_global_steps_it_is_void_for_both() -> None:
    async with serving(**recovering(sync_interval=2)) as fleet:
        (a,) = await trained(fleet, "a")
        pull = await a.hear("pull")
        x = await fleet.learner("x")
        recipient = Recipient(x)
        asked = await a.hear("donate")
        donor = Donor(a, offer(a, asked), *chunks(STATE)[:1], ends=False)
        await until(lambda: recipient.data)
        await a.push(pull)
        while recipient.error is None:
            await a.step()
            await a.push(await a.hear("pull"))
        error = await recipient.end()
        assert error is not None
        assert error.reason is Reason.RECOVERY_VOID
        told = await donor.end()
        assert told is not None
        assert told.reason is Reason.RECOVERY_VOID
        donor.over.set()


async def test_two_learners_recover_at_once_from_two_donors() -> None:
    async with serving(**recovering()) as fleet:
        a, b = await trained(fleet, "a", "b")
        x, y = await fleet.learner("x"), await fleet.learner("y")
        first = Recipient(x)
        asked_a = await a.hear("donate")
        second = Recipient(y)
        asked_b = await b.hear("donate")
        donors = [
            Donor(b, offer(b, asked_b, STATE[:100]), *chunks(STATE[:100])),
            Donor(a, offer(a, asked_a), *chunks(STATE)),
        ]
        assert [await d.end() for d in donors] == [None, None]
        assert [await r.end() for r in (first, second)] == [None, None]
        assert (first.data, second.data) == (STATE, STATE[:100])


async def test_who_was_not_asked_gives_nothing() -> None:
    async with serving(**recovering()) as fleet:
        a, b = await trained(fleet, "a", "b")
        x = await fleet.learner("x")
        recipient = Recipient(x)
        asked = await a.hear("donate")

        async def reason_of(donor: FakeLearner, request: pb.RecoverRequest) -> Reason:
            error = await Donor(donor, request).end()
            assert error is not None
            return error.reason

        assert await reason_of(b, offer(b, asked)) is Reason.RECOVERY_VOID
        assert await reason_of(x, offer(x, asked)) is Reason.RECOVERY_VOID
        assert await reason_of(a, offer(a, asked, recovery_id="else")) is Reason.RECOVERY_VOID
        old = types_pb2.Incarnation(term=a.incarnation.term, number=0)
        assert await reason_of(a, offer(a, asked, incarnation=old)) is Reason.FENCED
        held = Donor(a, offer(a, asked), *chunks(STATE)[:1], ends=False)
        await until(lambda: recipient.data)
        assert await reason_of(a, offer(a, asked)) is Reason.DUPLICATE
        await held.stop()


async def test_who_may_not_recover_is_told_why() -> None:
    async with serving(**recovering()) as fleet:
        (a,) = await trained(fleet, "a")
        x = await fleet.learner("x")

        async def reason_of(*requests: pb.RecoverRequest) -> Reason:
            return (await refusal(fleet.stub.Recover(iter(requests)).read())).reason

        ahead = types_pb2.Clock(known_global_steps=[9] * 4)
        many = types_pb2.Clock(known_global_steps=[1] * 30_000)
        unknown = types_pb2.Incarnation(term=1, number=9)
        assert await reason_of() is Reason.MALFORMED
        assert await reason_of(chunks(STATE)[0]) is Reason.MALFORMED
        assert await reason_of(hello(x, clock=types_pb2.Clock())) is Reason.MALFORMED
        assert await reason_of(hello(x, clock=ahead)) is Reason.MALFORMED
        assert await reason_of(hello(x, clock=many)) is Reason.MALFORMED
        assert await reason_of(hello(x, incarnation=unknown)) is Reason.UNKNOWN_LEARNER
        assert await reason_of(hello(x, learner_id="")) is Reason.MALFORMED
        # The only learner that has trained cannot recover from itself.
        assert await reason_of(hello(a)) is Reason.NO_DONOR


async def test_a_synchronizer_that_stops_tells_both() -> None:
    fleet = await Fleet(**recovering()).start()
    (a,) = await trained(fleet, "a")
    x = await fleet.learner("x")
    recipient = Recipient(x)
    asked = await a.hear("donate")
    donor = Donor(a, offer(a, asked), *chunks(STATE)[:1], ends=False)
    await until(lambda: recipient.data)
    await fleet.engine.close()
    for error in (await recipient.end(), await donor.end()):
        assert error is not None
        assert error.reason is Reason.DRAINING
    donor.over.set()
    await fleet.stop()
