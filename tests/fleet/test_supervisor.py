"""The supervisor against small scripts in place of the fleet's processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from decoupled_diloco.errors import Reason
from diloco_fleet.journal import FleetJournal
from diloco_fleet.local import Bounds, Outcome, Phase, Supervisor
from diloco_fleet.metrics import is_synchronizer
from diloco_fleet.process import ProcessSpec, Restart, RestartPolicy
from diloco_fleet.run_files import RunFiles, read_fleet

SERVES = 'trap "echo {name} >> order; exit 143" TERM; touch {name}.up; while :; do sleep 0.02; done'
FINISHES = "echo {name} >> order; exit 0"


class Fleet:
    """Builds a supervisor over scripts and remembers what it said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = RunFiles(folder)
        self.said: list[str] = []
        self.journals: list[FleetJournal] = []
        for path in (self.files.logs, self.files.metrics):
            path.mkdir()

    def spec(self, name: str, script: str) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            command=("sh", "-c", f"cd {self.folder}; " + script.replace("{name}", name)),
            log=self.files.log_of(name),
            environment=dict(os.environ),
            finishes=not is_synchronizer(name) and name != "redis",
        )

    def supervisor(
        self,
        learners: list[str],
        *,
        synchronizer: str = SERVES,
        synchronizers: Mapping[str, str] | None = None,
        redis: str | None = None,
        leader: Callable[[], str | None] = lambda: None,
        evaluator: str = FINISHES,
        restart: Restart = Restart.ALWAYS,
        max_restarts: int = 5,
        drain_s: float = 30.0,
        finish_s: float = 30.0,
        is_complete: Callable[[], bool] = lambda: False,
    ) -> Supervisor:
        return Supervisor(
            files=self.files,
            run_id="test",
            address="127.0.0.1:1",
            synchronizers=[
                self.spec(name, script)
                for name, script in (synchronizers or {"synchronizer": synchronizer}).items()
            ],
            redis=self.spec("redis", redis) if redis else None,
            leader=leader,
            evaluator=self.spec("evaluator", evaluator),
            learners=[self.spec(f"learner-{i}", script) for i, script in enumerate(learners)],
            policy=RestartPolicy(restart=restart, max_restarts=max_restarts),
            bounds=Bounds(drain_s=drain_s, finish_s=finish_s, interval_s=0.01),
            journal=self.open_journal(),
            is_complete=is_complete,
            pages=("http://127.0.0.1:2/",),
        )

    def open_journal(self) -> FleetJournal:
        self.journals.append(FleetJournal(self.files.metrics_of("fleet"), self.said.append))
        return self.journals[-1]

    def run(self, supervisor: Supervisor, when: Callable[[], bool] | None = None) -> Outcome:
        """Runs to the end; asks to stop whenever ``when`` holds."""

        def tick() -> None:
            if when is not None and when():
                supervisor.request_stop()

        return supervisor.run(tick)

    def order(self) -> list[str]:
        return (self.folder / "order").read_text().split()

    def up(self, *names: str) -> bool:
        return all((self.folder / f"{name}.up").exists() for name in names)

    def restarts(self) -> dict[str, int]:
        entries = read_fleet(self.files.fleet).processes
        return {entry.name: entry.restarts for entry in entries if entry.restarts}

    def journal(self, kind: str) -> list[str]:
        lines = self.files.metrics_of("fleet").read_text().splitlines()
        return [e["process"] for e in map(json.loads, lines) if e["kind"] == kind]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    for journal in fleet.journals:
        journal.close()


def once(condition: Callable[[], bool]) -> Callable[[], bool]:
    """Holds the first time that the condition does, and then no more."""
    held: list[bool] = []

    def holds() -> bool:
        if held or not condition():
            return False
        held.append(True)
        return True

    return holds


def wait_until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_a_complete_run_ends_learners_then_evaluator_then_synchronizer(fleet: Fleet) -> None:
    waits_for_learners = "while [ ! -s order ]; do sleep 0.02; done; " + FINISHES
    waits_for_all = "while [ ! -e synchronizer.up ]; do sleep 0.02; done; " + FINISHES
    outcome = fleet.run(fleet.supervisor([waits_for_all], evaluator=waits_for_learners))
    assert (outcome.word, outcome.exit_code) == ("complete", 0)
    assert fleet.order() == ["learner-0", "evaluator", "synchronizer"]
    shown = read_fleet(fleet.files.fleet)
    assert shown.state == "ended"
    assert shown.pages == ("http://127.0.0.1:2/",)
    assert [(e.name, e.state, e.pid) for e in shown.processes] == [
        ("synchronizer", "stopped", None),
        ("evaluator", "done", None),
        ("learner-0", "done", None),
    ]


def test_a_killed_learner_is_started_again_and_counted(fleet: Fleet) -> None:
    script = "if [ ! -e died ]; then touch died; kill -KILL $$; fi; " + FINISHES
    outcome = fleet.run(fleet.supervisor([script]))
    assert outcome.word == "complete"
    assert fleet.restarts() == {"learner-0": 1}
    assert fleet.journal("restart") == ["learner-0"]
    assert any("learner-0 died (killed by SIGKILL)" in line for line in fleet.said)


@pytest.mark.parametrize("end", ["kill -KILL $$", "exit 143"])
def test_a_synchronizer_that_ends_by_itself_is_started_again(fleet: Fleet, end: str) -> None:
    """Learners train on meanwhile: they are not touched."""
    script = f"if [ ! -e died ]; then touch died; {end}; fi; " + SERVES
    learner = "while [ ! -e synchronizer.up ]; do sleep 0.02; done; " + FINISHES
    outcome = fleet.run(fleet.supervisor([learner], synchronizer=script))
    assert outcome.word == "complete"
    assert fleet.restarts() == {"synchronizer": 1}


def test_a_learner_that_an_operator_drained_stays_out_and_is_no_failure(fleet: Fleet) -> None:
    """Exit code 80, whatever the restart policy: the others go on to the end without it."""
    good = "while [ ! -e go ]; do sleep 0.02; done; " + FINISHES
    supervisor = fleet.supervisor(["exit 80", good])

    def tick() -> None:
        if any("learner-0 is drained" in line for line in fleet.said):
            (fleet.folder / "go").touch()

    assert supervisor.run(tick).word == "complete"
    assert fleet.restarts() == {}
    assert fleet.journal("restart") == []
    states = {x.name: x.state for x in read_fleet(fleet.files.fleet).processes}
    assert (states["learner-0"], states["learner-1"]) == ("drained", "done")


def test_a_fleet_whose_learners_are_all_drained_ends_as_drained(fleet: Fleet) -> None:
    outcome = fleet.run(fleet.supervisor(["exit 80", "exit 80"], evaluator=SERVES))
    assert (outcome.word, outcome.exit_code, outcome.error) == ("drained", 143, None)
    assert any("drained every learner" in line for line in fleet.said)


def test_a_fleet_that_lost_its_last_learner_fails_though_others_were_drained(fleet: Fleet) -> None:
    outcome = fleet.run(fleet.supervisor(["exit 80", "exit 65"], evaluator=SERVES))
    assert outcome.word == "failed"
    assert outcome.error is not None
    assert "learner-1" in outcome.error.message


@pytest.mark.parametrize("code", [64, 65])
def test_a_learner_that_cannot_belong_is_left_out_and_the_run_says_why(
    fleet: Fleet, code: int
) -> None:
    wrong = f"echo 'error: NO_SHARD_LEFT: all 1 shards are taken' >&2; exit {code}"
    good = "while [ ! -e go ]; do sleep 0.02; done; " + FINISHES
    supervisor = fleet.supervisor([wrong, good])

    def tick() -> None:
        if any("learner-0 ended" in line for line in fleet.said):
            (fleet.folder / "go").touch()

    assert supervisor.run(tick).word == "complete"
    assert fleet.restarts() == {}
    line = next(line for line in fleet.said if "learner-0 ended" in line)
    assert "is not started again" in line
    assert "NO_SHARD_LEFT: all 1 shards are taken" in line


def test_a_run_without_any_learner_left_fails_with_the_learners_reason(fleet: Fleet) -> None:
    wrong = "echo 'error: LAYOUT_MISMATCH: tensor head differs' >&2; exit 65"
    outcome = fleet.run(fleet.supervisor([wrong, wrong], evaluator=SERVES))
    assert (outcome.word, outcome.exit_code) == ("failed", 65)
    assert outcome.error is not None
    assert outcome.error.reason is Reason.LAYOUT_MISMATCH
    assert "learner-0: tensor head differs" in outcome.error.message


def test_a_run_whose_synchronizer_cannot_start_fails_with_its_reason(fleet: Fleet) -> None:
    wrong = "echo 'error: STORE_CORRUPT: record 7 is damaged' >&2; exit 74"
    outcome = fleet.run(fleet.supervisor([SERVES], synchronizer=wrong, evaluator=SERVES))
    assert (outcome.word, outcome.exit_code) == ("failed", 74)
    assert outcome.error is not None
    assert outcome.error.reason is Reason.STORE_CORRUPT


def test_without_the_evaluators_model_the_run_has_failed(fleet: Fleet) -> None:
    outcome = fleet.run(
        fleet.supervisor([FINISHES], evaluator="echo boom; exit 70", restart=Restart.NEVER)
    )
    assert (outcome.word, outcome.exit_code) == ("failed", 70)


def test_never_restarts_nothing(fleet: Fleet) -> None:
    outcome = fleet.run(
        fleet.supervisor(["kill -KILL $$", FINISHES], restart=Restart.NEVER, finish_s=30.0)
    )
    assert outcome.word == "complete"
    assert fleet.restarts() == {}


def test_a_process_that_always_dies_is_given_up(fleet: Fleet) -> None:
    outcome = fleet.run(fleet.supervisor(["exit 70"], evaluator=SERVES, max_restarts=1))
    assert (outcome.word, outcome.exit_code) == ("failed", 70)
    assert fleet.restarts() == {"learner-0": 1}


def test_a_drain_stops_learners_then_evaluator_then_synchronizer(fleet: Fleet) -> None:
    names = ("learner-0", "learner-1", "evaluator", "synchronizer")
    outcome = fleet.run(
        fleet.supervisor([SERVES, SERVES], evaluator=SERVES), once(lambda: fleet.up(*names))
    )
    assert (outcome.word, outcome.exit_code) == ("drained", 143)
    assert set(fleet.order()[:2]) == {"learner-0", "learner-1"}
    assert fleet.order()[2:] == ["evaluator", "synchronizer"]


def test_a_stop_after_the_last_global_step_leaves_a_complete_run(fleet: Fleet) -> None:
    """Learners leave at once, the evaluator is given the time for its model."""
    exports = "touch {name}.up; while [ ! -s order ]; do sleep 0.02; done; " + FINISHES
    dies_of_it = "touch {name}.up; while :; do sleep 0.02; done"
    outcome = fleet.run(
        fleet.supervisor([dies_of_it, SERVES], evaluator=exports, is_complete=lambda: True),
        once(lambda: fleet.up("learner-0", "learner-1", "evaluator", "synchronizer")),
    )
    assert (outcome.word, outcome.exit_code) == ("complete", 0)
    assert fleet.order() == ["learner-1", "evaluator", "synchronizer"]
    assert "learner-0 has stopped" in fleet.said
    assert not any("SIGTERM" in sentence or "exit code" in sentence for sentence in fleet.said)


def test_a_stop_while_the_run_finishes_leaves_a_complete_run(fleet: Fleet) -> None:
    exports = "while ! grep -q learner-1 order; do sleep 0.02; done; " + FINISHES
    supervisor = fleet.supervisor([FINISHES, SERVES], evaluator=exports)
    outcome = fleet.run(
        supervisor, once(lambda: supervisor.phase is Phase.FINISHING and fleet.up("learner-1"))
    )
    assert (outcome.word, outcome.exit_code) == ("complete", 0)
    assert fleet.order() == ["learner-0", "learner-1", "evaluator", "synchronizer"]


def test_a_drain_within_which_the_last_model_was_exported_is_complete(fleet: Fleet) -> None:
    exports = 'trap "echo {name} >> order; exit 0" TERM; touch {name}.up; '
    exports += "while :; do sleep 0.02; done"
    supervisor = fleet.supervisor([SERVES], evaluator=exports)
    outcome = fleet.run(
        supervisor, once(lambda: fleet.up("learner-0", "evaluator", "synchronizer"))
    )
    assert (outcome.word, outcome.exit_code) == ("complete", 0)


def test_a_drain_kills_what_does_not_stop_in_time(fleet: Fleet) -> None:
    deaf = 'trap "" TERM; touch {name}.up; while :; do sleep 0.02; done'
    outcome = fleet.run(
        fleet.supervisor([deaf], evaluator=SERVES, drain_s=3.0),
        once(lambda: fleet.up("learner-0", "evaluator", "synchronizer")),
    )
    assert outcome.word == "drained"
    learner = read_fleet(fleet.files.fleet).processes[2]
    assert (learner.state, learner.exit_code) == ("stopped", -signal.SIGKILL)
    assert "learner-0 did not end within 3 s of SIGTERM; next: SIGKILL" in fleet.said
    assert fleet.order() == ["evaluator", "synchronizer"]


def test_a_second_request_kills_at_once(fleet: Fleet) -> None:
    deaf = 'trap "" TERM; touch {name}.up; while :; do sleep 0.02; done'
    supervisor = fleet.supervisor([deaf], synchronizer=deaf, evaluator=deaf)
    outcome = fleet.run(supervisor, lambda: fleet.up("learner-0", "evaluator", "synchronizer"))
    assert outcome.word == "killed"
    entries = read_fleet(fleet.files.fleet).processes
    assert {entry.exit_code for entry in entries} == {-signal.SIGKILL}


def test_a_straggler_is_stopped_once_the_others_have_finished(fleet: Fleet) -> None:
    outcome = fleet.run(fleet.supervisor([FINISHES, SERVES], finish_s=2.0))
    assert outcome.word == "complete"
    assert "learner-1 did not end within 2 s; next: SIGTERM" in fleet.said


def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    """kill -9 of the supervisor leaves no orphan process."""
    script = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_supervisor import Fleet, SERVES
        fleet = Fleet(Path({str(tmp_path)!r}))
        fleet.supervisor([SERVES, SERVES], evaluator=SERVES).run(lambda: None)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    names = ("learner-0", "learner-1", "evaluator", "synchronizer")
    try:
        wait_until(
            lambda: all((tmp_path / f"{name}.up").exists() for name in names), "fleet starts"
        )
        pids = [entry.pid for entry in read_fleet(tmp_path / "fleet.json").processes]
        assert len(pids) == 4
        assert not any(gone(pid) for pid in pids if pid)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: all(gone(pid) for pid in pids if pid), "children die with the supervisor")


@pytest.mark.parametrize(
    ("restart", "exit_code", "again"),
    [
        (Restart.ALWAYS, 70, True),
        (Restart.ALWAYS, 143, True),
        (Restart.ALWAYS, -9, True),
        (Restart.ALWAYS, 0, True),
        (Restart.ALWAYS, 64, False),
        (Restart.ALWAYS, 65, False),
        (Restart.ALWAYS, 74, False),
        (Restart.ALWAYS, 80, False),
        (Restart.ON_FAILURE, 80, False),
        (Restart.ON_FAILURE, -9, True),
        (Restart.ON_FAILURE, 75, True),
        (Restart.ON_FAILURE, 143, False),
        (Restart.ON_FAILURE, 0, False),
        (Restart.NEVER, -9, False),
    ],
)
def test_restart_policy(restart: Restart, exit_code: int, again: bool) -> None:
    policy = RestartPolicy(restart=restart)
    assert (policy.delay_s(exit_code, 1) is not None) is again


def test_backoff_grows_up_to_a_bound_and_ends() -> None:
    policy = RestartPolicy(max_restarts=8)
    delays = [policy.delay_s(70, number) for number in range(1, 10)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0, None]
