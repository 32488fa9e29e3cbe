"""Faults of design section 7, re-introduced into the shipped code, are met by simulated fleets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "simulation_mutants.py"


@pytest.mark.timeout(900)
def test_every_mutant_is_caught():
    """One fork per mutant, and a bounded number of seeds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "SURVIVES" not in result.stdout
    assert result.stdout.count("caught") >= 15
