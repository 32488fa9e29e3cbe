"""Those who look, however many and however slow, take nothing from those who train."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from synchronizer_server.http.history import History
from synchronizer_server.service.switchboard import Switchboard
from tests.synchronizer.fake_learner import PATIENCE_S, until
from tests.synchronizer.page_kit import Viewer, looking_at, messages, shown, sources_of

pytestmark = pytest.mark.asyncio


def board_of(num_learners: int) -> Switchboard:
    """A process that sees that many learners."""
    board = Switchboard()
    status = board.follower_status()
    for i in range(num_learners):
        status.learners.add(learner_id=f"learner-{i}", state="live", last_reason="x" * 200)
    board.follower_status = lambda: status
    return board


async def connect(viewer: Viewer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*viewer.page.address)


@contextlib.asynccontextmanager
async def not_reading(viewer: Viewer, path: str) -> AsyncIterator[None]:
    """Somebody who asks and takes nothing of the answer."""
    loop = asyncio.get_running_loop()
    with socket.socket() as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asking.setblocking(False)
        await loop.sock_connect(asking, viewer.page.address)
        await loop.sock_sendall(asking, f"GET /{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        yield


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the other side ends the connection; nothing else ends the wait."""
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError):
            await reader.read()
    return True


async def test_viewers_beyond_the_bound_are_refused_until_one_has_left(tmp_path: Path) -> None:
    sources = sources_of(Switchboard(), History(), tmp_path)
    async with looking_at(sources, max_viewers=2) as viewer:
        first, second = viewer.ask("events"), viewer.ask("events")
        async with first as one:
            await anext(messages(one))
            async with second as two:
                await anext(messages(two))
                async with viewer.ask("events") as third:
                    assert third.status == 503
                    assert "2 viewers" in await third.text()
                    assert int(third.headers["Retry-After"]) > 0
                assert (await viewer.get("status.json"))[0] == 200, "a look is free to all"
        await until(lambda: viewer.page.pages.num_viewers < 2)
        async with viewer.ask("events") as again:
            await anext(messages(again))


async def test_who_only_holds_connections_keeps_nobody_from_looking(tmp_path: Path) -> None:
    sources = sources_of(Switchboard(), History(), tmp_path)
    async with looking_at(sources, max_connections=4, request_s=3600.0) as viewer:
        first, *held = [await connect(viewer) for _ in range(4)]
        await until(lambda: viewer.page.num_connections == 4)
        assert (await viewer.get("healthz"))[0] == 200
        assert await is_closed(first[0]), "who has held one for longest gives way"
        assert viewer.page.num_connections <= 4
        for _, writer in (first, *held):
            writer.close()


async def test_connections_beyond_the_bound_are_closed_unheard(tmp_path: Path) -> None:
    sources = sources_of(Switchboard(), History(), tmp_path)
    async with looking_at(sources, max_connections=2, request_s=3600.0) as viewer:
        async with viewer.ask("events") as one, viewer.ask("events") as two:
            for answer in (one, two):
                await anext(messages(answer))
            reader, writer = await connect(viewer)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await is_closed(reader)
            writer.close()
            await anext(messages(one))
        await until(lambda: not viewer.page.num_connections)
        assert (await viewer.get("healthz"))[0] == 200


async def test_a_connection_that_is_over_is_not_remembered(tmp_path: Path) -> None:
    sources = sources_of(Switchboard(), History(), tmp_path)
    async with looking_at(sources, request_s=3600.0) as viewer:
        for _ in range(20):
            assert (await viewer.get("healthz"))[0] == 200
        await until(lambda: not viewer.page.num_connections)


async def test_a_viewer_that_is_gone_before_it_is_served_is_not_remembered(tmp_path: Path) -> None:
    async with looking_at(sources_of(Switchboard(), History(), tmp_path)) as viewer:
        assert viewer.page.num_connections == 0
        viewer.page.pages.stays(SimpleNamespace(protocol=object()))  # type: ignore[arg-type]
        assert viewer.page.num_connections == 0


@pytest.mark.parametrize("said", [b"", b"GET /healthz HTTP/1.1\r\nHost: local"])
async def test_who_never_finishes_a_request_is_cut_off(said: bytes, tmp_path: Path) -> None:
    sources = sources_of(Switchboard(), History(), tmp_path)
    async with looking_at(sources, request_s=0.05) as viewer:
        reader, writer = await connect(viewer)
        writer.write(said)
        assert await is_closed(reader)
        writer.close()


async def test_who_does_not_read_its_answer_is_cut_off(tmp_path: Path) -> None:
    sources = sources_of(board_of(4000), History(), tmp_path)
    async with looking_at(sources, request_s=0.2) as viewer, not_reading(viewer, "status.json"):
        await until(lambda: viewer.page.feed.num_looks)
        await until(lambda: not viewer.page.num_connections)


async def test_who_looks_for_long_is_not_cut_off(tmp_path: Path) -> None:
    sources = sources_of(Switchboard(), History(), tmp_path)
    async with looking_at(sources, request_s=0.05) as viewer, viewer.ask("events") as answer:
        stream = messages(answer)
        begun = (await anext(stream))["time"]
        async for facts in stream:
            if facts["time"] > begun + 0.2:
                break


async def test_a_viewer_that_does_not_read_is_dropped_and_others_see_on(tmp_path: Path) -> None:
    """Its looks are never piled up: at most one waits to be sent."""
    history = History()
    for i in range(100):
        history.take("drain", {"learner_id": f"learner-{i}", "reason": "x" * 250})
    sources = sources_of(Switchboard(), history, tmp_path)
    async with looking_at(sources, slow_s=0.1) as viewer, viewer.ask("events") as answer:
        stream = messages(answer)
        await anext(stream)
        async with not_reading(viewer, "events"):
            await until(lambda: viewer.page.pages.num_viewers == 2)
            async with asyncio.timeout(PATIENCE_S):
                async for _ in stream:
                    if viewer.page.pages.num_viewers == 1:
                        break
        await anext(stream)


async def test_garbage_is_refused_and_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources = sources_of(Switchboard(), History(), tmp_path)
    async with looking_at(sources) as viewer:
        for said in (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
                     b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * 100_000):  # fmt: skip
            reader, writer = await connect(viewer)
            writer.write(said)
            assert await is_closed(reader)
            writer.close()
        assert (await viewer.get("healthz"))[0] == 200
    assert "Traceback" not in caplog.text


async def test_a_large_fleet_is_looked_at_less_often(tmp_path: Path) -> None:
    """A description of a megabyte is sent once a second at most, whatever the pause is set to."""
    async with looking_at(sources_of(board_of(4000), History(), tmp_path)) as viewer:
        _, text = await viewer.get("status.json")
        assert len(text) > 1_000_000
        assert viewer.page.feed.pause_s >= 0.99 * len(text) / 1_000_000
        said = json.loads(text)["pause_s"]
        assert said == pytest.approx(viewer.page.feed.pause_s, abs=1e-3), "the first says it, too"


async def test_a_large_look_may_take_a_slow_viewer_longer(tmp_path: Path) -> None:
    sources = sources_of(board_of(4000), History(), tmp_path)
    # More than the kernel keeps: no part of it is sent before the viewer has read another one.
    async with (
        looking_at(sources, slow_s=0.0, slow_bytes_per_s=100_000.0) as viewer,
        viewer.ask("events", headers={"Accept-Encoding": "identity"}) as answer,
    ):
        async with asyncio.timeout(PATIENCE_S):
            text = b""
            while not text.endswith(b"\n\n") or b"data" not in text:
                text += await answer.content.readany()
        assert text.count(b"learner-") >= 4000


async def test_the_end_of_the_process_waits_for_no_viewer(tmp_path: Path) -> None:
    async with shown(tmp_path) as (_, viewer), viewer.ask("events") as answer:
        stream = messages(answer)
        await anext(stream)
        async with asyncio.timeout(PATIENCE_S):
            await viewer.page.stop()
            assert [x async for x in stream][1:] == [], "at most the look under way still comes"
