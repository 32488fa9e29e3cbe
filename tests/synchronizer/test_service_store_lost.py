"""Join where the store is empty and a joiner knows better: never seeded again."""

from __future__ import annotations

import logging

import pytest

from decoupled_diloco.errors import Reason
from decoupled_diloco.v1 import types_pb2
from decoupled_diloco.versions import Version
from decoupled_diloco.wire import version_to
from tests.synchronizer.fake_learner import REFUSED, FakeLearner, make_settings, refusal, serving

pytestmark = pytest.mark.asyncio

RUN = "amber"


def held(global_step: int) -> list[types_pb2.FragmentVersion]:
    version = version_to(Version(1, global_step, b"h" * 32))
    return [types_pb2.FragmentVersion(fragment=0, version=version)]


async def test_a_joiner_that_holds_merged_versions_stops_the_seeding_loudly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(settings=make_settings(run_id=RUN)) as fleet:
        fresh = FakeLearner(fleet, "fresh")
        assert (await fresh.join(run_id=RUN)).seed
        await fresh.seed_fragment(0)
        veteran = FakeLearner(fleet, "veteran")
        with caplog.at_level(logging.CRITICAL):
            error = await refusal(veteran.join(run_id=RUN, held=held(7)))
        assert error.reason is Reason.STORE_LOST
        assert "start the synchronizer with the store of that run" in error.message
        assert "veteran holds global step 7" in caplog.text
        answer = await fresh.seed_fragment(1)
        assert (answer.outcome, answer.reason) == (REFUSED, "STORE_LOST")
        third = FakeLearner(fleet, "third")
        assert (await refusal(third.join())).reason is Reason.STORE_LOST
        status = await fleet.status()
        assert [(w.subject, w.reason) for w in status.waits] == [("seed", "store_lost")]
        assert status.state != "running"
        assert caplog.text.count("STORE_LOST") == 1, "said once"


@pytest.mark.parametrize(
    "request_", [{"run_id": RUN, "held": held(0)}, {"held": held(7)}, {"run_id": RUN}]
)
async def test_who_holds_no_merged_version_of_this_run_joins_and_seeds(request_: dict) -> None:
    """The seed alone is no merged version; and without a run id it may be of another run."""
    async with serving(settings=make_settings(run_id=RUN)) as fleet:
        a = FakeLearner(fleet, "a")
        assert (await a.join(**request_)).seed
        await a.open()
        await a.seed()


async def test_a_run_that_goes_on_takes_every_joiner() -> None:
    async with serving(settings=make_settings(run_id=RUN)) as fleet:
        await fleet.seeded("a")
        b = FakeLearner(fleet, "b")
        await b.join(run_id=RUN, held=held(10**6))
        assert b.joined.incarnation.number == 1
