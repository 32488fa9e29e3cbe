"""A learner's part of a snapshot: when it is recorded, what is in it, and what keeps it out."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from learner_kit import NAME, local_vector, make_learner, make_model, make_settings, train
from scripted_synchronizer import ScriptedSynchronizer, until

from decoupled_diloco.errors import UsageError
from decoupled_diloco.snapshots import SnapshotName, part_name
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from learner_client import Learner
from learner_client.checkpoint import SavedState, saved_state_from
from learner_client.inner_state import OptimizerState
from learner_client.snapshots import SnapshotDirectory
from learner_client.training_state import TrainingState, load_training_state

pytestmark = pytest.mark.asyncio


def with_snapshots(service: ScriptedSynchronizer, model: torch.nn.Module, path: Path) -> Learner:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inner = OptimizerState(model, optimizer)
    return make_learner(
        service,
        model,
        snapshots=SnapshotDirectory(path),
        training_state=lambda saved: TrainingState.capture(model, inner, saved, {"lines": 7}),
    )


def part(path: Path, global_step: int, term: int = 1) -> Path:
    return path / f"{term}.{global_step}" / part_name(NAME)


def parts_in(path: Path) -> list[Path]:
    return list(path.rglob("*.safetensors"))


def saved_at(path: Path, global_step: int) -> SavedState:
    return saved_state_from(load_training_state(part(path, global_step)).learner)


async def reported_snapshot(service: ScriptedSynchronizer, model, learner: Learner) -> int:
    """The cut that the clock of the learner's next report carries."""
    before = len(service.steps)
    train(model)
    learner.step(num_tokens=5)
    await until(lambda: len(service.steps) > before)
    return service.steps[-1].clock.snapshot


async def notice(service: ScriptedSynchronizer, learner: Learner, cut: int, over: bool = False):
    service.say(NAME, snapshot=pb.SnapshotNotice(global_step=cut, over=over))
    # The schedule that follows on the same stream says when the notice has been read.
    service.say(NAME, schedule=pb.Schedule(global_step=cut, due_fragments=[3]))
    await until(lambda: learner._exchange.core.due.now() == (3,))


async def test_a_part_is_recorded_between_the_updates_up_to_the_cut_and_those_above(
    tmp_path: Path,
) -> None:
    service, model = ScriptedSynchronizer(make_settings()), make_model()
    async with with_snapshots(service, model, tmp_path) as learner:
        train(model)
        learner.step(num_tokens=5)
        sizes = {p: vector.numel() for p, (_, vector) in service.published.items()}
        below = service.publish(1, 9, torch.ones(sizes[1]))
        service.snapshot = 10
        at = service.publish(2, 10, torch.ones(sizes[2]))
        above = service.publish(3, 11, torch.ones(sizes[3]))
        await until(lambda: learner.status.num_updates == 4 + 3)
        train(model)
        expected = local_vector(learner, 3).clone()
        learner.step(num_tokens=6)
        assert torch.equal(local_vector(learner, 3), above), "training goes on with it at once"
        await until(lambda: part(tmp_path, 10).exists())
        state = load_training_state(part(tmp_path, 10))
        saved = saved_state_from(state.learner)
        assert saved.cut is not None
        assert (saved.cut.name, saved.cut.num_tokens) == (SnapshotName(1, 10), 6)
        assert [v.global_step for v, _ in saved.published.values()] == [0, 9, 10, 0]
        assert torch.equal(saved.published[1][1], below)
        assert torch.equal(saved.published[2][1], at)
        assert saved.local_step == 2
        assert state.data == {"lines": 7}
        twin = make_model(3)
        twin.load_state_dict(state.model)
        other = ScriptedSynchronizer(make_settings())
        async with make_learner(other, twin) as reader:
            assert torch.equal(local_vector(reader, 3), expected)
        assert await reported_snapshot(service, model, learner) == 10, "the return marker"


async def test_a_notice_is_enough_and_the_marker_returns_only_once_the_part_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, model = ScriptedSynchronizer(make_settings()), make_model()
    async with with_snapshots(service, model, tmp_path) as learner:
        await notice(service, learner, 4)
        monkeypatch.setattr(learner._worker, "part_captured", lambda: None)
        assert await reported_snapshot(service, model, learner) == 0
        assert await reported_snapshot(service, model, learner) == 0, "captured is not written"
        monkeypatch.undo()
        learner._worker.part_captured()  # type: ignore[union-attr]
        await until(lambda: part(tmp_path, 4).exists())
        await until(lambda: learner._exchange.snapshots.recorded == 4)
        assert await reported_snapshot(service, model, learner) == 4
        assert saved_at(tmp_path, 4).local_step == 1, "of the boundary after the notice"


async def test_what_is_over_before_the_boundary_is_not_recorded(tmp_path: Path) -> None:
    service, model = ScriptedSynchronizer(make_settings()), make_model()
    async with with_snapshots(service, model, tmp_path) as learner:
        await notice(service, learner, 4)
        service.say(NAME, snapshot=pb.SnapshotNotice(global_step=4, over=True))
        await until(lambda: learner._exchange.snapshots.due is None)
        assert await reported_snapshot(service, model, learner) == 0
    assert parts_in(tmp_path) == []


async def test_a_join_says_whether_parts_are_recorded(tmp_path: Path) -> None:
    service = ScriptedSynchronizer(make_settings())
    async with with_snapshots(service, make_model(), tmp_path):
        pass
    async with make_learner(service, make_model()):
        pass
    assert [request.records_parts for request in service.joins] == [True, False]


async def test_who_joins_later_takes_no_part(tmp_path: Path) -> None:
    service, model = ScriptedSynchronizer(make_settings(), snapshot=6), make_model()
    async with with_snapshots(service, model, tmp_path) as learner:
        service.publish(2, 10, torch.ones(service.published[2][1].numel()))
        await until(lambda: learner.status.num_updates == 4 + 1)
        assert await reported_snapshot(service, model, learner) == 0
    assert parts_in(tmp_path) == []


async def test_what_cannot_be_copied_keeps_the_learner_out_and_its_training_going(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service, model = ScriptedSynchronizer(make_settings()), make_model()

    def broken(_: object) -> TrainingState:
        raise RuntimeError("no such state")

    learner = make_learner(
        service, model, snapshots=SnapshotDirectory(tmp_path), training_state=broken
    )
    with caplog.at_level(logging.ERROR, logger="learner_client"):
        async with learner:
            await notice(service, learner, 4)
            assert await reported_snapshot(service, model, learner) == 0
            assert await reported_snapshot(service, model, learner) == 0
            await until(lambda: service.parts_missing)
    assert [record.message for record in caplog.records] == [f"{NAME}: no part of snapshot 1.4"]
    [told] = service.parts_missing
    assert (told.global_step, "could not be copied" in told.reason) == (4, True)
    assert parts_in(tmp_path) == []


async def test_a_disk_that_fails_keeps_the_learner_out_and_its_training_going(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    service, model = ScriptedSynchronizer(make_settings()), make_model()
    with caplog.at_level(logging.ERROR, logger="learner_client"):
        async with with_snapshots(service, model, blocked) as learner:
            await notice(service, learner, 4)
            assert await reported_snapshot(service, model, learner) == 0
            await until(lambda: caplog.records)
            assert await reported_snapshot(service, model, learner) == 0
            await until(lambda: service.parts_missing)
    assert "STORAGE_FAILED" in caplog.records[0].message
    [told] = service.parts_missing
    assert (told.global_step, "STORAGE_FAILED" in told.reason) == (4, True)


async def test_a_resumed_learner_finishes_the_boundary_in_which_it_was_recorded(
    tmp_path: Path,
) -> None:
    service, model = ScriptedSynchronizer(make_settings(codec_up="fp32")), make_model()
    async with with_snapshots(service, model, tmp_path) as learner:
        for _ in range(3):
            train(model)
            learner.step(num_tokens=5)
        await notice(service, learner, 1)
        train(model)
        learner.step(num_tokens=6)
        await until(lambda: part(tmp_path, 1).exists())
    published = dict(service.published)

    again = ScriptedSynchronizer(make_settings(codec_up="fp32"), published=published)
    model = make_model(8)
    learner = with_snapshots(again, model, tmp_path)
    state = load_training_state(part(tmp_path, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state.restore(model, OptimizerState(model, optimizer), learner)
    async with learner:
        await until(lambda: again.steps)
        report = again.steps[0]
        assert (report.clock.own_step, report.num_steps, report.num_tokens) == (4, 1, 6)
        due = learner._exchange.core.due.now()[0]
        again.pull(NAME, due, due)
        await until(lambda: again.pushes or again.declined)
        pushed = again.pushes[0]
        assert (pushed.header.num_steps, pushed.header.num_tokens) == (4, 21)
        assert torch.equal(pushed.vector, published[due][1] - local_vector(learner, due))


async def test_parts_that_nobody_else_removes_are_removed_here(tmp_path: Path) -> None:
    service, model = ScriptedSynchronizer(make_settings()), make_model()
    async with with_snapshots(service, model, tmp_path) as learner:
        await notice(service, learner, 1)
        train(model)
        learner.step(num_tokens=5)
        await until(lambda: part(tmp_path, 1).exists())
    state = load_training_state(part(tmp_path, 1))
    own = SnapshotDirectory(tmp_path / "own", keep=2)
    for global_step in (5, 900, 1000):
        own.write(SnapshotName(1, global_step), "a/b", state)
    own.write(SnapshotName(1, 900), "c", state)
    own.write(SnapshotName(2, 7), "a/b", state)
    left = sorted(str(p.relative_to(tmp_path / "own")) for p in (tmp_path / "own").rglob("*.s*"))
    assert left == ["1.1000/a%2Fb.safetensors", "1.900/c.safetensors", "2.7/a%2Fb.safetensors"]


async def test_directory_and_state_go_together() -> None:
    service = ScriptedSynchronizer(make_settings())
    with pytest.raises(UsageError, match="together"):
        make_learner(service, make_model(), snapshots=SnapshotDirectory(Path()))
