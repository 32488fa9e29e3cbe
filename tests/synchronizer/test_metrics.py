"""Metrics of a served synchronizer: they agree with status and journal, and stay bounded."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.metrics import Kind, Sheet, counter, gauge
from decoupled_diloco.v1 import admin_pb2, types_pb2
from synchronizer_server import metric_table
from synchronizer_server.core import events as ev
from synchronizer_server.core.roster import LearnerState
from synchronizer_server.heartbeats import run_heartbeats
from synchronizer_server.membership.memory import MemoryMembership
from synchronizer_server.metrics import Metrics, Source
from synchronizer_server.status import status_message
from synchronizer_server.store.memory import MemoryStore
from tests.synchronizer.fake_learner import (
    REFUSED,
    Fleet,
    make_settings,
    serving,
    until,
    vector_for,
)
from tests.synchronizer.fake_watcher import FakeWatcher

ALONE = make_settings(num_learners=1)

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(shown: Metrics) -> Values:
    """What Prometheus would read, by name and labels."""
    body, content_type = shown.exposition()
    assert content_type.startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def metrics_of(fleet: Fleet) -> Metrics:
    return Metrics(
        Source(
            run_id="run",
            status=lambda: status_message(fleet.engine, {}),
            engine=lambda: fleet.engine,
        )
    )


class Scrape:
    """One scrape: ``scrape("name", label=value)`` is a value, None where there is none."""

    def __init__(self, fleet: Fleet, status: admin_pb2.GetStatusResponse | None = None) -> None:
        shown = metrics_of(fleet)
        if status is not None:
            shown = Metrics(Source(status=lambda: status, engine=lambda: fleet.engine))
        self.values = scraped(shown)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.values.get((name, frozenset(labels.items())))

    def labels(self, name: str, label: str) -> set[str]:
        return {dict(labels).get(label) for found, labels in self.values if found == name}


# -- the table ---------------------------------------------------------------------------------


def test_names_follow_the_rules_of_prometheus():
    for spec in metric_table.TABLE:
        assert re.fullmatch(r"diloco(_[a-z]+)+", spec.name), spec.name
        assert spec.name.endswith("_total") == (spec.kind is Kind.COUNTER), spec.name
        assert not spec.name.startswith("diloco_learner_"), "those are a learner's own"
        assert spec.text.endswith("."), spec.name
        words = spec.name.removesuffix("_total").split("_")
        assert not {"seconds", "bytes", "ratio", "info"} & set(words[:-1]), "the unit comes last"
    names = [spec.name for spec in metric_table.TABLE]
    assert sorted(names) == sorted(set(names))


def test_a_sheet_takes_nothing_that_its_table_does_not_name():
    sheet = Sheet([gauge("diloco_a", "A.", "learner"), counter("diloco_b_total", "B.")])
    with pytest.raises(KeyError):
        sheet.put("diloco_c", 1)
    with pytest.raises(AssertionError):
        sheet.put("diloco_a", 1)
    with pytest.raises(AssertionError):
        sheet.put("diloco_b_total", 1, learner="x")


# -- a process that does not lead ---------------------------------------------------------------


def test_a_process_that_has_not_begun_says_so_and_claims_nothing():
    values = scraped(Metrics(Source()))
    assert values["diloco_leader", frozenset()] == 0
    assert values["diloco_run_state", frozenset({("state", "starting")})] == 1
    assert ("diloco_global_step", frozenset()) not in values
    assert ("diloco_rounds_total", frozenset()) not in values


def test_a_process_that_follows_tells_term_step_and_why_it_waits():
    status = admin_pb2.GetStatusResponse(
        run_id="run",
        role="following",
        state="following",
        claim=types_pb2.LeadershipClaim(run_id="run", term=7, leader_id="x"),
        global_step=41,
        record_term=7,
        waits=[admin_pb2.Wait(subject="leadership", reason="following", detail="x leads")],
    )
    values = scraped(Metrics(Source(status=lambda: status, keeper_answers=lambda: False)))
    wait = frozenset({("subject", "leadership"), ("reason", "following")})
    assert values["diloco_leader", frozenset()] == 0
    assert values["diloco_term", frozenset()] == 7
    assert values["diloco_global_step", frozenset()] == 41
    assert values["diloco_waits", wait] == 1
    assert values["diloco_lease_keeper_up", frozenset()] == 0
    assert ("diloco_rounds_total", frozenset()) not in values


def test_the_run_and_the_process_are_shown_whatever_it_does():
    body, _ = Metrics(Source(run_id="mine")).exposition()
    assert b'diloco_run_info{run_id="mine"} 1.0' in body
    assert b"process_resident_memory_bytes" in body


# -- a process that leads -----------------------------------------------------------------------


@pytest.mark.asyncio
async def test_values_agree_with_the_status_and_with_the_lines_of_the_journal(tmp_path):
    journal = tmp_path / "events.jsonl"
    async with serving(settings=make_settings(num_learners=2, quorum=2), journal=journal) as fleet:
        learners = await fleet.seeded("a", "b")
        watcher = FakeWatcher(fleet).start()
        for step in range(1, 5):
            await asyncio.gather(*(learner.turn() for learner in learners))
            await fleet.committed_is(step)
        await until(watcher.follows)
        await watcher.stop()
        scrape, status = Scrape(fleet), await fleet.status()
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    rounds = [line for line in lines if line["kind"] == "round"]
    totals = status.totals

    assert scrape("diloco_leader") == 1
    assert scrape("diloco_term") == status.claim.term == rounds[-1]["term"]
    assert scrape("diloco_global_step") == status.global_step == rounds[-1]["global_step"] == 4
    assert scrape("diloco_rounds_total") == totals.rounds == len(rounds)
    contributors = [len(line["contributors"]) for line in rounds]
    live = [len(line["live"]) for line in rounds]
    assert scrape("diloco_round_contributions_total") == totals.contributions == sum(contributors)
    assert scrape("diloco_round_live_total") == totals.live == sum(live)
    assert scrape("diloco_participation_ratio") == totals.participation == 1.0
    assert scrape("diloco_round_contributors") == contributors[-1]
    assert scrape("diloco_round_tokens") == rounds[-1]["tokens"] == 128
    assert scrape("diloco_merged_tokens_total") == sum(line["tokens"] for line in rounds)
    for name, key in (("quorum", "quorum_s"), ("sync", "sync_s")):
        seconds = scrape(f"diloco_{name}_duration_seconds_sum")
        assert seconds == pytest.approx(sum(line[key] for line in rounds))
    for name in ("quorum", "grace", "merge", "persist", "replicate", "sync"):
        assert scrape(f"diloco_{name}_duration_seconds_count") == len(rounds), name
    measured = [line["measured_h"] for line in rounds if line["measured_h"] is not None]
    assert scrape("diloco_inner_steps_per_merge_count") == len(measured)
    assert scrape("diloco_inner_steps_per_merge_sum") == sum(measured)
    assert scrape("diloco_measured_sync_interval") == totals.measured_h
    up = scrape("diloco_transfer_bytes_total", leg="push", codec="bf16")
    assert up == totals.bytes_up == rounds[-1]["bytes_up"] > 0
    assert scrape("diloco_transfer_bytes_total", leg="observer", codec="fp32") > 0
    assert scrape("diloco_pushes_total", outcome="accepted", reason="") == totals.contributions
    for learner in status.learners:
        name = learner.learner_id
        assert scrape("diloco_reported_step", learner=name) == learner.local_step == 4
        assert scrape("diloco_reported_loss", learner=name) == 2.5
        assert scrape("diloco_reported_tokens_total", learner=name) == 4 * 64
        assert scrape("diloco_contributed_tokens_total", learner=name) == learner.tokens_merged
        assert scrape("diloco_versions_behind", learner=name) == learner.versions_behind == 4
        assert scrape("diloco_answered_pushes_total", learner=name, outcome="accepted") == 4
        assert scrape("diloco_exchanged_bytes_total", learner=name, leg="push") == up / 2
    assert scrape("diloco_learners", state="live") == 2
    assert scrape("diloco_learners", state="gone") == 0
    assert scrape.labels("diloco_fragment_version", "fragment") == {"0", "1", "2", "3"}
    assert scrape("diloco_inflight_bytes") == 0
    assert scrape("diloco_store_up") == scrape("diloco_membership_up") == 1


@pytest.mark.asyncio
async def test_every_push_that_is_not_merged_is_counted_under_its_reason():
    async with serving(settings=ALONE) as fleet:
        [learner] = await fleet.seeded("a")
        await learner.step()
        pull = await learner.hear("pull")
        vector = vector_for(pull.fragment, learner.num_elements(pull.fragment), 1)
        vector[0] = float("nan")
        assert (await learner.push(pull, vector)).outcome == REFUSED
        scrape, status = Scrape(fleet), await fleet.status()
        assert scrape("diloco_pushes_total", outcome="refused", reason="NON_FINITE") == 1
        assert dict(status.totals.pushes_by_reason) == {"NON_FINITE": 1}
        assert scrape("diloco_answered_pushes_total", learner="a", outcome="refused") == 1
        assert scrape("diloco_pushes_total", outcome="accepted", reason="") is None


@pytest.mark.asyncio
async def test_what_waits_is_shown_by_kind_and_reason_without_the_number_of_its_round():
    async with serving(settings=make_settings(quorum=2)) as fleet:
        [learner] = await fleet.seeded("a")
        await learner.step()
        await until(lambda: [w.reason for w, _ in fleet.engine.core.waits(0.0)] == ["quorum"])
        scrape = Scrape(fleet)
        assert scrape("diloco_waits", subject="round", reason="quorum") == 1
        assert scrape("diloco_wait_seconds", subject="round", reason="quorum") >= 0.0
        assert scrape.labels("diloco_waits", "subject") == {"round"}


@pytest.mark.asyncio
async def test_a_learner_that_left_or_was_silent_for_long_is_exported_no_more():
    per_learner = [x.name for x in metric_table.TABLE if "learner" in x.labels]
    async with serving() as fleet:
        learners = await fleet.seeded("a", "b", "c")
        await learners[0].step()
        await until(lambda: fleet.engine.core.state.roster.find("a").loss)
        by_learner = defaultdict(set)
        for name in per_learner:
            by_learner[name] = Scrape(fleet).labels(name, "learner")
        assert by_learner.pop("diloco_reported_loss") == {"a"}
        assert set(map(frozenset, by_learner.values())) == {frozenset("abc")}

        roster = fleet.engine.core.state.roster
        goodbye = ev.LearnerLeft(
            learner_id="b", incarnation=roster.find("b").incarnation, reason="done"
        )
        fleet.engine.handle(goodbye)
        roster.find("c").heard_at -= metric_table.FORGOTTEN_S + 1
        roster.move(roster.find("c"), LearnerState.GONE)
        scrape = Scrape(fleet)
        assert set().union(*(scrape.labels(x, "learner") for x in per_learner)) == {"a"}
        assert scrape("diloco_learners", state="gone") == 1
        assert scrape("diloco_tokens_total") == 64


@pytest.mark.asyncio
async def test_every_name_is_in_the_table_and_every_series_is_one_of_a_few():
    known = {
        spec.name + part
        for spec in metric_table.TABLE
        for part in {
            Kind.HISTOGRAM: ("_bucket", "_sum", "_count"),
            Kind.SUMMARY: ("_sum", "_count"),
        }.get(spec.kind, ("",))
    }
    async with serving(settings=ALONE) as fleet:
        [learner] = await fleet.seeded("a")
        await learner.turn()
        await fleet.committed_is(1)
        values = Scrape(fleet).values
    ours = {name for name, _ in values if name.startswith("diloco_")}
    assert ours <= known
    assert len(values) < 400


class FailingStore(MemoryStore):
    failing = False

    def commit(self, record, fragments, *, force=False):
        if self.failing:
            raise DilocoError(Reason.DISK_FULL, "no room")
        super().commit(record, fragments, force=force)


class FailingMembership(MemoryMembership):
    failing = False

    async def heartbeat(self, batch, term):
        if self.failing:
            raise DilocoError(Reason.MEMBERSHIP_UNAVAILABLE, "no answer")
        await super().heartbeat(batch, term)


@pytest.mark.asyncio
async def test_a_store_or_a_membership_that_fails_is_shown_until_it_is_back(monkeypatch):
    monkeypatch.setattr("synchronizer_server.round_work.PERSIST_RETRY_S", 0.05)
    store, membership = FailingStore(), FailingMembership()
    settings = make_settings(num_learners=1, heartbeat_interval_s=0.05)
    async with serving(settings=settings, store=store, membership=membership) as fleet:
        fleet.engine.spawn(run_heartbeats(fleet.engine, membership))
        [learner] = await fleet.seeded("a")
        assert Scrape(fleet)("diloco_store_up") == Scrape(fleet)("diloco_membership_up") == 1
        store.failing = membership.failing = True
        await learner.turn()
        await until(lambda: Scrape(fleet)("diloco_store_up") == 0)
        await until(lambda: Scrape(fleet)("diloco_membership_up") == 0)
        store.failing = membership.failing = False
        await until(lambda: Scrape(fleet)("diloco_store_up") == 1)
        await until(lambda: Scrape(fleet)("diloco_membership_up") == 1)
        await fleet.committed_is(1)


@pytest.mark.asyncio
async def test_the_age_of_the_newest_snapshot_is_counted_from_its_cut():
    async with serving(settings=ALONE) as fleet:
        [learner] = await fleet.seeded("a")
        assert Scrape(fleet)("diloco_snapshot_age_rounds") is None
        fleet.engine.handle(ev.SnapshotWanted())
        await learner.turn()
        await fleet.committed_is(1)
        notice = await learner.hear("snapshot")
        assert Scrape(fleet)("diloco_snapshot_pending") == 1
        await learner.step(snapshot=notice.global_step, term=learner.term)
        await until(lambda: Scrape(fleet)("diloco_snapshots_total", result="complete") == 1)
        pull = await learner.hear("pull")
        await learner.push(pull)
        await fleet.committed_is(2)
        scrape = Scrape(fleet)
        assert scrape("diloco_snapshot_age_rounds") == 1
        assert scrape("diloco_snapshot_age_seconds") >= 0.0
        assert scrape("diloco_snapshot_pending") == 0
