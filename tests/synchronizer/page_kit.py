"""The status page of a synchronizer in this process, and somebody who looks at it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from synchronizer_server.http.application import Limits
from synchronizer_server.http.facts import Sources
from synchronizer_server.http.history import History
from synchronizer_server.http.listener import StatusPage
from synchronizer_server.metrics import Exposition, Metrics, Source, source_of
from synchronizer_server.service.admin import AdminService
from synchronizer_server.service.switchboard import Switchboard
from synchronizer_server.service.synchronizer import SynchronizerService
from tests.synchronizer.fake_learner import PATIENCE_S, Fleet, serving, until
from tests.synchronizer.node_kit import Process, keeping

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOMENT_S = 0.02
"""Pause between two looks of a page in a test."""


class Viewer:
    """Somebody with a browser of no kind.

    Attributes:
        board: what is looked at, where it is a fleet.
    """

    def __init__(
        self, session: aiohttp.ClientSession, open_page: Callable[[str], StatusPage]
    ) -> None:
        self.board = Switchboard()
        self.session = session
        self._open_page = open_page
        self.page = open_page("127.0.0.1:0")

    @contextlib.asynccontextmanager
    async def reopened(self) -> AsyncIterator[None]:
        """The page once more, on the port of the one that was stopped."""
        self.page = self._open_page(str(self.page.address))
        await self.page.start()
        try:
            yield
        finally:
            await self.page.stop()

    def ask(self, path: str = "", method: str = "GET", **more: Any) -> Any:
        return self.session.request(method, self.page.url + path, **more)

    async def get(self, path: str = "", method: str = "GET", **more: Any) -> tuple[int, str]:
        async with self.ask(path, method, **more) as answer:
            return answer.status, await answer.text()

    async def facts(self) -> dict[str, Any]:
        status, text = await self.get("status.json")
        assert status == 200, text
        return json.loads(text)

    async def facts_when(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The first facts that fulfil a condition."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                facts = await self.facts()
                if condition(facts):
                    return facts


async def messages(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """What a stream of /events tells."""
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


@contextlib.asynccontextmanager
async def looking_at(
    sources: Sources, *, is_serving: Callable[[], bool] = lambda: True, **limits: float
) -> AsyncIterator[Viewer]:
    bounds = Limits(**({"pause_s": MOMENT_S} | limits))
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        viewer = Viewer(
            session,
            lambda address: StatusPage(address, sources, is_serving=is_serving, limits=bounds),
        )
        await viewer.page.start()
        try:
            yield viewer
        finally:
            await viewer.page.stop()


def no_metrics() -> Callable[[], Exposition]:
    return lambda: (b"up 1\n", METRICS_TYPE)


def sources_of(source: Switchboard | Source, history: History, store: Path, **more: Any) -> Sources:
    values: dict[str, Any] = {
        "address": "127.0.0.1:50051", "peers": (), "durability": "disk", "redis": None,
        "leadership": None, "metrics": no_metrics,
    }  # fmt: skip
    if isinstance(source, Switchboard):
        source = Source(status=source.status)
    return Sources(source=source, history=history, store=store, **(values | more))


@contextlib.asynccontextmanager
async def shown(
    store: Path,
    *,
    limits: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> AsyncIterator[tuple[Fleet, Viewer]]:
    """A fleet with a page."""
    history, board = History(), Switchboard()
    async with serving(on_event=history.take, **changes) as fleet:
        board.lead(
            SynchronizerService(fleet.engine, fleet.joins),
            AdminService(fleet.engine, fleet.joins),
            None,
        )
        source = Source(status=board.status, engine=lambda: fleet.engine)
        sources = sources_of(source, history, store, metrics=Metrics(source).look, **(more or {}))
        async with looking_at(sources, **(limits or {})) as viewer:
            viewer.board = board
            yield fleet, viewer


@contextlib.asynccontextmanager
async def shown_process(process: Process, store: Path) -> AsyncIterator[Viewer]:
    """The page of a process that may lead or follow."""
    source = source_of(process.node, process.board, process.election, "run")
    sources = sources_of(
        source, process.history, store, leadership=process.leadership,
        peers=("127.0.0.1:50052",), metrics=Metrics(source).look,
    )  # fmt: skip
    async with looking_at(sources) as viewer:
        yield viewer


@contextlib.asynccontextmanager
async def shown_follower(folder: Path) -> AsyncIterator[Viewer]:
    """The page of a process that follows; the one that leads is called first."""
    async with keeping(folder) as keeper:
        first, second = (keeper.process(name)[0] for name in ("first", "second"))
        keeper.names(first)
        keeper.start(first)
        await until(lambda: first.leads)
        keeper.start(second)
        async with shown_process(second, folder) as viewer:
            yield viewer
