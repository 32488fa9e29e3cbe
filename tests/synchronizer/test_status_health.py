"""What page and metrics say of store, Redis and rounds is one fact, read at one place."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from decoupled_diloco.errors import Reason
from synchronizer_server.http.history import History
from synchronizer_server.membership import RedisClient
from synchronizer_server.metrics import Source
from tests.synchronizer.fake_learner import PATIENCE_S, make_settings, until
from tests.synchronizer.node_kit import keeping
from tests.synchronizer.page_kit import looking_at, shown, shown_process, sources_of

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize(
    ("trouble", "answers", "state", "detail"),
    [
        (None, None, "unknown", ""),
        ("", True, "working", ""),
        ("timed out", False, "failing", "timed out"),
        ("", False, "failing", "its answers are not ours"),
        # The last call went well, or ill, but what is asked every second says how it is.
        ("one of many", True, "working", ""),
    ],
)
async def test_redis_is_shown_without_its_password(
    trouble: str | None, answers: bool | None, state: str, detail: str, tmp_path: Path
) -> None:
    redis = RedisClient("redis://:secret@localhost:7001", "run")
    redis.trouble = trouble
    source = Source(keeper_answers=lambda: answers)
    async with looking_at(sources_of(source, History(), tmp_path, redis=redis)) as viewer:
        facts = await viewer.facts()
    assert facts["redis"] == {"address": "localhost:7001", "state": state, "detail": detail}
    await redis.aclose()


def value(exposition: str, name: str) -> float:
    (line,) = re.findall(rf"(?m)^{name} (.*)$", exposition)
    return float(line)


@pytest.mark.parametrize(
    ("store", "membership"),
    [(None, None), (Reason.DISK_FULL, None), (None, Reason.MEMBERSHIP_UNAVAILABLE)],
)
async def test_page_and_metrics_say_the_same_of_what_fails(
    store: Reason | None, membership: Reason | None, tmp_path: Path
) -> None:
    """Each fact is kept once, and both read it there."""
    redis = RedisClient("localhost:7001", "run")
    redis.trouble = ""
    async with shown(tmp_path, more={"redis": redis}) as (fleet, viewer):
        vitals = fleet.engine.vitals
        vitals.store_failure, vitals.membership_failure = store, membership
        facts = await viewer.facts()
        _, text = await viewer.get("metrics")
    await redis.aclose()
    assert facts["store"]["reason"] == str(store or "")
    assert facts["redis"]["detail"] == str(membership or "")
    for name, state in (("store", facts["store"]), ("membership", facts["redis"])):
        assert state["state"] == ("working" if value(text, f"diloco_{name}_up") else "failing")


async def test_page_and_metrics_say_the_same_of_the_last_round(tmp_path: Path) -> None:
    async with shown(tmp_path, settings=make_settings(num_learners=1)) as (fleet, viewer):
        assert (await viewer.facts())["published_s"] is None, "none in this term"
        (a,) = await fleet.seeded("a")
        await a.turn()
        await fleet.committed_is(1)
        fleet.engine.vitals.published_at -= 500.0
        facts = await viewer.facts_when(lambda x: x["published_s"] is not None)
        _, text = await viewer.get("metrics")
    assert 500.0 <= facts["published_s"] <= value(text, "diloco_round_age_seconds")


async def test_who_follows_claims_nothing_of_a_store_that_it_led_with(tmp_path: Path) -> None:
    history = History()
    history.take("persist_failed", {"global_step": 7, "reason": "DISK_FULL"})
    async with looking_at(sources_of(Source(), history, tmp_path)) as viewer:
        facts = await viewer.facts()
    assert (facts["store"]["state"], facts["store"]["reason"]) == ("unknown", "")
    assert facts["published_s"] is None


async def test_a_process_that_ends_says_what_it_did_up_to_the_end(tmp_path: Path) -> None:
    async with keeping(tmp_path) as keeper:
        process, _ = keeper.process("alone")
        keeper.names(process)
        keeper.start(process)
        await until(lambda: process.leads)
        async with shown_process(process, tmp_path) as viewer:
            assert (await viewer.facts())["store"]["state"] == "working"
            process.stopping.set()
            await asyncio.wait(keeper.tasks)
            facts = await viewer.facts_when(lambda x: x["status"]["state"] == "draining")
            assert facts["store"]["state"] == "working"
            async with asyncio.timeout(PATIENCE_S):
                while value((await viewer.get("metrics"))[1], "diloco_leader"):
                    pass
            _, text = await viewer.get("metrics")
            assert 'diloco_run_state{state="draining"} 1.0' in text
            assert value(text, "diloco_store_up") == 1, "counters keep their last values"
