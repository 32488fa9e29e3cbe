"""The containers of no engine that some of these tests share."""

from __future__ import annotations

from typing import Any, cast

import pytest

from diloco_fleet.chaos.docker_injector import DockerInjector
from diloco_fleet.chaos.docker_links import Links
from tests.fleet.fake_engine import PROJECT, FakeEngine, FakeHold, FakeHost


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def host(engine: FakeEngine) -> FakeHost:
    return FakeHost(engine)


@pytest.fixture
def injector(engine: FakeEngine, host: FakeHost) -> DockerInjector:
    return DockerInjector(cast("Any", engine), PROJECT, host, Links(host, FakeHold))
