"""What every test shares: order, a clean environment, one thread each, patient hypothesis."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shared and slow machines: a deadline per example would assert wall time.
settings.register_profile(
    "project", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("project")


FIRST = ("integration/", "fleet/test_simulation", "synchronizer/test_core_mutants")
"""Files of few tests that take long."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files begin first, then those of many tests: no worker is idle while another ends one.

    The order within a file stays, and a folder may have one of its own. pytest-xdist keeps all this
    with ``--no-loadscope-reorder``.
    """
    here = Path(__file__).parent
    num_tests = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[bool, int, str]:
        name = item.path.relative_to(here).as_posix()
        return (False, 0, name) if name.startswith(FIRST) else (True, -num_tests[item.path], name)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own DILOCO_ variables do not leak into tests."""
    for name in list(os.environ):
        if name.startswith("DILOCO_"):
            monkeypatch.delenv(name)
