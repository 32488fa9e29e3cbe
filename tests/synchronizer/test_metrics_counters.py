"""Counters only ever go up, and no label grows with those who come and go."""

from __future__ import annotations

import asyncio

import pytest

from decoupled_diloco.metrics import Kind
from decoupled_diloco.v1 import admin_pb2
from synchronizer_server import metric_table, metrics
from synchronizer_server.core import events as ev
from synchronizer_server.metrics import Metrics, Source
from synchronizer_server.store.memory import MemoryStore
from tests.synchronizer.fake_learner import Fleet, make_settings, serving
from tests.synchronizer.test_metrics import ALONE, Scrape, Values, metrics_of, scraped

COUNTERS = {spec.name for spec in metric_table.TABLE if spec.kind is Kind.COUNTER}


def fleet_status(ages: dict[str, float]) -> admin_pb2.GetStatusResponse:
    return admin_pb2.GetStatusResponse(
        role="leading",
        learners=[
            admin_pb2.LearnerStatus(learner_id=name, state="live", heard_seconds_ago=age)
            for name, age in ages.items()
        ],
    )


def shown_learners(shown: Metrics) -> set[str]:
    found = (dict(labels) for name, labels in scraped(shown) if name == "diloco_reported_step")
    return {labels["learner"] for labels in found}


def test_of_too_many_learners_those_are_exported_that_were_before(monkeypatch):
    """Else thousands that are heard in turn would have series that come and go at every scrape."""
    monkeypatch.setattr(metrics, "MOST_LEARNERS", 2)
    status = fleet_status({"a": 3.0, "b": 1.0, "c": 2.0})
    shown = Metrics(Source(status=lambda: status))
    assert shown_learners(shown) == {"b", "c"}, "at first those that were heard last"
    assert scraped(shown)["diloco_learners", frozenset({("state", "live")})] == 3
    status = fleet_status({"a": 0.5, "b": 30.0, "c": 4.0, "d": 0.0})
    assert shown_learners(shown) == {"b", "c"}
    status = fleet_status({"a": 0.5, "b": metric_table.FORGOTTEN_S + 1, "c": 4.0, "d": 0.0})
    assert shown_learners(shown) == {"c", "d"}, "and others once one of them is forgotten"


@pytest.mark.parametrize("name", ['a"b', "a\\b", 'a",x="1', "a}b", "<img/src=x>", "öñ漢🙂"])
def test_whatever_a_learner_calls_itself_stays_in_its_label(name):
    status = fleet_status({name: 1.0})
    assert shown_learners(Metrics(Source(status=lambda: status))) == {name}


@pytest.mark.asyncio
async def test_counters_of_a_term_begin_at_zero_whatever_the_run_had_counted():
    """A record holds a little less than what was scraped last: who adds up increases would take
    all that a run ever counted for new."""
    store = MemoryStore()
    first = await Fleet(settings=ALONE, store=store).start()
    [learner] = await first.seeded("a")
    for step in range(1, 4):
        await learner.turn()
        await first.committed_is(step)
    await first.stop()
    second = await Fleet(settings=ALONE, store=store).start()
    try:
        assert (await second.status()).totals.tokens_merged == 3 * 64, "it is not forgotten"
        values = Scrape(second).values
        assert {x: v for x, v in values.items() if x[0] in COUNTERS and v} == {}
        again = await second.learner("a")
        await again.turn()
        await second.committed_is(4)
        scrape = Scrape(second)
        assert scrape("diloco_tokens_total") == scrape("diloco_merged_tokens_total") == 64
        assert scrape("diloco_reported_tokens_total", learner="a") == 64
        assert scrape("diloco_contributed_tokens_total", learner="a") == 64
    finally:
        await second.stop()


@pytest.mark.asyncio
async def test_no_counter_goes_back_while_learners_come_and_go():
    async with serving(settings=make_settings(num_learners=2)) as fleet:
        highest: Values = {}
        learners = await fleet.seeded("a", "b")
        for step in range(1, 7):
            await asyncio.gather(*(x.turn() for x in learners))
            await fleet.committed_is(step)
            if step == 2:  # a new life
                learners[1] = await fleet.learner("b", request_id="another")
            if step == 4:
                roster = fleet.engine.core.state.roster
                left = ev.LearnerLeft(
                    learner_id="b", incarnation=roster.find("b").incarnation, reason="done"
                )
                fleet.engine.handle(left)
                learners.pop()
            now = {x: v for x, v in Scrape(fleet).values.items() if x[0] in COUNTERS}
            gone_back = {x: (highest[x], v) for x, v in now.items() if v < highest.get(x, 0.0)}
            assert gone_back == {}
            highest |= now
        assert highest["diloco_tokens_total", frozenset()] == (6 + 4) * 64


@pytest.mark.asyncio
async def test_a_scrape_is_worked_out_beside_the_event_loop():
    """What costs most is done from a copy, which nothing changes any more."""
    async with serving(settings=ALONE) as fleet:
        [learner] = await fleet.seeded("a")
        finish = metrics_of(fleet).look()
        await learner.turn()
        await fleet.committed_is(1)
        body, _ = await asyncio.to_thread(finish)
    assert b"diloco_global_step 0.0" in body
    assert b"diloco_rounds_total 0.0" in body
    assert b"diloco_merge_duration_seconds_count 0.0" in body
