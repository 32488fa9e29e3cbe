"""The status page in a real browser: it shows, it keeps up, and nothing breaks out of it."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.synchronizer.browser import NAMES, Tab, browsing, find_chromium
from tests.synchronizer.fake_learner import FakeLearner, Fleet, make_settings, until
from tests.synchronizer.node_kit import keeping
from tests.synchronizer.page_kit import shown, shown_process

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
            "[...document.querySelectorAll('#learners td:first-child')].map(x => x.textContent)"
        )
        assert names == [HOSTILE, "learner-10"]
        assert await tab.ask("document.images.length") == 0
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
        await a.turn()
        async with viewer.reopened():
            await tab.until(says("#connection", "live"))
            await tab.until("document.querySelector('#step').textContent === '1'")


async def test_it_fits_a_phone_and_a_dark_room(tmp_path: Path, tab: Tab) -> None:
    async with shown(tmp_path, **fleet_of(4)) as (fleet, viewer):
        learners = await fleet.seeded(*(f"learner-{i}" for i in range(4)))
        for _ in range(6):
            await round_of(fleet, *learners)
        await tab.open(viewer.page.url)
        await tab.until(says("#step", "6"))
        backgrounds = set()
        for name, width, dark in (
            ("desk", 1280, False), ("desk-dark", 1280, True), ("phone", 390, False),
        ):  # fmt: skip
            await tab.look(width, 900, dark=dark)
            await tab.until(f"innerWidth === {width}")
            over = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert await tab.ask(over) == 0, f"{name}: nothing is to be scrolled sideways"
            color = await tab.ask("getComputedStyle(document.body).backgroundColor")
            backgrounds.add((dark, color))
            picture = await tab.picture()
            assert picture.startswith(b"\x89PNG")
            keep(name, picture)
        assert len(backgrounds) == 2
        assert tab.problems == []


async def test_who_follows_shows_who_leads_and_hides_what_it_cannot_know(
    tmp_path: Path, tab: Tab
) -> None:
    async with keeping(tmp_path / "synchronizers") as keeper:
        first, second = (keeper.process(name)[0] for name in ("first", "second"))
        keeper.names(first)
        keeper.start(first)
        await until(lambda: first.leads)
        keeper.start(second)
        async with shown_process(second, tmp_path) as viewer:
            await tab.open(viewer.page.url)
            await tab.until(
                says("#leader", "; first leads in term ")
                + " && "
                + says("#leader", " at 127.0.0.1:9")
            )
            assert await tab.text("#state") == "following"
            assert await tab.ask("document.querySelector('#learner-section').hidden")
            assert tab.problems == []
