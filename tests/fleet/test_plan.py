"""What ``diloco run`` starts fits the command lines of what it starts, and settings resolve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from decoupled_diloco.channel import is_loopback
from decoupled_diloco.config import load_settings
from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.settings import RunSettings
from diloco_fleet.fleet_settings import Resolved, resolve
from diloco_fleet.plan import child_environment, make_plan
from diloco_fleet.prepare import existing_run, new_run, with_corpus, write_run
from diloco_fleet.process import ProcessSpec
from diloco_fleet.run_files import RunFiles, find_run, hold_run, is_running, read_fleet
from learner_client.cli import cli as learner_cli
from learner_client.settings import EvaluatorSettings, LearnerSettings
from learner_client.train.settings import TrainSettings
from synchronizer_server.cli import cli as synchronizer_cli
from synchronizer_server.settings import ServerSettings


def settled(**flags: object) -> Resolved:
    return resolve({"device": "cpu", **flags}, {}, None, default_run_id="amber")


def parsed(group: click.Group, spec: ProcessSpec, module: str, cls: type[Any]) -> Any:
    """The settings that a process reads from the command that is planned for it."""
    assert spec.command[1:3] == ("-m", module)
    name, *arguments = spec.command[3:]
    command = group.commands[name]
    flags = command.make_context(name, list(arguments)).params
    environ = {k: v for k, v in spec.environment.items() if k.startswith("DILOCO_")}
    return load_settings(cls, flags=flags, environ=environ, file=None).value


def test_every_process_understands_what_it_is_started_with(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    resolved = settled(
        num_learners=3,
        quorum=2,
        grace=False,
        pace=0.25,
        slow_learner=("2:0.5",),
        evaluate_every=7,
        redis="redis://:secret@localhost:6379",
    )
    plan = make_plan(resolved, files, {"DILOCO_QUORUM": "9", "HOME": "/h"}, log_format="json")

    server = parsed(
        synchronizer_cli, plan.synchronizers[0], "synchronizer_server.cli", ServerSettings
    )
    assert (server.address, server.store) == (plan.address, files.store)
    assert server.journal == files.metrics_of("synchronizer")
    assert plan.pages == (f"http://{server.http_address}/",)
    assert is_loopback(server.http_address)
    assert server.http_address != server.address
    assert server.redis == "redis://:secret@localhost:6379"
    assert not any("secret" in word for word in plan.synchronizers[0].command)
    assert server.log_format == "json"
    run = parsed(
        synchronizer_cli,
        ProcessSpec(
            name="synchronizer",
            command=plan.synchronizers[0].command,
            log=files.root,
            environment={},
        ),
        "synchronizer_server.cli",
        RunSettings,
    )
    assert run == resolved.run.value

    learners = [
        parsed(learner_cli, spec, "learner_client.cli", LearnerSettings) for spec in plan.learners
    ]
    assert [entry.learner_id for entry in learners] == ["learner-0", "learner-1", "learner-2"]
    assert {entry.pace for entry in learners} == {0.25}
    assert [entry.slow for entry in learners] == [1.0, 1.0, 0.5]
    assert {entry.address for entry in learners} == {plan.address}
    evaluator = parsed(learner_cli, plan.evaluator, "learner_client.cli", EvaluatorSettings)
    assert (evaluator.every, evaluator.run_dir) == (7, files.root)
    assert not plan.synchronizers[0].finishes
    assert plan.evaluator.finishes


def test_processes_share_the_cores_and_get_no_settings_from_the_environment() -> None:
    environment = child_environment({"DILOCO_PACE": "3", "PATH": "/bin"}, num_learners=4096)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["PATH"] == "/bin"
    assert "DILOCO_PACE" not in environment
    assert child_environment({"OMP_NUM_THREADS": "7"}, num_learners=1)["OMP_NUM_THREADS"] == "7"


def test_the_trainer_follows_the_run() -> None:
    resolved = settled(num_learners=6, total_global_steps=50)
    trainer = resolved.trainer.value
    assert (trainer.num_shards, trainer.total_global_steps, trainer.warmup_steps) == (6, 50, 5)
    assert resolved.trainer.describe() == [], "what is implied is no choice of the user"
    default = settled()
    assert default.run.value.total_global_steps == TrainSettings().total_global_steps
    assert default.run.value.run_id == "amber"


def test_a_run_without_end_keeps_a_schedule() -> None:
    resolved = settled(total_global_steps=0)
    assert resolved.run.value.total_global_steps == 0
    assert resolved.trainer.value.total_global_steps == TrainSettings().total_global_steps


@pytest.mark.parametrize(
    ("schedule", "flags", "environ", "expected"),
    [
        (800, {"total_global_steps": 1200}, {}, (1200, 40)),
        (800, {}, {"DILOCO_TOTAL_GLOBAL_STEPS": "1200"}, (1200, 40)),
        (800, {"total_global_steps": 30}, {}, (30, 3)),
        (800, {}, {}, (800, 40)),
        (800, {"total_global_steps": 0}, {}, (800, 40)),
        (900, {"total_global_steps": 1200}, {}, (900, 40)),
    ],
)
def test_the_schedule_of_a_resumed_run_follows_unless_it_had_a_length_of_its_own(
    tmp_path: Path,
    schedule: int,
    flags: dict[str, object],
    environ: dict[str, str],
    expected: tuple[int, int],
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        "[run]\ntotal_global_steps = 800\n"
        f"[trainer]\ntotal_global_steps = {schedule}\nwarmup_steps = 40\n"
    )
    resolved = resolve(flags, environ, file, default_run_id="x")
    trainer = resolved.trainer.value
    assert (trainer.total_global_steps, trainer.warmup_steps) == expected
    said = [line for line in resolved.describe() if "schedule" in line]
    followed = [f"the schedule of the learning rate follows: {expected[0]} global steps"]
    assert said == (followed if expected[0] != schedule else [])


def test_flag_before_environment_before_file(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text(
        "[run]\nquorum = 2\nnum_learners = 8\n[trainer]\nseed = 5\n[fleet]\npace = 0.5\n"
    )
    environ = {"DILOCO_QUORUM": "3", "DILOCO_PACE": "0.25", "DILOCO_TOTAL_GLOBAL_STEPS": "60"}
    resolved = resolve({"quorum": 4}, environ, file, default_run_id="x")
    assert resolved.run.value.quorum == 4
    assert resolved.run.value.num_learners == 8
    assert resolved.fleet.value.pace == 0.25
    assert resolved.trainer.value.seed == 5
    assert resolved.trainer.value.total_global_steps == 60
    assert "run.quorum = 4  (flag)" in resolved.describe()
    assert "fleet.pace = 0.25  (env)" in resolved.describe()


def test_what_is_written_loads_again(tmp_path: Path) -> None:
    """config.toml of a run is enough to resume it."""
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April. " * 400)
    resolved = settled(data=(str(text),), slow_learner=("1:0.5",), redis="redis://:pw@h:1")
    with new_run(tmp_path / "run") as files:
        written = with_corpus(files, resolved)
        write_run(files, written)
    assert len(written.trainer.value.corpus_hash) == 64
    again = resolve({}, {}, files.config, default_run_id="x")
    assert again.run.value == written.run.value
    assert again.trainer.value == written.trainer.value
    assert again.fleet.value.slow_learner == ("1:0.5",)
    assert "pw" not in files.config.read_text()
    assert len(again.describe()) < 8, "a resumed run does not list the defaults"
    for name in ("corpus_hash", "num_shards"):
        assert not any(name in line for line in again.describe()), "nobody chose these"
    assert TrainSettings.from_json(files.trainer.read_text()) == written.trainer.value
    assert with_corpus(existing_run(files.root), again).trainer.value == written.trainer.value


def test_a_corpus_that_was_changed_is_not_resumed(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April. " * 400)
    resolved = settled(data=(str(text),))
    with new_run(tmp_path / "run") as files:
        written = with_corpus(files, resolved)
    content = bytearray((files.data / "train.bin").read_bytes())
    content[0] ^= 1
    (files.data / "train.bin").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        with_corpus(files, written)
    assert caught.value.reason is Reason.DATA_MISMATCH


def test_a_run_directory_has_one_fleet(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert not is_running(files)
    with hold_run(files):
        assert is_running(files)
        with pytest.raises(UsageError, match="a fleet is running"), hold_run(files):
            pass
        with pytest.raises(UsageError, match="no run under"):
            find_run(tmp_path, running=False)
    assert not is_running(files)


def test_fleet_json_that_is_damaged_is_refused(tmp_path: Path) -> None:
    for content in ("", "[]", '{"processes": [{}]}', '{"processes": 3}', "[" * 100_000):
        (tmp_path / "fleet.json").write_text(content)
        with pytest.raises(UsageError, match="RUN_NOT_FOUND"):
            read_fleet(tmp_path / "fleet.json")


def test_more_learners_than_a_machine_can_run_are_refused_before_anything_starts(tmp_path) -> None:
    with pytest.raises(UsageError, match="at most 256 learners") as caught:
        make_plan(settled(num_learners=257), RunFiles(tmp_path), {})
    assert caught.value.reason is Reason.CONFIG_INVALID
