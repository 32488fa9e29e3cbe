"""Join over gRPC: who is let in, under which life, and what a refusal says."""

from __future__ import annotations

import asyncio

import pytest

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import TensorSpec
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from decoupled_diloco.versions import Incarnation
from decoupled_diloco.wire import incarnation_from, tensors_to
from synchronizer_server.heartbeats import beat
from synchronizer_server.membership.memory import MemoryMembership
from tests.synchronizer.fake_learner import (
    REFUSED,
    TENSORS,
    FakeLearner,
    make_settings,
    refusal,
    serving,
    until,
)

pytestmark = pytest.mark.asyncio


class AwayMembership(MemoryMembership):
    """A membership that does not answer, or answers nonsense, once the run has started."""

    def __init__(self, reason: Reason = Reason.MEMBERSHIP_UNAVAILABLE) -> None:
        super().__init__()
        self._reason = reason

    async def grant_incarnation(self, learner_id: str, proposed: Incarnation) -> Incarnation:
        raise DilocoError(self._reason, "redis does not answer")

    async def mark_seeded(self, term: int) -> bool:
        raise DilocoError(Reason.MEMBERSHIP_UNAVAILABLE, "redis does not answer")

    async def remove(self, learner_id: str, incarnation: Incarnation, term: int) -> bool:
        raise DilocoError(Reason.MEMBERSHIP_UNAVAILABLE, "redis does not answer")


class LateMembership(MemoryMembership):
    """Grants are held up while ``is_late``: given up by who asks, and carried out by ``arrive``."""

    def __init__(self) -> None:
        super().__init__()
        self.is_late = True
        self._held: list[tuple[str, Incarnation]] = []

    async def grant_incarnation(self, learner_id: str, proposed: Incarnation) -> Incarnation:
        if self.is_late:
            self._held.append((learner_id, proposed))
            raise DilocoError(Reason.MEMBERSHIP_UNAVAILABLE, "redis does not answer")
        return await super().grant_incarnation(learner_id, proposed)

    async def arrive(self) -> None:
        """What was held up is carried out, each twice, the last one first."""
        for learner_id, proposed in [*reversed(self._held), *self._held]:
            await super().grant_incarnation(learner_id, proposed)

    async def known(self) -> list[Incarnation]:
        """What the next leader would believe."""
        return [x.incarnation for x in (await self.read_back()).members]


BAD_REQUESTS = {
    "protocol": ({"protocol_version": 99}, Reason.PROTOCOL_MISMATCH, "99"),
    "run": ({"run_id": "elsewhere"}, Reason.RUN_MISMATCH, "elsewhere"),
    "fingerprint": ({"layout_fingerprint": "0" * 64}, Reason.LAYOUT_MISMATCH, "layout"),
    "no learner id": ({"learner_id": ""}, Reason.MALFORMED, "learner_id"),
    "long learner id": ({"learner_id": "x" * 129}, Reason.MALFORMED, "learner_id"),
    "control characters": ({"learner_id": "a\nb"}, Reason.MALFORMED, "learner_id"),
    "no request id": ({"request_id": ""}, Reason.MALFORMED, "request_id"),
    "labels": ({"labels": {str(i): "" for i in range(33)}}, Reason.MALFORMED, "labels"),
    "no tensors": ({"tensors": []}, Reason.LAYOUT_IMPOSSIBLE, "tensors"),
    "many tensors": (
        {"tensors": [types_pb2.TensorSpec(name=str(i)) for i in range(20_001)]},
        Reason.MALFORMED,
        "20001",
    ),
    "many dimensions": (
        {"tensors": [types_pb2.TensorSpec(name="w", shape=[1] * 9)]},
        Reason.MALFORMED,
        "dimensions",
    ),
    "role": ({"tensors": [types_pb2.TensorSpec(name="w")]}, Reason.MALFORMED, "'w'"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_what_cannot_be_is_refused_by_name_and_changes_nothing(name: str) -> None:
    changes, reason, word = BAD_REQUESTS[name]
    async with serving() as fleet:
        learner = FakeLearner(fleet, "a")
        error = await refusal(learner.join(**changes))
        assert error.reason is reason
        assert word in error.message
        assert not list(fleet.engine.core.state.roster)
        answer = await learner.join()
        assert (answer.incarnation.number, answer.shard, answer.seed) == (1, 0, True)


async def test_another_model_is_refused_naming_the_tensor() -> None:
    async with serving() as fleet:
        await FakeLearner(fleet, "a").join()
        wrong = [*TENSORS[:3], TensorSpec(name="c.bias", shape=(4,), dtype="float32")]
        error = await refusal(FakeLearner(fleet, "b").join(tensors=tensors_to(wrong)))
        assert error.reason is Reason.LAYOUT_MISMATCH
        assert "c.bias" in error.message
        assert "(3,)" in error.message
        assert "(4,)" in error.message


async def test_too_many_labels_do_not_fence_the_process_that_lives() -> None:
    async with serving() as fleet:
        learner = await fleet.learner("a")
        labels = {str(i): "x" for i in range(33)}
        error = await refusal(FakeLearner(fleet, "a").join(request_id="two", labels=labels))
        assert error.reason is Reason.MALFORMED
        known = fleet.engine.core.state.roster.find("a")
        assert known is not None
        assert known.incarnation.number == learner.incarnation.number
        (member,) = await fleet.membership.members()
        assert member.incarnation.number == 1


async def test_long_labels_are_cut_and_shown_in_the_status() -> None:
    async with serving() as fleet:
        await FakeLearner(fleet, "a").join(labels={"pid": "7", "host": "h" * 1000})
        (learner,) = (await fleet.status()).learners
        assert learner.labels == {"pid": "7", "host": "h" * 256}


async def test_an_extra_learner_is_refused_and_the_planned_ones_keep_their_shards() -> None:
    async with serving(settings=make_settings(num_learners=2)) as fleet:
        for learner_id in ("a", "b"):
            await FakeLearner(fleet, learner_id).join()
        error = await refusal(FakeLearner(fleet, "c").join())
        assert error.reason is Reason.NO_SHARD_LEFT
        assert "2 data shards" in error.message
        again = await FakeLearner(fleet, "b").join(request_id="another-process")
        assert again.shard == 1


async def test_a_repeated_request_gets_the_same_incarnation_and_what_is_true_now() -> None:
    async with serving() as fleet:
        learner = await fleet.learner("a")
        first = learner.joined
        await learner.seed()
        await learner.step()
        await learner.hear("schedule")
        again = await FakeLearner(fleet, "a").join()
        assert again.incarnation == first.incarnation
        assert first.seed
        assert not again.seed
        assert len(again.clock.known_global_steps) == fleet.layout.num_fragments


async def test_a_second_process_of_the_same_id_fences_the_first() -> None:
    async with serving() as fleet:
        first, _ = await fleet.seeded("a", "b")
        await first.step()
        second = FakeLearner(fleet, "a")
        joined = await second.join(request_id="another-process")
        assert joined.incarnation.number == 2
        assert joined.shard == first.joined.shard
        end = await first.end()
        assert end is not None
        assert end.reason is Reason.FENCED
        pull = pb.Pull(global_step=1, fragment=1)
        answer = await first.push(pull)
        assert (answer.outcome, answer.reason) == (REFUSED, "FENCED")
        error = await refusal(first.fleet.stub.Leave(
            pb.LeaveRequest(learner_id="a", incarnation=first.incarnation)
        ))  # fmt: skip
        assert error.reason is Reason.FENCED
        assert not list(fleet.engine.tickets)
        error = await refusal(first.join())
        assert error.reason is Reason.FENCED, "it may not take the id back"


async def test_many_join_at_once_to_shards_of_their_own_and_one_seeds() -> None:
    async with serving(settings=make_settings(num_learners=8)) as fleet:
        joins = [FakeLearner(fleet, f"learner-{i}").join() for i in range(8)]
        answers = await asyncio.gather(*joins)
        assert sorted(a.shard for a in answers) == list(range(8))
        assert sum(a.seed for a in answers) == 1
        assert {a.layout_fingerprint for a in answers} == {fleet.layout.fingerprint}


@pytest.mark.parametrize("reason", [Reason.MEMBERSHIP_UNAVAILABLE, Reason.MALFORMED])
async def test_the_membership_failing_alone_keeps_nobody_out(
    caplog: pytest.LogCaptureFixture, reason: Reason
) -> None:
    async with serving(membership=AwayMembership(reason)) as fleet:
        a, _b = await fleet.seeded("a", "b")
        assert a.joined.incarnation.number == 1
        again = await FakeLearner(fleet, "a").join(request_id="another-process")
        assert again.incarnation.number == 2
        leave = pb.LeaveRequest(learner_id="a", incarnation=again.incarnation)
        await fleet.stub.Leave(leave)
        assert "a joins without the membership" in caplog.text
        assert "the membership does not know that the run is seeded" in caplog.text


@pytest.mark.parametrize("heartbeats", ["before", "after"])
async def test_a_grant_carried_out_late_fences_nobody_at_the_next_leader(heartbeats: str) -> None:
    membership = LateMembership()
    async with serving(membership=membership) as fleet:
        await FakeLearner(fleet, "a").join()
        lives = FakeLearner(fleet, "a")
        await lives.join(request_id="another-process")
        await lives.open()
        await until(fleet.engine.live_incarnations)
        if heartbeats == "before":
            await beat(fleet.engine, membership)
        await membership.arrive()
        assert await membership.known() == [incarnation_from(lives.incarnation)]
        await beat(fleet.engine, membership)
        assert await membership.known() == [incarnation_from(lives.incarnation)]
        membership.is_late = False
        third = await FakeLearner(fleet, "a").join(request_id="a-third-process")
        assert third.incarnation.number == 3


async def test_a_number_that_the_membership_alone_knows_is_passed_and_stays_so() -> None:
    """Else it could enter the one that was proposed above it, late, while a lower one lives."""
    membership = LateMembership()
    membership.server.incarnations["a"] = Incarnation(1, 9)
    membership.is_late = False

    async with serving(membership=membership) as fleet:
        joining = FakeLearner(fleet, "a")
        asked: list[Incarnation] = []

        async def grant(learner_id: str, proposed: Incarnation) -> Incarnation:
            asked.append(proposed)
            if len(asked) == 2:  # the process that asks goes away meanwhile
                raise DilocoError(Reason.DRAINING, "not now")
            membership.is_late = len(asked) > 2
            return await LateMembership.grant_incarnation(membership, learner_id, proposed)

        membership.grant_incarnation = grant  # type: ignore[method-assign]
        assert (await refusal(joining.join())).reason is Reason.DRAINING
        joined = await joining.join()
        assert asked == [Incarnation(1, 1), Incarnation(1, 10), Incarnation(1, 10)]
        assert joined.incarnation.number == 10
        await membership.arrive()
        assert await membership.known() == [incarnation_from(joined.incarnation)]


async def test_a_process_that_has_left_may_come_back_under_a_new_life() -> None:
    async with serving() as fleet:
        a, _ = await fleet.seeded("a", "b")
        leave = pb.LeaveRequest(learner_id="a", incarnation=a.incarnation, reason="lunch\nbreak")
        await fleet.stub.Leave(leave)
        assert (await a.join()).incarnation.number == 2
        await a.open()


async def test_nobody_joins_a_synchronizer_that_drains() -> None:
    async with serving() as fleet:
        fleet.engine.core.state.draining = True
        error = await refusal(FakeLearner(fleet, "a").join())
        assert error.reason is Reason.DRAINING


async def test_a_claim_that_a_learner_relays_lets_nobody_in() -> None:
    """It may live elsewhere under the grant that it has: another one here would fence that."""
    async with serving() as fleet:
        a, _ = await fleet.seeded("a", "b")
        request = a.join_request(request_id="relay", relays_claim=True)
        answer = await fleet.stub.Join(request)
        assert answer == pb.JoinResponse(claim=a.joined.claim), "only who leads here"
        learner = fleet.engine.core.state.roster.find("a")
        assert learner.incarnation == incarnation_from(a.incarnation)
        stranger = FakeLearner(fleet, "c").join_request(relays_claim=True)
        assert not (await fleet.stub.Join(stranger)).HasField("incarnation")
        assert fleet.engine.core.state.roster.find("c") is None
