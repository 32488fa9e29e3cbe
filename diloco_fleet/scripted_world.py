"""The world of a scripted fleet: time, connections, a synchronizer's lives and its store.

Virtual time is an event loop whose clock moves only when nothing is left to do at this moment.
What runs in it is the code that ships, with its real timers; an hour of heartbeats and back-offs
passes in no time, and the order in which things happen depends on nothing outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.v1 import admin_pb2
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from learner_client.transport import InMemoryTransport
from synchronizer_server.assembly import Outside, assemble
from synchronizer_server.core import events as ev
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.engine import Engine
from synchronizer_server.membership.memory import MemoryMembership
from synchronizer_server.merge.fragment_state import FragmentState
from synchronizer_server.runner import InlineRunner
from synchronizer_server.service.admin import AdminService
from synchronizer_server.service.synchronizer import SynchronizerService
from synchronizer_server.store.memory import MemoryStore

T = TypeVar("T")

_MAX_STAGED_BYTES: Final = 64 << 20
_MAX_TURNS: Final = 1_000_000
"""Turns of the loop without a moment of rest; beyond, something runs in circles."""


class _RestlessSelector(selectors.DefaultSelector):
    """Never waits: where the loop would, it says for how long instead."""

    on_rest: Callable[[float | None], None] | None = None
    num_turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Returns what is ready now; the loop wakes itself through a socket pair of its own."""
        events = super().select(0)
        if events or timeout == 0:
            self.num_turns += 1
            if self.num_turns > _MAX_TURNS:
                self.num_turns = 0
                raise RuntimeError(
                    f"{_MAX_TURNS} turns without a moment of rest: something runs in circles"
                )
            return events
        self.num_turns = 0
        if self.on_rest is not None:
            self.on_rest(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, seconds from 0.

    The loop rests when nothing is ready. Whoever waits in ``settle`` goes on then; only where
    nobody does, the clock jumps to the next timer.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._settling: list[asyncio.Future[None]] = []
        selector = _RestlessSelector()
        super().__init__(selector)
        selector.on_rest = self._rest

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    async def settle(self) -> None:
        """Waits until nothing is ready any more; no time passes."""
        settled = self.create_future()
        self._settling.append(settled)
        await settled

    async def advance(self, seconds: float) -> None:
        """Lets time pass, every timer in its turn, and settles."""
        await asyncio.sleep(seconds)
        await self.settle()

    def _rest(self, timeout: float | None) -> None:
        if self._settling:
            for settled in self._settling:
                if not settled.done():
                    settled.set_result(None)
            self._settling.clear()
        elif timeout is None:
            raise RuntimeError("everything waits, and no timer is set: nothing can happen any more")
        else:
            self._now += timeout


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in a virtual loop of its own and closes it."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def virtual_loop() -> VirtualLoop:
    """The running loop, which must be virtual."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "runs in virtual time only"
    return loop


class KeepingStore(MemoryStore):
    """A store that remembers every record committed: the lineage of the whole run.

    Attributes:
        records: in order of their commits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[RoundRecord] = []

    def commit(
        self, record: RoundRecord, fragments: Mapping[int, FragmentState], *, force: bool = False
    ) -> None:
        """See ``RoundStore.commit``."""
        super().commit(record, fragments, force=force)
        self.records.append(record)


class _MortalRunner(InlineRunner):
    """Runs every job at once; after the death of its process none ever ends."""

    def __init__(self) -> None:
        self.is_dead = False

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """See ``Runner``."""
        if self.is_dead:
            return asyncio.get_running_loop().create_future()
        return super().submit(job)


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronizerLife:
    """One process of the synchronizer, from its start to its end.

    Attributes:
        engine: the engine.
        service: what learners call.
        admin: what people call.
    """

    engine: Engine
    service: SynchronizerService
    admin: AdminService
    _runner: _MortalRunner

    @classmethod
    async def start(
        cls, settings: RunSettings, store: MemoryStore, clock: Callable[[], float]
    ) -> SynchronizerLife:
        """Assembles it on a store and starts its timer.

        Raises:
            DilocoError: as ``assemble``.
        """
        runner = _MortalRunner()
        outside = Outside(
            store=store,
            membership=MemoryMembership(clock),
            tensors_runner=runner,
            store_runner=runner,
            clock=clock,
        )
        assembled = await assemble(settings, outside, max_staged_bytes=_MAX_STAGED_BYTES)
        assembled.engine.spawn(assembled.engine.run_timer())
        return cls(
            engine=assembled.engine,
            service=SynchronizerService(assembled.engine, assembled.joins),
            admin=AdminService(assembled.engine, assembled.joins),
            _runner=runner,
        )

    async def drain(self, limit_s: float) -> None:
        """Finishes the rounds in flight, as on SIGTERM."""
        self.engine.handle(ev.DrainStarted())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.engine.complete.wait(), limit_s)

    def sever(self) -> None:
        """Nothing that it still does reaches store or tensors, as after ``kill -9``."""
        self._runner.is_dead = True

    async def close(self) -> None:
        """Ends what runs beside and all streams."""
        await self.engine.close()


@dataclass(slots=True)
class Address:
    """Where learners find the synchronizer; nobody is there between two lives."""

    life: SynchronizerLife | None = None


class Line:
    """A learner's connection to whoever is at an address; see ``Transport``.

    Args:
        address: where it leads.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._life: SynchronizerLife | None = None
        self._calls: InMemoryTransport | None = None
        self._is_cut = False

    async def drop(self) -> None:
        """Breaks every call under way; new calls reach whoever is there then."""
        calls, self._calls, self._life = self._calls, None, None
        if calls is not None:
            await calls.aclose()

    async def cut(self) -> None:
        """Breaks every call under way; nothing passes any more."""
        self._is_cut = True
        await self.drop()

    async def get_run(self, request: admin_pb2.GetRunRequest) -> admin_pb2.GetRunResponse:
        """See ``Transport``."""
        return await self._open().get_run(request)

    async def join(self, request: pb.JoinRequest) -> pb.JoinResponse:
        """See ``Transport``."""
        return await self._open().join(request)

    def report(
        self, requests: AsyncIterator[pb.ReportRequest]
    ) -> AsyncGenerator[pb.ReportResponse, None]:
        """See ``Transport``."""
        return self._open().report(requests)

    async def push(self, requests: AsyncIterator[pb.PushRequest]) -> pb.PushResponse:
        """See ``Transport``."""
        return await self._open().push(requests)

    def watch(self, request: pb.WatchRequest) -> AsyncGenerator[pb.WatchResponse, None]:
        """See ``Transport``."""
        return self._open().watch(request)

    async def lease_data(self, request: pb.LeaseDataRequest) -> pb.LeaseDataResponse:
        """See ``Transport``."""
        return await self._open().lease_data(request)

    async def leave(self, request: pb.LeaveRequest) -> pb.LeaveResponse:
        """See ``Transport``."""
        return await self._open().leave(request)

    async def aclose(self) -> None:
        """See ``Transport``."""
        await self.drop()

    def _open(self) -> InMemoryTransport:
        life = self._address.life
        if life is None or self._is_cut:
            raise DilocoError(Reason.UNAVAILABLE, "nobody answers at the synchronizer's address")
        if self._calls is None or self._life is not life:
            self._life, self._calls = life, InMemoryTransport(life.service, life.admin)
        return self._calls
