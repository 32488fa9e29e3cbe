"""The status page shows what `diloco status` shows, to everybody, and does nothing else."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.plain import to_plain
from synchronizer_server.http.facts import FORMAT, Sources
from synchronizer_server.http.feed import GZIP_HEADER
from synchronizer_server.http.history import History
from synchronizer_server.http.listener import StatusPage
from synchronizer_server.metrics import Exposition
from synchronizer_server.service.switchboard import Switchboard
from tests.synchronizer.fake_learner import PATIENCE_S, make_settings
from tests.synchronizer.page_kit import (
    METRICS_TYPE,
    looking_at,
    messages,
    shown,
    shown_follower,
    sources_of,
)

pytestmark = pytest.mark.asyncio

ROOT = Path(__file__).parents[2]
HOSTILE = "<img/src=x/onerror=alert(1)>"
MOVING = re.compile(r"seconds|detail|tokens_per_second")
"""Facts that change while nothing happens."""


def standing(value: Any) -> Any:
    """A value without what changes by itself."""
    if isinstance(value, dict):
        return {k: standing(v) for k, v in value.items() if not MOVING.search(k)}
    return [standing(x) for x in value] if isinstance(value, list) else value


async def test_it_shows_what_an_rpc_answers(tmp_path: Path) -> None:
    async with shown(tmp_path, settings=make_settings(num_learners=2)) as (fleet, viewer):
        a, b = await fleet.seeded("a", "b")
        for learner in (a, b):
            await learner.step()
        for learner in (a, b):
            await learner.push(await learner.hear("pull"))
        await fleet.committed_is(1)
        facts = await viewer.facts_when(lambda x: x["status"]["global_step"] == 1)
        # The next round opens meanwhile: both are asked until they saw the same.
        async with asyncio.timeout(PATIENCE_S):
            while standing(facts["status"]) != standing(to_plain(await fleet.status())):
                facts = await viewer.facts()
    assert facts["format"] == FORMAT
    claim = facts["status"]["claim"]
    assert facts["leader"] == {
        "leader_id": claim["leader_id"], "term": claim["term"], "address": "127.0.0.1:50051",
    }  # fmt: skip
    assert facts["losses"] == [[1, 2.5]], "the last losses of those who contributed"
    assert facts["shares"] == {"a": 0.5, "b": 0.5}
    assert facts["published_s"] >= 0.0
    assert facts["redis"] is None
    assert facts["store"]["state"] == "working"
    assert facts["store"]["bytes_free"] > 0
    told = [(x["subject"], x["text"]) for x in facts["events"]]
    assert ("run", "is seeded") in told
    assert told.index(("run", "is seeded")) < told.index(
        ("synchronizer", "term 1 begins at global step 0")
    ), "the newest first"


async def test_changes_are_told_while_they_happen(tmp_path: Path) -> None:
    async with shown(tmp_path, settings=make_settings(num_learners=1)) as (fleet, viewer):
        (a,) = await fleet.seeded("a")
        async with viewer.ask("events") as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            stream = messages(answer)
            before = await anext(stream)
            assert before["status"]["global_step"] == 0
            await a.turn()
            async for facts in stream:
                if facts["status"]["global_step"] == 1:
                    break
        assert facts["time"] > before["time"]


@pytest.mark.parametrize("encoding", ["identity", "gzip", "br, gzip;q=0.5"])
async def test_whoever_can_unpack_is_sent_less(encoding: str, tmp_path: Path) -> None:
    history = History()
    for i in range(60):
        history.take("quorum", {"quorum": i, "before": 0})
    sources = sources_of(Switchboard(), history, tmp_path)
    async with (
        looking_at(sources, pause_s=0.1) as viewer,
        viewer.ask("events", headers={"Accept-Encoding": encoding}) as answer,
    ):
        assert ("gzip" in encoding) is (answer.headers.get("Content-Encoding") == "gzip")
        stream = messages(answer)
        first, second = await anext(stream), await anext(stream)
        assert second["time"] > first["time"]
        assert len(first["events"]) == len(second["events"]) == 60
        first_seen = await viewer.page.feed.newest()
    assert first_seen is not None
    assert len(first_seen.packed) < len(first_seen.event) / 4
    whole = zlib.decompressobj(wbits=31).decompress(GZIP_HEADER + 2 * first_seen.packed)
    assert whole == 2 * first_seen.event, "what was packed alone can be read after anything"


async def test_all_viewers_share_one_look(tmp_path: Path) -> None:
    async with shown(tmp_path, limits={"pause_s": 3600.0}) as (_, viewer):
        texts = await asyncio.gather(*(viewer.get("status.json") for _ in range(20)))
        assert len({text for _, text in texts}) == 1
        async with viewer.ask("events") as answer:
            assert await anext(messages(answer)) == await viewer.facts()
        assert viewer.page.feed.num_looks == 1, "and nobody who looks costs another one"


async def test_nobody_who_looks_means_no_work(tmp_path: Path) -> None:
    async with shown(tmp_path, settings=make_settings(num_learners=1)) as (fleet, viewer):
        (a,) = await fleet.seeded("a")
        await a.turn()
        await fleet.committed_is(1)
        assert viewer.page.feed.num_looks == 0


async def test_who_follows_names_the_leader(tmp_path: Path) -> None:
    async with shown_follower(tmp_path) as viewer:
        facts = await viewer.facts_when(lambda x: x["leader"] and x["leader"]["address"])
        assert facts["status"]["role"] == "following"
        leader = facts["leader"]
        assert (leader["leader_id"], leader["address"]) == ("first", "127.0.0.1:9")
        assert leader["term"] > 4
        assert facts["peers"] == ["127.0.0.1:50052"]
        assert "first" in (await viewer.get("status.json"))[1]
        status, page = await viewer.get()
        assert (status, "page.js" in page) == (200, True), "it serves the page, too"


async def test_a_process_that_has_not_begun_says_so(tmp_path: Path) -> None:
    async with looking_at(sources_of(Switchboard(), History(), tmp_path)) as viewer:
        facts = await viewer.facts()
    assert facts["leader"] is None
    assert facts["status"]["role"] == ""


async def test_what_learners_and_operators_call_things_is_data_and_never_markup(
    tmp_path: Path,
) -> None:
    async with shown(tmp_path, settings=make_settings(num_learners=1)) as (fleet, viewer):
        await fleet.learner(HOSTILE, labels={HOSTILE: "</script><script>alert(2)</script>"})
        facts = await viewer.facts_when(lambda x: x["status"]["learners"])
        async with viewer.ask("status.json") as answer:
            assert answer.headers["Content-Type"] == "application/json"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        _, page = await viewer.get()
    assert facts["status"]["learners"][0]["learner_id"] == HOSTILE
    assert HOSTILE not in page
    assets = ROOT / "synchronizer_server/http/assets"
    scripts = "\n".join(path.read_text() for path in assets.glob("*.js"))
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|setHTML|DOMParser"
    assert not re.search(ways, scripts)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["", "status.json", "events", "nowhere"])
async def test_nothing_but_looking_is_possible(method: str, path: str, tmp_path: Path) -> None:
    async with (
        looking_at(sources_of(Switchboard(), History(), tmp_path)) as viewer,
        viewer.ask(path, method, data=b"x" * 10) as answer,
    ):
        assert answer.status == 405
        assert answer.headers["Allow"] == "GET,HEAD"


ASSETS = [x.name for x in (ROOT / "synchronizer_server/http/assets").iterdir()]


@pytest.mark.parametrize(
    "path", ["", *(x for x in ASSETS if x != "index.html"), "status.json", "metrics", "healthz"]
)
async def test_every_answer_is_guarded_and_ends_its_connection(path: str, tmp_path: Path) -> None:
    async with looking_at(sources_of(Switchboard(), History(), tmp_path)) as viewer:
        for method in ("GET", "HEAD"):
            async with viewer.ask(path, method) as answer:
                assert answer.status == 200
                body = await answer.read()
                assert bool(body) is (method == "GET")
                policy = answer.headers["Content-Security-Policy"]
                assert "unsafe" not in policy
                assert "default-src 'none'" in policy
                assert "frame-ancestors 'none'" in policy
                assert answer.headers["X-Frame-Options"] == "DENY"
                assert answer.headers["Cache-Control"] == "no-store"
                assert answer.headers["Connection"] == "close"
        async with viewer.ask("nowhere") as answer:
            assert answer.status == 404
            assert "Content-Security-Policy" in answer.headers
        async with viewer.ask("events", "HEAD") as answer:
            assert answer.status == 200


async def test_the_page_needs_nothing_from_elsewhere() -> None:
    assets = ROOT / "synchronizer_server/http/assets"
    for path in assets.iterdir():
        found = re.findall(r"https?://[^\s\"']+", path.read_text())
        assert set(found) <= {"http://www.w3.org/2000/svg"}, path


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "10.0.0.1", "[::2]:80", ""])
async def test_a_name_from_elsewhere_that_leads_here_is_refused(host: str, tmp_path: Path) -> None:
    async with looking_at(sources_of(Switchboard(), History(), tmp_path)) as viewer:
        assert (await viewer.get("status.json", headers={"Host": host}))[0] == 421
        for name in ("localhost", "127.0.0.1:99", "LOCALHOST:1", "[::1]"):
            assert (await viewer.get("status.json", headers={"Host": name}))[0] == 200


async def test_prometheus_scrapes_beside_the_page_and_not_too_often(tmp_path: Path) -> None:
    asked = iter(range(100))

    def metrics() -> Callable[[], Exposition]:
        body = b"asked %d\n" % next(asked)
        return lambda: (body, METRICS_TYPE)

    sources = sources_of(Switchboard(), History(), tmp_path, metrics=metrics)
    async with looking_at(sources, pause_s=3600.0) as viewer:
        for _ in range(3):
            async with viewer.ask("metrics") as answer:
                assert await answer.text() == "asked 0\n"
                assert answer.headers["Content-Type"] == METRICS_TYPE
    async with looking_at(sources) as viewer:
        async with asyncio.timeout(PATIENCE_S):
            while await viewer.get("metrics") != (200, "asked 3\n"):
                pass


async def test_the_paths_are_documented(tmp_path: Path) -> None:
    text = (ROOT / "docs/status-page.md").read_text()
    async with looking_at(sources_of(Switchboard(), History(), tmp_path)) as viewer:
        paths = re.findall(r"(?m)^\| `/([\w.]*)` \|", text)
        assert paths == ["", "status.json", "events", "metrics", "healthz"]
        for path in paths:
            async with viewer.ask(path, "HEAD") as answer:
                assert answer.status == 200, path


async def test_health_follows_the_process(tmp_path: Path) -> None:
    serving = True
    sources = sources_of(Switchboard(), History(), tmp_path)
    async with looking_at(sources, is_serving=lambda: serving) as viewer:
        assert await viewer.get("healthz") == (200, "serving\n")
        serving = False
        assert await viewer.get("healthz") == (503, "stopping\n")


async def test_a_failure_of_the_page_is_said_once_and_does_not_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board = Switchboard()

    def fails() -> Any:
        raise RuntimeError("broken")

    good, board.follower_status = board.follower_status, fails
    async with looking_at(sources_of(board, History(), tmp_path)) as viewer:
        for _ in range(3):
            assert await viewer.get("status.json") == (500, "see the synchronizer's log")
        async with viewer.ask("events") as answer:
            assert [x async for x in messages(answer)] == [], "the stream ends"
        assert caplog.text.count("the status page cannot show what it should") == 1
        board.follower_status = good
        assert (await viewer.facts())["status"]["role"] == ""


def page_at(address: str, store: Path, **more: Any) -> StatusPage:
    sources: Sources = sources_of(Switchboard(), History(), store)
    return StatusPage(address, sources, is_serving=lambda: True, **more)


async def test_an_address_beyond_this_machine_must_be_asked_for_aloud(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        page_at("0.0.0.0:0", tmp_path)
    assert caught.value.reason is Reason.CONFIG_CONFLICT
    assert "--insecure" in caught.value.message
    page = page_at("0.0.0.0:0", tmp_path, insecure=True)
    await page.stop()


async def test_a_port_in_use_is_one_clear_error(tmp_path: Path) -> None:
    async with looking_at(sources_of(Switchboard(), History(), tmp_path)) as viewer:
        port = viewer.page.address.port
        with pytest.raises(UsageError) as caught:
            page_at(f"127.0.0.1:{port}", tmp_path)
    assert caught.value.reason is Reason.PORT_IN_USE
    assert f"127.0.0.1:{port}" in caught.value.message
    page = page_at(f"127.0.0.1:{port}", tmp_path)
    await page.stop()


async def test_the_shape_is_documented(tmp_path: Path) -> None:
    """Every key of /status.json has a row in the table of docs/status-page.md, and no other has."""
    async with shown(tmp_path) as (_, viewer):
        facts = await viewer.facts()
    text = (ROOT / "docs/status-page.md").read_text()
    rows = re.findall(r"(?m)^\| `(\w+)` \|", text)
    assert sorted(rows) == sorted(facts)
