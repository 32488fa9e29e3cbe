"""The status page in a real browser: it shows, it keeps up, and nothing breaks out of it."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from decoupled_diloco.v1 import admin_pb2, types_pb2
from synchronizer_server.http import facts
from synchronizer_server.http.history import History, Remembered
from tests.synchronizer.browser import NAMES, Tab, browsing, find_chromium
from tests.synchronizer.fake_learner import FakeLearner, Fleet, make_settings
from tests.synchronizer.page_kit import shown, shown_follower

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.integration,
    pytest.mark.skipif(
        find_chromium() is None,
        reason=f"no browser: none of {', '.join(NAMES)} is on PATH (Debian: chromium)",
    ),
]

PICTURES = Path(os.environ.get("ARTIFACTS", Path(__file__).parents[2] / "artifacts"))
"""Where the pictures of the page go."""
PAUSE_S = 0.2
HOSTILE = "<img/src=x/onerror=alert(1)>"


@pytest_asyncio.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    profile = tmp_path / "browser"
    profile.mkdir()
    async with browsing(profile) as made:
        yield made


def fleet_of(num_learners: int) -> dict[str, object]:
    settings = make_settings(num_learners=num_learners, total_global_steps=40)
    return {"settings": settings, "limits": {"pause_s": PAUSE_S}}


async def round_of(fleet: Fleet, *learners: FakeLearner) -> None:
    """One round to which all of them contribute."""
    for learner in learners:
        await learner.step()
    for learner in learners:
        await learner.push(await learner.hear("pull"))


def keep(name: str, picture: bytes) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / f"status-page-{name}.png").write_bytes(picture)


def says(selector: str, text: str) -> str:
    return f"document.querySelector({selector!r}).textContent.includes({json.dumps(text)})"


async def test_it_shows_the_fleet_keeps_up_and_runs_nothing_that_learners_say(
    tmp_path: Path, tab: Tab
) -> None:
    async with shown(tmp_path, **fleet_of(2)) as (fleet, viewer):
        a, hostile = await fleet.seeded("learner-10", HOSTILE)
        await tab.open(viewer.page.url)
        await tab.until(says("#connection", "live"))
        assert await tab.text("#step") == "0"
        await tab.until(says("#learners", "learner-10"))
        names = await tab.ask(
            "[...document.querySelectorAll('#learners th .value')].map(x => x.textContent)"
        )
        assert names == [HOSTILE, "learner-10"]
        images = "[...document.images].map(x => x.getAttribute('src'))"
        assert await tab.ask(images) == ["icon.svg"], "its own, and no other"
        await round_of(fleet, a, hostile)
        await tab.until("document.querySelector('#step').textContent === '1'")
        await round_of(fleet, a, hostile)
        await tab.until("document.querySelectorAll('#loss polyline').length === 1")
        await tab.until(says("#learners", "50 %"))
        await tab.until(says("#events", "is seeded"))
        await tab.until(says("#leader", "leads in term 1"))
        assert await tab.ask("document.querySelectorAll('#fragments li').length") == 4
        await hostile.step()
        await tab.until(says("#rounds", HOSTILE) + " || " + says("#rounds", "learner-10"))
        assert tab.problems == [], "no error, no dialog, nothing that the policy had to refuse"


async def test_it_says_that_nothing_comes_any_more_and_finds_back(tmp_path: Path, tab: Tab) -> None:
    async with shown(tmp_path, **fleet_of(1)) as (fleet, viewer):
        (a,) = await fleet.seeded("learner-0")
        await tab.open(viewer.page.url)
        await tab.until(says("#connection", "live"))
        await viewer.page.stop()
        await tab.until(says("#connection", "not connected, last heard "))
        assert await tab.ask("document.body.classList.contains('stale')")
        await a.turn()
        async with viewer.reopened():
            await tab.until(says("#connection", "live"))
            await tab.until("document.querySelector('#step').textContent === '1'")
            assert not await tab.ask("document.body.classList.contains('stale')")


async def test_it_fits_a_phone_and_a_dark_room(tmp_path: Path, tab: Tab) -> None:
    async with shown(tmp_path, **fleet_of(4)) as (fleet, viewer):
        learners = await fleet.seeded(*(f"learner-{i}" for i in range(3)))
        learners.append(await fleet.learner("learner-3", labels={"datacenter": "x" * 60}))
        for _ in range(6):
            await round_of(fleet, *learners)
        await tab.open(viewer.page.url)
        await tab.until(says("#step", "6"))
        backgrounds = set()
        for name, width, dark in (
            ("desk", 1280, False), ("desk-dark", 1280, True), ("tablet", 900, False),
            ("phone", 390, False), ("phone-dark", 390, True), ("small", 320, False),
        ):  # fmt: skip
            await tab.look(width, 900, dark=dark)
            await tab.until(f"innerWidth === {width}")
            over = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert await tab.ask(over) == 0, f"{name}: nothing is to be scrolled sideways"
            narrow = (
                "[...document.querySelectorAll('main > section:not([hidden])')]"
                f".filter(x => x.clientWidth < {0.9 if width < 600 else 0.25} * innerWidth)"
                ".map(x => x.textContent.slice(0, 20))"
            )
            assert await tab.ask(narrow) == [], f"{name}: nothing is squeezed"
            color = await tab.ask("getComputedStyle(document.body).backgroundColor")
            backgrounds.add((dark, color))
            picture = await tab.picture()
            assert picture.startswith(b"\x89PNG")
            keep(name, picture)
        assert len(backgrounds) == 2
        assert tab.problems == []


async def test_nothing_that_learners_report_breaks_it(tmp_path: Path, tab: Tab) -> None:
    """Losses without bounds, and names that every object of a script has."""
    limits = {"pause_s": PAUSE_S}
    async with shown(tmp_path, settings=make_settings(num_learners=3), limits=limits) as (
        fleet, viewer,
    ):  # fmt: skip
        names = ["constructor", "__proto__", "toString"]
        learners = await fleet.seeded(*names)
        await tab.open(viewer.page.url)
        await tab.until("document.querySelectorAll('#learners tr').length === 3")
        weights = "[...document.querySelectorAll('#learners td[data-name=weight] .value')]"
        assert await tab.ask(f"{weights}.map(x => x.textContent)") == ["-"] * 3
        losses = (1e-300, 2e-300, 1e300, 1.0000000000000002e300, -1.7e308, 1.7e308, 1e17, 2.0)
        for step, loss in enumerate(losses, 1):
            for learner in learners:
                await learner.step(loss=loss)
            for learner in learners:
                await learner.push(await learner.hear("pull"))
            await tab.until(f"document.querySelector('#step').textContent === '{step}'")
            await tab.until("document.querySelector('#loss .line').getAttribute('points')")
            drawn = await tab.ask("document.querySelector('#loss').innerHTML")
            assert "NaN" not in drawn
            assert "Infinity" not in drawn
        await tab.until(says("#connection", "live"))
        assert tab.problems == []


async def test_it_keeps_up_when_another_synchronizer_leads(tmp_path: Path, tab: Tab) -> None:
    async with shown(tmp_path, **fleet_of(1)) as (fleet, viewer):
        (a,) = await fleet.seeded("learner-0")
        board = viewer.board
        admin = board.admin
        await a.turn()
        await tab.open(viewer.page.url)
        await tab.until(says("#signs", "1 of 1 live"))
        claim = types_pb2.LeadershipClaim(run_id="run", term=7, leader_id="another")
        board.follower_status = lambda: admin_pb2.GetStatusResponse(
            run_id="run", role="following", state="following", claim=claim, global_step=1
        )
        board.follow()
        await tab.until(says("#leader", "another leads in term 7"))
        assert await tab.ask("document.querySelector('#learner-section').hidden")
        assert not await tab.ask(says("#signs", "live"))
        assert await tab.text("#connection") == "live", "that is what it is, and says who leads"
        board.admin = admin
        await tab.until(says("#leader", "leads in term 1"))
        await tab.until(says("#learners", "learner-0"))
        assert tab.problems == []


async def test_a_synchronizer_of_another_version_is_not_taken_for_this_one(
    tmp_path: Path, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shown(tmp_path, **fleet_of(1)) as (_, viewer):
        await tab.open(viewer.page.url)
        await tab.until(says("#connection", "live"))
        monkeypatch.setattr(facts, "FORMAT", facts.FORMAT + 1)
        await tab.until(says("#connection", "another version: reload"))


async def test_a_look_that_cannot_be_shown_is_said(
    tmp_path: Path, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shown(tmp_path, **fleet_of(1)) as (fleet, viewer):
        await tab.open(viewer.page.url)
        await tab.until(says("#connection", "live"))
        monkeypatch.setattr(History, "remembered", lambda _: Remembered(
            events=(), losses=None, shares={}  # type: ignore[arg-type]
        ))  # fmt: skip
        await tab.until(says("#connection", "part of this cannot be shown"))
        (a,) = await fleet.seeded("learner-0")
        await a.turn()
        await tab.until("document.querySelector('#step').textContent === '1'")


async def test_who_follows_shows_who_leads_and_hides_what_it_cannot_know(
    tmp_path: Path, tab: Tab
) -> None:
    async with shown_follower(tmp_path / "synchronizers") as viewer:
        await tab.open(viewer.page.url)
        await tab.until(
            says("#leader", "; first leads in term ") + " && " + says("#leader", " at 127.0.0.1:9")
        )
        assert await tab.text("#state") == "following"
        assert await tab.ask("document.querySelector('#learner-section').hidden")
        assert tab.problems == []
