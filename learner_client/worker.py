"""The background work of a learner: joins, reports, watches, pushes, and comes back when cut off.

One event loop does it all: in a thread of its own beside a training loop (``start_thread``), or in
a running loop (``run``), where many learners share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2
from decoupled_diloco.versions import Incarnation
from decoupled_diloco.wire import incarnation_to
from learner_client.admission import Admission
from learner_client.checkpoint import SavedState
from learner_client.core.connection import Event, State, left_out
from learner_client.core.learner_core import PullRequest
from learner_client.core.retry import REJOIN, Backoff, is_fatal
from learner_client.exchange import Exchange
from learner_client.grants import Grant
from learner_client.inner_work import InnerWork
from learner_client.leaders import LeaderSearch
from learner_client.leaser import Leaser
from learner_client.link import Identity, Link
from learner_client.parameters import Parameters
from learner_client.pusher import Pusher
from learner_client.runtime import Runtime
from learner_client.snapshots import write_parts
from learner_client.tasks import cancel, together
from learner_client.watcher import Watcher

_LOG = logging.getLogger("learner_client")

_LEAVE_S: Final = 3.0
_MAX_DECLINES: Final = 64
_NUM_THREADS: Final = 2
_ENDED: Final = frozenset({State.FENCED, State.REFUSED, State.FINISHED})


class Worker:
    """Keeps one learner connected.

    Args:
        exchange: shared with the training thread.
        parameters: the model, read here only for the first parameters of a run.
        identity: who this learner is.
        search: the way to the synchronizer that leads.
        runtime: time, chance and threads.
        saved: state to go on from.
        inner: recovers from peers and gives to them.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        parameters: Parameters,
        identity: Identity,
        search: LeaderSearch,
        runtime: Runtime | None = None,
        saved: SavedState | None = None,
        inner: InnerWork,
    ) -> None:
        self._exchange = exchange
        self._parameters = parameters
        self._identity = identity
        self._search = search
        self._runtime = runtime or Runtime()
        self._saved = saved
        self._inner = inner
        self._backoff = Backoff()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._captured = asyncio.Event()
        self._stop_reason = ""
        self._declines: deque[synchronizer_pb2.PullDeclined] = deque(maxlen=_MAX_DECLINES)
        self._seeded: Incarnation | None = None
        self._turn: object | None = None
        self._session_failure: asyncio.Future[None] | None = None

    # -- from the training thread ----------------------------------------------------------

    def start_thread(self) -> None:
        """Starts the background thread."""
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run_in_thread()), name="diloco-learner", daemon=True
        )
        self._thread.start()

    def wake(self) -> None:
        """There is something to report. Waits for nothing."""
        self._call_soon(self._wake.set)

    def part_captured(self) -> None:
        """There is a part of a snapshot to write. Waits for nothing."""
        self._call_soon(self._captured.set)

    def stop(self, reason: str) -> None:
        """Asks the background work to say goodbye and end. Waits for nothing."""
        self._stop_reason = reason
        self._call_soon(self._stop.set)

    def join_thread(self, timeout_s: float) -> bool:
        """Waits for the thread to end; returns whether it did."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _call_soon(self, callback: Callable[[], None]) -> None:
        loop = self._loop
        if loop is None:
            # Not running yet: it looks at both events as soon as it is.
            callback()
            return
        # A loop that has ended has nobody to wake.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback)

    # -- in the event loop -----------------------------------------------------------------

    async def _run_in_thread(self) -> None:
        """As ``run``; tensor work gets few threads, since the cores belong to the training."""
        pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="diloco-learner")
        asyncio.get_running_loop().set_default_executor(pool)
        await self.run()

    async def run(self) -> None:
        """Does the background work until it is stopped or nothing is left to do."""
        self._loop = asyncio.get_running_loop()
        link = Link(
            identity=self._identity,
            exchange=self._exchange,
            parameters=self._parameters,
            transport=self._search.transport,
            runtime=self._runtime,
        )
        work = self._loop.create_task(self._serve(link))
        stop = self._loop.create_task(self._stop.wait())
        parts = self._loop.create_task(
            write_parts(
                link.exchange.snapshots, self._identity.learner_id, self._captured, link.runtime
            )
        )
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(work, stop, parts)
            await self._leave(link)
            await link.transport.aclose()
            self._exchange.ended()

    async def _serve(self, link: Link) -> None:
        """Connects again and again; ends where the learner is fenced, refused or finished.

        A learner that trains keeps its incarnation and opens its streams anew; it joins again only
        when told to, so that it cannot take its id back from a process that fenced it. Where
        another synchronizer leads by now, it goes there first.
        """
        saved = {} if self._saved is None else self._saved.published
        watcher = Watcher(link, saved)
        pusher = Pusher(link, self._fail_session)
        search, admission = self._search, Admission(link, self._search, self._saved)
        search.relay = admission.relay
        self._inner.begin(link, lambda: watcher.versions)
        grant = None
        leaser = Leaser(link)
        self._exchange.data.on_want = lambda: self._call_soon(leaser.wanted.set)
        try:
            while self._exchange.connection.state not in _ENDED:
                try:
                    await search.settle()
                    if grant is None:
                        grant = await admission.join(watcher.versions)
                    await self._session(link, grant, watcher, pusher, leaser)
                except DilocoError as caught:
                    error = search.judged(caught)
                    if error.reason is Reason.LEASE_LOST:
                        self._exchange.leases_lost()
                    if is_fatal(error):
                        self._exchange.failed(error)
                        return
                    if error.reason in REJOIN or not self._exchange.synced.done():
                        grant = None
                    if error.reason not in REJOIN:
                        self._exchange.lost(error)
                    pause_s = self._backoff.failed(self._runtime.rng.random())
                    await self._runtime.sleep(search.pause_s(pause_s))
        except Exception as error:
            _LOG.exception("%s: the background work failed", self._identity.learner_id)
            self._exchange.failed(
                DilocoError(Reason.INTERNAL, f"{type(error).__name__}: {error}; see the log")
            )
        finally:
            await self._inner.aclose()
            await pusher.aclose()

    async def _session(
        self, link: Link, grant: Grant, watcher: Watcher, pusher: Pusher, leaser: Leaser
    ) -> None:
        """One connection, from the answer to a Join until it is lost."""
        self._declines.clear()
        pusher.keep_only(grant)
        if grant.seed and self._seeded != grant.incarnation:
            await self._seed(grant, watcher, pusher)
            self._seeded = grant.incarnation
        self._session_failure = asyncio.get_running_loop().create_future()
        streams = (
            self._until_lost(self._report(link, grant, pusher)),
            self._until_lost(watcher.run(grant)),
            self._until_lost(self._inner.recover(grant)),
            self._until_lost(_wait_for(self._session_failure)),
            self._until_lost(
                self._search.keep_watch(grant.settings.lease_timeout_s, self._progress)
            ),
            self._until_lost(leaser.run(grant)),
        )
        await together(*streams)

    def _progress(self) -> tuple[bool, int]:
        """Whether news may come, and how many did."""
        connection = self._exchange.connection
        may_come = connection.online and connection.state is not State.FINISHED
        return may_come, self._exchange.tally.num_updates

    def _fail_session(self, error: DilocoError) -> None:
        failure = self._session_failure
        if failure is not None and not failure.done():
            failure.set_exception(error)

    async def _until_lost(self, stream: Coroutine[Any, Any, None]) -> None:
        """Runs a stream; once the run is complete, its end is no loss."""
        try:
            await stream
        except DilocoError:
            if self._exchange.connection.state is not State.FINISHED:
                raise

    async def _seed(self, grant: Grant, watcher: Watcher, pusher: Pusher) -> None:
        layout = self._exchange.layout
        assert layout is not None, "joined"
        for fragment in layout.fragments:
            # Before training the model is nobody's but ours; after, only what was applied counts.
            vector = watcher.vector(fragment.index)
            if vector is None:
                vector = self._exchange.bases.get(fragment.index)
            if vector is None:
                vector = torch.empty(fragment.num_elements, dtype=torch.float32)
                self._parameters.read_fragment(fragment, vector)
            if not await pusher.seed(fragment.index, vector, grant):
                break
        self._exchange.happened(Event.SEEDED)

    async def _report(self, link: Link, grant: Grant, pusher: Pusher) -> None:
        """The report stream, both ways."""
        self._turn = turn = object()
        requests = self._report_requests(link, grant, turn)
        try:
            async with contextlib.aclosing(link.transport.report(requests)) as responses:
                try:
                    async for response in responses:
                        self._backoff.succeeded()
                        self._exchange.connected()
                        self._heard(response, grant, pusher)
                finally:
                    # A transport may ask for one more request after the call has ended.
                    self._turn = None
        finally:
            # What was taken and could not be sent is given back; where the transport still waits
            # for a request, nothing was.
            with contextlib.suppress(RuntimeError):
                await requests.aclose()
        raise DilocoError(Reason.UNAVAILABLE, "the synchronizer ended the report stream")

    def _heard(
        self, response: synchronizer_pb2.ReportResponse, grant: Grant, pusher: Pusher
    ) -> None:
        kind = response.WhichOneof("kind")
        if kind == "pull":
            self._pulled(response.pull, grant, pusher)
        elif kind == "schedule":
            schedule = response.schedule
            self._exchange.scheduled(schedule.global_step, tuple(schedule.due_fragments))
        elif kind == "drain":
            self._exchange.happened(Event.DRAIN, "drain", response.drain.reason)
        elif kind == "stop":
            self._exchange.happened(Event.STOP, "complete", response.stop.reason)
        elif kind == "snapshot":
            self._exchange.snapshots.noticed(
                grant.term, response.snapshot.global_step, over=response.snapshot.over
            )
        elif kind == "quarantine":
            told = response.quarantine
            if told.reason or self._exchange.connection.reason == Reason.QUARANTINED:
                self._exchange.waits(*left_out(told.reason, told.seconds))
        elif kind == "donate":
            self._inner.asked(response.donate, grant)
        elif kind == "not_leading":
            self._search.heard(response.not_leading.claim, response.not_leading.addresses)
            raise DilocoError(
                Reason.NOT_LEADING, "the synchronizer does not lead; the leader is looked for"
            )

    def _pulled(self, message: synchronizer_pb2.Pull, grant: Grant, pusher: Pusher) -> None:
        pull = PullRequest(
            term=message.term,
            group=message.group,
            global_step=message.global_step,
            fragment=message.fragment,
        )
        reason = pusher.pulled(pull, grant)
        if reason is not None:
            self._declines.append(
                synchronizer_pb2.PullDeclined(
                    global_step=pull.global_step, fragment=pull.fragment, reason=reason
                )
            )
            self._wake.set()

    async def _report_requests(
        self, link: Link, grant: Grant, turn: object
    ) -> AsyncGenerator[synchronizer_pb2.ReportRequest, None]:
        yield synchronizer_pb2.ReportRequest(
            hello=synchronizer_pb2.ReportHello(
                learner_id=self._identity.learner_id,
                incarnation=incarnation_to(grant.incarnation),
                clock=link.clock(),
            )
        )
        if grant.term != self._search.leadership.term:
            # An earlier leader's grant: about to be refused, and a report would be lost with it.
            await self._runtime.sleep(grant.settings.heartbeat_interval_s)
        while self._turn is turn:
            self._wake.clear()
            while self._declines:
                declined = self._declines.popleft()
                yield synchronizer_pb2.ReportRequest(pull_declined=declined)
            for name, reason in self._exchange.snapshots.take_missing():
                if name.term == grant.term:
                    missing = synchronizer_pb2.PartMissing(
                        global_step=name.global_step, reason=reason
                    )
                    yield synchronizer_pb2.ReportRequest(part_missing=missing)
            report = self._exchange.take_report()
            if report is not None:
                is_sent = False
                try:
                    yield synchronizer_pb2.ReportRequest(inner_step=link.inner_step(report))
                    is_sent = True
                finally:
                    if not is_sent:
                        self._exchange.give_back(report)
                        self._wake.set()
                continue
            try:
                async with self._runtime.limit(grant.settings.heartbeat_interval_s):
                    await self._wake.wait()
            except TimeoutError:
                if self._turn is not turn:
                    return
                heartbeat = synchronizer_pb2.Heartbeat(clock=link.clock())
                yield synchronizer_pb2.ReportRequest(heartbeat=heartbeat)

    async def _leave(self, link: Link) -> None:
        """Says goodbye, so that nobody waits; a synchronizer that is away is not waited for."""
        grant, state = self._exchange.grant, self._exchange.connection.state
        if grant is not None and state not in (State.FENCED, State.REFUSED):
            request = synchronizer_pb2.LeaveRequest(
                learner_id=self._identity.learner_id,
                incarnation=incarnation_to(grant.incarnation),
                reason=self._stop_reason,
                clock=link.clock(),
            )
            with contextlib.suppress(DilocoError, TimeoutError):
                async with self._runtime.limit(_LEAVE_S):
                    await link.transport.leave(request)
        self._exchange.happened(Event.LEAVE, "left", self._stop_reason)


async def _wait_for(future: asyncio.Future[None]) -> None:
    await future
