"""Carries out what the core decides about snapshots: pins, manifests, notices, answers."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Final

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.snapshots import SnapshotName
from decoupled_diloco.v1 import admin_pb2, types_pb2
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.versions import Incarnation
from synchronizer_server.core import effects as fx
from synchronizer_server.core import events as ev
from synchronizer_server.parts import Parts
from synchronizer_server.store.manifest import Manifest

logger = logging.getLogger(__name__)

_MAX_REQUESTS: Final = 1024


class SnapshotDesk:
    """The snapshots' work beside the event loop, and who asks for them.

    Args:
        parts: what the engine is made of.
        handle: feeds the core.
        send_all: tells every connected learner.
        spawn: runs something beside.

    Attributes:
        num_complete: snapshots completed in this term.
        num_failed: snapshots that failed in it.
        complete: the newest complete one; None before the first.
        complete_since: since when there is that one, or this term, seconds.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        handle: Callable[[ev.Event], object],
        send_all: Callable[[pb.ReportResponse], None],
        spawn: Callable[[Coroutine[object, object, None]], None],
    ) -> None:
        self._parts = parts
        self._handle = handle
        self._send_all = send_all
        self._spawn = spawn
        self._requests: OrderedDict[str, asyncio.Future[SnapshotName]] = OrderedDict()
        self._pinned: asyncio.Future[None] | None = None
        self._versions: tuple[str, ...] = ()
        self.num_complete = self.num_failed = 0
        self.complete: SnapshotName | None = None
        self.complete_since = parts.clock()
        self._last: fx.EndSnapshot | None = None

    def start(self, complete: Sequence[Manifest]) -> None:
        """Takes the complete snapshots that the store has."""
        self.complete = complete[-1].name if complete else None

    # -- who asks and who answers ------------------------------------------------------------------

    async def take(self, request_id: str) -> SnapshotName:
        """Begins a snapshot with the next round that is committed; returns its name.

        A repeated request names the same snapshot.

        Raises:
            DilocoError: ``SNAPSHOT_FAILED`` where no round will be committed any more.
        """
        future = self._requests.get(request_id)
        if future is None:
            state = self._parts.core.state
            if state.finished or state.draining:
                raise _no_more()
            future = asyncio.get_running_loop().create_future()
            # Where nobody waits for the answer any more, nobody misses its failure.
            future.add_done_callback(lambda done: done.exception())
            self._requests[request_id] = future
            while len(self._requests) > _MAX_REQUESTS:
                _, oldest = self._requests.popitem(last=False)
                if not oldest.done():
                    oldest.set_exception(_too_many())
            self._handle(ev.SnapshotWanted())
        return await asyncio.shield(future)

    def heard(self, learner_id: str, incarnation: Incarnation, clock: types_pb2.Clock) -> None:
        """Reads a learner's clock: it may be the return marker."""
        core = self._parts.core
        pending = core.snapshots.pending
        if pending is None or clock.term != core.state.term:
            return
        if clock.snapshot == pending.global_step and learner_id in pending.awaited:
            self._handle(
                ev.SnapshotRecorded(
                    learner_id=learner_id, incarnation=incarnation, global_step=clock.snapshot
                )
            )

    def close(self) -> None:
        """No round is committed any more: whoever waits for a cut is told."""
        for future in self._requests.values():
            if not future.done():
                future.set_exception(_no_more())

    def status(self) -> admin_pb2.SnapshotStatus:
        """The newest snapshots as a message."""
        pending, last = self._parts.core.snapshots.pending, self._last
        return admin_pb2.SnapshotStatus(
            complete=str(self.complete or ""),
            pending=str(self._name(pending.global_step)) if pending is not None else "",
            awaited=sorted(pending.awaited) if pending is not None else (),
            last=str(self._name(last.global_step)) if last is not None else "",
            participants=last.participants if last is not None else (),
            left_out=last.left_out if last is not None else {},
            failure=last.failure if last is not None else "",
        )

    # -- effects -----------------------------------------------------------------------------------

    def carry_out(self, effect: fx.BeginSnapshot | fx.KeepSnapshot | fx.EndSnapshot) -> None:
        """Carries out an effect."""
        match effect:
            case fx.BeginSnapshot():
                self._begin(effect)
            case fx.KeepSnapshot():
                self._spawn(self._keep(effect))
            case fx.EndSnapshot():
                self._end(effect)

    def _name(self, global_step: int) -> SnapshotName:
        return SnapshotName(self._parts.core.state.term, global_step)

    def _begin(self, effect: fx.BeginSnapshot) -> None:
        name = self._name(effect.global_step)
        committer = self._parts.committer
        self._versions = tuple(str(version) for version in committer.updates.versions())
        # Queued at once: it must be ahead of the commit of the next round.
        self._pinned = committer.store_runner.submit(lambda: committer.store.pin(name))
        self._spawn(self._watch_pin(effect.global_step, self._pinned))
        self._notify(effect.global_step, over=False)
        for future in self._requests.values():
            if not future.done():
                future.set_result(name)
        logger.info("snapshot %s begins, for %s", name, ", ".join(effect.awaited) or "nobody")
        self._parts.journal.write(
            "snapshot_begun", snapshot=str(name), awaited=list(effect.awaited)
        )

    async def _watch_pin(self, global_step: int, pinned: asyncio.Future[None]) -> None:
        try:
            await asyncio.shield(pinned)
        except DilocoError as error:
            self._handle(ev.SnapshotFailed(global_step=global_step, message=error.message))

    async def _keep(self, effect: fx.KeepSnapshot) -> None:
        settings, committer = self._parts.settings, self._parts.committer
        manifest = Manifest(
            name=self._name(effect.global_step),
            run_id=settings.run_id,
            group=0,
            versions=self._versions,
            participants=effect.recorded,
            left_out=effect.left_out,
        )
        assert self._pinned is not None, "begun before it is kept"
        try:
            await asyncio.shield(self._pinned)
            await committer.store_runner.submit(
                lambda: committer.store.keep_snapshot(manifest, settings.keep_snapshots)
            )
        except DilocoError as error:
            self._handle(ev.SnapshotFailed(global_step=effect.global_step, message=error.message))
        else:
            self._handle(ev.SnapshotKept(global_step=effect.global_step))

    def _end(self, effect: fx.EndSnapshot) -> None:
        name = self._name(effect.global_step)
        self._last = effect
        if effect.failure:
            self.num_failed += 1
            logger.warning("snapshot %s failed: %s", name, effect.failure)
            self._spawn(self._drop(name))
        else:
            self.complete, self.complete_since = name, self._parts.clock()
            self.num_complete += 1
            out = "; ".join(f"{k}: {v}" for k, v in effect.left_out.items())
            logger.info(
                "snapshot %s is complete, of %s%s",
                name,
                ", ".join(effect.participants),
                f"; left out {out}" if out else "",
            )
        self._notify(effect.global_step, over=True)
        self._parts.journal.write(
            "snapshot_failed" if effect.failure else "snapshot",
            snapshot=str(name),
            participants=list(effect.participants),
            left_out=dict(effect.left_out),
            reason=effect.failure,
        )

    async def _drop(self, name: SnapshotName) -> None:
        committer = self._parts.committer
        try:
            await committer.store_runner.submit(lambda: committer.store.drop_snapshot(name))
        except DilocoError as error:
            logger.warning("snapshot %s could not be removed yet: %s", name, error.message)

    def _notify(self, global_step: int, *, over: bool) -> None:
        notice = pb.SnapshotNotice(global_step=global_step, over=over)
        self._send_all(pb.ReportResponse(snapshot=notice))


def _too_many() -> DilocoError:
    return DilocoError(
        Reason.SNAPSHOT_FAILED,
        f"more than {_MAX_REQUESTS} later requests wait for the next round, too; ask again once "
        "rounds are committed",
    )


def _no_more() -> DilocoError:
    return DilocoError(
        Reason.SNAPSHOT_FAILED,
        "no round is committed any more, so there is no cut to take; the store is durable: "
        "resume from it",
    )
