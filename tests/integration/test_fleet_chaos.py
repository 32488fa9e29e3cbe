"""One scenario on a real fleet: struck, healed, judged, and nothing left behind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from fleet_harness import run_command
from fleet_view import pids_naming, read_lines

pytestmark = pytest.mark.integration

SCENARIO = """
about = "A learner dies; the one that gives it its state dies, too; a clock is wrong, a link cut."
duration_s = 12
settle_s = 120
ready_s = 150

[fleet]
learners = 3
standby = true
[fleet.run]
num_fragments = 4
sync_interval = 4
[fleet.trainer]
sequence_length = 32
batch_size = 2
[fleet.fleet]
device = "cpu"
pace = 0.2
evaluate_every = 1000

[steady]
rounds_lost = 0
crashes = 0
leader_changes = 0
participation = 0.2

[[faults]]
fault = "kill"
who = "the donor"
on = "mid_recovery"
recovery_s = 120

[[faults]]
fault = "kill"
who = "learner-1"
at_s = [1]
recovery_s = 120

[[faults]]
fault = "clock-skew"
who = "every synchronizer"
at_s = [2]
duration_s = 5
offset_s = 86400
recovery_s = 120

[[faults]]
fault = "partition"
between = ["the follower", "rest"]
at_s = [9]
duration_s = 60
recovery_s = 120
"""


def test_a_scenario_strikes_heals_and_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By time, at a point of the protocol, and until the end; what it wrote is all that is left."""
    # The tests' redis-server lies beside their Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    monkeypatch.setenv("PATH", path)
    file, out = tmp_path / "mine.toml", tmp_path / "out"
    file.write_text(SCENARIO)
    done = run_command(
        "diloco_fleet.cli", "chaos", "run", str(file), "--out", str(out), timeout_s=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "chaos.json").read_text())
    assert result["verdict"] == "passed"
    struck = {strike["fault"]: strike for strike in result["strikes"] if strike["on"] == ""}
    [donor] = [strike for strike in result["strikes"] if strike["on"] == "mid_recovery"]
    assert donor["targets"] in ([["learner-0"]], [["learner-2"]])
    assert struck["partition"]["healed_s"] < 20, "at the end of the scenario"
    journals = (out / "metrics").glob("synchronizer-*.jsonl")
    times = [line["time"] for path in journals for line in read_lines(path)]
    assert max(times) - min(times) > 80_000, "the clock was wrong"
    assert result["window_s"] < 300, "and nothing depended on it"
    assert (out / "chaos.png").stat().st_size > 10_000
    assert not set(pids_naming(str(out)))
