"""A whole fleet in one process, one event loop and virtual time, driven by a schedule.

Synchronizer, learners, models and optimizer are the ones that ship; only what lies between them is
replaced: the in-memory transport for the network, the inline runner for threads, the in-memory
store and membership for disk and Redis, virtual time for the clock: schedule and seed decide all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Final

import torch

from decoupled_diloco.errors import Reason, UsageError
from diloco_fleet.scripted_data import (
    Action,
    Advance,
    FleetResult,
    GoBack,
    Join,
    Kill,
    LearnerResult,
    Leave,
    Resume,
    StartSynchronizer,
    Step,
    StopSynchronizer,
    TakeSnapshot,
    collect,
)
from diloco_fleet.scripted_learner import FleetSpec, ScriptedLearner
from diloco_fleet.scripted_world import (
    Address,
    KeepingStore,
    Line,
    SynchronizerLife,
    run_in_virtual_time,
    virtual_loop,
)
from learner_client.snapshots import SnapshotDirectory
from synchronizer_server.core import events as ev
from synchronizer_server.going_back import LATEST, choose, go_back

_DRAIN_S: Final = 10.0
_COME_BACK_S: Final = 60


class ScriptedFleet:
    """A fleet that does what it is told; see ``scripted_fleet`` and ``run_fleet``.

    Args:
        spec: what the fleet is.

    Attributes:
        store: what survives the synchronizer.
        learners: learners that are there, by index.
        synchronizer: the synchronizer, while there is one.
    """

    def __init__(self, spec: FleetSpec) -> None:
        self.spec = spec
        self.store = KeepingStore()
        self.learners: dict[int, ScriptedLearner] = {}
        self._address = Address()
        self._lines: list[Line] = []
        self._lives: list[SynchronizerLife] = []
        self._past: list[LearnerResult] = []
        self._num_lives: dict[int, int] = {}
        self._joining: dict[int, tuple[ScriptedLearner, asyncio.Task[None]]] = {}

    @property
    def synchronizer(self) -> SynchronizerLife | None:
        """The synchronizer, while there is one."""
        return self._address.life

    async def apply(self, action: Action) -> None:
        """Does one thing and settles: returns when nothing is left to do at this moment.

        Raises:
            UsageError: CONFIG_INVALID where that cannot be done now.
            DilocoError: what ended a learner or the synchronizer.
        """
        match action:
            case Join():
                await self._join(action.learner)
            case Step():
                self._at(action.learner).step()
            case Leave():
                await self._end(action.learner, silently=False)
            case Kill():
                await self._end(action.learner, silently=True)
            case Advance():
                await virtual_loop().advance(action.seconds)
            case StopSynchronizer():
                await self._stop(drain=action.drain)
            case StartSynchronizer():
                await self._start()
            case TakeSnapshot():
                self._running().engine.handle(ev.SnapshotWanted())
            case GoBack():
                go_back(self.store, LATEST)
            case Resume():
                await self._join(action.learner, self._part(action.learner))
        await virtual_loop().settle()
        self._arrived()
        life = self._address.life
        if life is not None and life.engine.failure is not None:
            raise life.engine.failure

    async def finish(self) -> FleetResult:
        """Drains the synchronizer, applies what it published, and says what there is.

        Learners that were cut off get time to come back. Every learner takes one more inner step,
        at whose boundary the last updates land.
        """
        life = self._running()
        for _ in range(_COME_BACK_S):
            if all(x.learner.status.online for x in self.learners.values()):
                break
            await virtual_loop().advance(1.0)
        await life.drain(_DRAIN_S)
        await virtual_loop().settle()
        for scripted in self.learners.values():
            scripted.step()
        await virtual_loop().settle()
        lives = [self._read(index) for index in sorted(self.learners)]
        return collect(
            self.store.records,
            [*self._past, *lives],
            [x.engine.ledger for x in self._lives],
            life.engine,
        )

    async def close(self) -> None:
        """Ends everything."""
        for index in list(self._joining):
            await self._give_up(index)
        for index in list(self.learners):
            await self.learners.pop(index).leave()
        if self._address.life is not None:
            await self._stop(drain=False)

    # -- synchronizer ----------------------------------------------------------------------

    async def _start(self) -> None:
        if self._address.life is not None:
            raise _impossible("the synchronizer runs already")
        life = await SynchronizerLife.start(self.spec.settings, self.store, virtual_loop().time)
        self._lives.append(life)
        self._address.life = life

    async def _stop(self, *, drain: bool) -> None:
        life = self._running()
        if drain:
            await life.drain(_DRAIN_S)
            await life.close()
        else:
            life.sever()
        self._address.life = None
        await asyncio.gather(*(line.drop() for line in self._lines))
        await life.close()

    def _running(self) -> SynchronizerLife:
        if self._address.life is None:
            raise _impossible("there is no synchronizer; start it first")
        return self._address.life

    # -- learners --------------------------------------------------------------------------

    def _at(self, index: int) -> ScriptedLearner:
        if index not in self.learners:
            raise _impossible(f"learner {index} is not there; let it join first")
        return self.learners[index]

    def _part(self, index: int) -> Path:
        assert self.spec.snapshots is not None, "there is a directory for snapshots"
        parts, newest = (
            SnapshotDirectory(self.spec.snapshots),
            choose(self.store.snapshots(), LATEST),
        )
        return parts.part(newest.name, f"learner-{index}")

    async def _join(self, index: int, part: Path | None = None) -> None:
        self._running()
        if index in self.learners or index in self._joining:
            raise _impossible(f"learner {index} is there already; kill it first")
        life = self._num_lives[index] = self._num_lives.get(index, 0) + 1
        scripted = ScriptedLearner(self.spec, index, life, self._address)
        self._lines.append(scripted.line)
        task = virtual_loop().create_task(scripted.join(part))
        self._joining[index] = (scripted, task)
        if self.spec.recover == "params":
            await asyncio.wait((task,))  # nobody else has to do anything for it

    def _arrived(self) -> None:
        """Learners that have joined meanwhile are there.

        Raises:
            DilocoError: why one could not join.
        """
        for index, (scripted, task) in list(self._joining.items()):
            if task.done():
                del self._joining[index]
                task.result()
                self.learners[index] = scripted

    async def _give_up(self, index: int) -> None:
        """A learner that is joining is gone."""
        scripted, task = self._joining.pop(index)
        await scripted.line.cut()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._lines.remove(scripted.line)

    async def _end(self, index: int, *, silently: bool) -> None:
        if index in self._joining and silently:
            await self._give_up(index)
            return
        scripted = self._at(index)
        self._past.append(self._read(index, ended=True))
        del self.learners[index]
        await (scripted.kill() if silently else scripted.leave())
        self._lines.remove(scripted.line)

    def _read(self, index: int, *, ended: bool = False) -> LearnerResult:
        scripted = self.learners[index]
        return LearnerResult.read(
            scripted.learner,
            scripted.model,
            learner_id=scripted.learner_id,
            is_present=not ended,
            losses=tuple(scripted.losses),
            changes=tuple(scripted.changes),
        )


@contextlib.asynccontextmanager
async def scripted_fleet(spec: FleetSpec) -> AsyncIterator[ScriptedFleet]:
    """A fleet with its synchronizer started, in a virtual loop; ended on leaving."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of several threads have no fixed order
    fleet = ScriptedFleet(spec)
    try:
        await fleet.apply(StartSynchronizer())
        yield fleet
    finally:
        await fleet.close()
        torch.set_num_threads(num_threads)


def run_fleet(spec: FleetSpec, schedule: Iterable[Action]) -> FleetResult:
    """Plays a schedule from beginning to end.

    Raises:
        UsageError: CONFIG_INVALID for a schedule that cannot be, with the number of the action.
        DilocoError: what ended a learner or the synchronizer.
    """

    async def main() -> FleetResult:
        async with scripted_fleet(spec) as fleet:
            for number, action in enumerate(schedule, start=1):
                try:
                    await fleet.apply(action)
                except UsageError as error:
                    raise UsageError(
                        error.reason, f"action {number} of the schedule: {error.message}"
                    ) from error
            return await fleet.finish()

    return run_in_virtual_time(main())


def _impossible(why: str) -> UsageError:
    return UsageError(Reason.CONFIG_INVALID, why)
