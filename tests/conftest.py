"""What every test shares: a clean environment, one thread per process, patient hypothesis."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shared and slow machines: a deadline per example would assert wall time.
settings.register_profile(
    "project", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("project")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own DILOCO_ variables do not leak into tests."""
    for name in list(os.environ):
        if name.startswith("DILOCO_"):
            monkeypatch.delenv(name)
