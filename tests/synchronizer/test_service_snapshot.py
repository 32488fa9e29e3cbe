"""Snapshots over gRPC: who asks, what learners are told, and what counts as a return marker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.snapshots import SnapshotName
from decoupled_diloco.v1 import admin_pb2, types_pb2
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from synchronizer_server import snapshotting
from synchronizer_server.going_back import choose, go_back
from synchronizer_server.store import DiskStore, Manifest, MemoryStore
from tests.synchronizer.fake_learner import (
    PATIENCE_S,
    FakeLearner,
    Fleet,
    make_settings,
    refusal,
    serving,
    until,
)

pytestmark = pytest.mark.asyncio


def asked(fleet: Fleet, request_id: str = "one") -> asyncio.Future[admin_pb2.TakeSnapshotResponse]:
    request = admin_pb2.TakeSnapshotRequest(request_id=request_id)
    return asyncio.ensure_future(fleet.admin.TakeSnapshot(request, timeout=PATIENCE_S))


async def begin(fleet: Fleet, *learners: FakeLearner) -> tuple[str, int]:
    """A snapshot begins with the round of these learners; returns its name and cut."""
    answer = asked(fleet)
    await until(lambda: fleet.engine.core.snapshots.wanted)
    await asyncio.gather(*(learner.turn() for learner in learners))
    name = (await answer).snapshot_id
    return name, SnapshotName.parse(name).global_step


async def returns(learner: FakeLearner, cut: int, term: int | None = None) -> None:
    await learner.step(snapshot=cut, term=learner.term if term is None else term)


async def over(fleet: Fleet) -> admin_pb2.SnapshotStatus:
    await until(lambda: fleet.engine.core.snapshots.pending is None)
    return (await fleet.status()).snapshot


async def test_the_answer_names_the_cut_and_comes_with_the_round_that_is_it() -> None:
    async with serving(settings=make_settings(quorum=2, grace=False)) as fleet:
        a, b = await fleet.seeded("a", "b")
        first, again = asked(fleet), asked(fleet)
        await until(lambda: fleet.engine.core.snapshots.wanted)
        await asyncio.gather(a.turn(), b.turn())
        names = {(await first).snapshot_id, (await again).snapshot_id}
        assert names == {f"1.{fleet.committed}"}
        assert (await asked(fleet)).snapshot_id in names, "asked again, it is the same"
        status = (await fleet.status()).snapshot
        assert status.pending in names
        assert list(status.awaited) == ["a", "b"]
        assert fleet.engine.clock_message().snapshot == fleet.committed
        for learner in (a, b):
            notice = await learner.hear("snapshot")
            assert (notice.global_step, notice.over) == (fleet.committed, False)


async def test_clocks_of_reports_heartbeats_hellos_and_pushes_return_the_marker() -> None:
    settings = make_settings(num_learners=4, quorum=4, grace=False)
    async with serving(settings=settings) as fleet:
        a, b, c, d = await fleet.seeded("a", "b", "c", "d")
        name, cut = await begin(fleet, a, b, c, d)
        pending = fleet.engine.core.snapshots.pending
        assert pending is not None
        await returns(a, cut)
        await until(lambda: "a" in pending.recorded)
        marker = types_pb2.Clock(snapshot=cut, term=1)
        await b.say(heartbeat=pb.Heartbeat(clock=marker))
        await until(lambda: "b" in pending.recorded)
        c.hang_up()
        await until(lambda: "c" not in fleet.engine.streams)
        call = fleet.stub.Report()
        hello = pb.ReportHello(learner_id="c", incarnation=c.incarnation, clock=marker)
        await call.write(pb.ReportRequest(hello=hello))
        await until(lambda: "c" in pending.recorded)
        payload = d.encode(vector := torch.zeros(d.num_elements(1)))
        header = d.header(
            payload, fragment=1, global_step=99, clock=marker,
            base=d.header_for(pb.Pull(fragment=1), payload).base,
            encoding={"num_elements": vector.numel()},
        )  # fmt: skip
        await d.send(header, payload)
        status = await over(fleet)
        assert (status.complete, status.last, status.failure) == (name, name, "")
        assert list(status.participants) == ["a", "b", "c", "d"]
        assert dict(status.left_out) == {}
        notice = await d.hear("snapshot")
        while not notice.over:
            notice = await d.hear("snapshot")
        assert notice.global_step == cut
        call.cancel()


async def test_a_clock_of_another_term_or_another_cut_is_no_marker() -> None:
    async with serving(settings=make_settings(quorum=2, grace=False)) as fleet:
        a, b = await fleet.seeded("a", "b")
        _, cut = await begin(fleet, a, b)
        await returns(a, cut, term=2)
        await returns(a, cut + 1)
        await returns(b, cut)
        pending = fleet.engine.core.snapshots.pending
        assert pending is not None
        await until(lambda: "b" in pending.recorded)
        learner = fleet.engine.core.state.roster.find("a")
        await until(lambda: learner is not None and learner.local_step == a.local_step)
        assert list(pending.awaited) == ["a"]


async def test_who_leaves_is_left_out_with_the_reason_and_it_is_complete_without() -> None:
    async with serving(settings=make_settings(quorum=2, grace=False)) as fleet:
        a, b = await fleet.seeded("a", "b")
        name, cut = await begin(fleet, a, b)
        await returns(a, cut)
        await fleet.stub.Leave(pb.LeaveRequest(learner_id="b", incarnation=b.incarnation))
        status = await over(fleet)
        assert status.complete == name
        assert dict(status.left_out) == {"b": "left"}
        [manifest] = fleet.store.snapshots()  # type: ignore[attr-defined]
        assert list(manifest.participants) == ["a"]


async def test_who_says_that_it_has_no_part_is_not_awaited() -> None:
    settings = make_settings(num_learners=3, quorum=3, grace=False)
    async with serving(settings=settings) as fleet:
        a, b = await fleet.seeded("a", "b")
        c = await fleet.learner("c", records_parts=False)
        name, cut = await begin(fleet, a, b, c)
        await b.say(part_missing=pb.PartMissing(global_step=cut - 1, reason="of another one"))
        await b.say(part_missing=pb.PartMissing(global_step=cut, reason="DISK_FULL:\nno room"))
        await returns(a, cut)
        status = await over(fleet)
        assert status.complete == name
        assert dict(status.left_out) == {
            "b": "DISK_FULL: no room",
            "c": "it has no directory for its part",
        }


class FullStore(MemoryStore):
    """Has no room for what a test says."""

    full = ""

    def pin(self, name: SnapshotName) -> None:
        if self.full == "pin":
            raise DilocoError(Reason.DISK_FULL, "no room for the pin")
        super().pin(name)

    def keep_snapshot(self, manifest: Manifest, keep: int) -> None:
        if self.full == "manifest":
            raise DilocoError(Reason.DISK_FULL, "no room for the manifest")
        super().keep_snapshot(manifest, keep)


@pytest.mark.parametrize("full", ["pin", "manifest"])
async def test_what_cannot_be_kept_fails_and_the_one_before_stays(full: str) -> None:
    store = FullStore()
    async with serving(settings=make_settings(quorum=2, grace=False), store=store) as fleet:
        a, b = await fleet.seeded("a", "b")
        good, cut = await begin(fleet, a, b)
        await returns(a, cut)
        await returns(b, cut)
        await over(fleet)
        store.full = full
        second = asked(fleet, "two")
        await until(lambda: fleet.engine.core.snapshots.wanted)
        while not second.done():
            # The steps that returned the markers are fresh reports: the next pulls follow them.
            for learner in (a, b):
                pull = await learner.hear("pull")
                await learner.push(pull)
            await asyncio.wait([second], timeout=0.05)
        bad = SnapshotName.parse((await second).snapshot_id)
        await returns(a, bad.global_step)
        await returns(b, bad.global_step)
        status = await over(fleet)
        assert (status.last, status.complete) == (str(bad), good)
        assert "no room" in status.failure
        await until(lambda: [str(m.name) for m in store.snapshots()] == [good])
        assert fleet.engine.failure is None


async def test_a_run_that_ends_refuses_and_whoever_waits_is_told() -> None:
    settings = make_settings(quorum=2, grace=False, total_global_steps=4)
    async with serving(settings=settings) as fleet:
        a, b = await fleet.seeded("a", "b")
        for _ in range(3):
            await asyncio.gather(a.turn(), b.turn())
        await fleet.committed_is(3)
        waiting = asked(fleet)
        await until(lambda: fleet.engine.core.snapshots.wanted)
        await asyncio.gather(a.turn(), b.turn())
        await fleet.committed_is(4)
        assert (await refusal(waiting)).reason is Reason.SNAPSHOT_FAILED
        assert (await refusal(asked(fleet, "two"))).reason is Reason.SNAPSHOT_FAILED
        assert (await refusal(asked(fleet, "a b"))).reason is Reason.MALFORMED


async def test_who_is_crowded_out_by_many_requests_is_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshotting, "_MAX_REQUESTS", 2)
    async with serving(settings=make_settings(quorum=1, grace=False)) as fleet:
        await fleet.seeded("a")
        first = asked(fleet, "0")
        await until(lambda: fleet.engine.core.snapshots.wanted)
        others = [asked(fleet, str(i)) for i in (1, 2)]
        error = await refusal(first)
        assert error.reason is Reason.SNAPSHOT_FAILED
        assert "ask again" in error.message
        for other in others:
            other.cancel()


async def test_a_restart_goes_on_from_a_snapshot_and_knows_it(tmp_path: Path) -> None:
    settings = make_settings(quorum=2, grace=False)

    def store() -> DiskStore:
        return DiskStore(tmp_path / "store", "run", snapshots=tmp_path / "snapshots")

    fleet = await Fleet(settings=settings, store=store()).start()
    a, b = await fleet.seeded("a", "b")
    name, cut = await begin(fleet, a, b)
    published = fleet.published()
    await returns(a, cut)
    await returns(b, cut)
    await over(fleet)
    for learner in (a, b):
        await learner.push(await learner.hear("pull"))
    await fleet.committed_is(cut + 1)
    await fleet.stop()
    disk = store()
    back = go_back(disk, "latest")
    disk.close()
    assert (str(back.manifest.name), back.num_given_up) == (name, 1)
    assert "1 newer rounds are given up" in back.describe()
    async with serving(settings=settings, store=store()) as again:
        assert again.committed == cut
        assert again.published() == published
        status = (await again.status()).snapshot
        assert (status.complete, status.pending, status.last) == (name, "", "")


async def test_a_snapshot_is_chosen_by_name_by_step_or_as_the_latest() -> None:
    def manifest(term: int, step: int) -> Manifest:
        return Manifest(
            name=SnapshotName(term, step), run_id="run", group=0, versions=(), participants={},
            left_out={},
        )  # fmt: skip

    there = [manifest(1, 100), manifest(1, 200), manifest(3, 100)]
    assert choose(there, "latest") is there[2], "a later term has gone back"
    assert choose(there, "100") is there[2]
    assert choose(there, "200") is there[1]
    assert choose(there, "1.100") is there[0]
    for wrong in ("300", "3.200", "0"):
        with pytest.raises(UsageError, match=r"there are: 1\.100, 1\.200, 3\.100") as caught:
            choose(there, wrong)
        assert caught.value.reason is Reason.SNAPSHOT_NOT_FOUND
    with pytest.raises(UsageError, match="there are: none"):
        choose([], "latest")
    with pytest.raises(UsageError, match="names no snapshot"):
        choose(there, "newest")
