"""The ``diloco`` command: its surface, its settings, and what it says to bad input."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import click
import grpc
import pytest
from click.testing import CliRunner, Result

from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from diloco_fleet import cli, reporting
from diloco_fleet.commands import run as run_module
from diloco_fleet.run_files import FleetFile, ProcessEntry, RunFiles, hold_run
from diloco_fleet.status import Layout, StatusClient, StatusPoller

SURFACE = {
    "run": """--config --learners --global-steps --quorum --num-fragments --sync-interval --grace
        --merge --codec-up --codec-down --preset --batch-size --sequence-length --learning-rate
        --precision --seed --data --pace --slow-learner --restart --max-restarts --redis --standby
        --replication --device --recover --data-mode
        --evaluate-every --port --name --run-dir --resume --snapshot --log-format""",
    "prepare": "--run-dir --key-file --config",
    "status": "--run-dir --address --json --watch --insecure",
    "snapshot": "--wait --timeout --run-dir --address --insecure",
    "quorum": "--run-dir --address --insecure",
    "drain": "--reason --run-dir --address --insecure",
    "rollback": "--reason --timeout --run-dir --address --insecure",
    "chaos list": "",
    "chaos run": "--short --injector --seed --attach --project --out",
    "generate": "--run-dir --model --prompt --tokens --temperature --top-k --seed",
    "report": "",
    "version": "",
}


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def entry(arguments: tuple[str, ...]) -> None:
    """The entry point as a process sees it, exit code included."""
    cli.main(list(arguments))


def diloco(*arguments: str) -> Result:
    return CliRunner().invoke(entry, ["--", *arguments])


def refused(result: Result, reason: str, *words: str, code: int = 64) -> None:
    """One line that names the reason, and its exit code."""
    assert result.exit_code == code, result.output
    assert result.stderr.startswith(f"error: {reason}: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands_of(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command by its whole name, those within groups too."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands_of(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def test_the_surface_is_pinned() -> None:
    """A new command or flag is a decision: it changes this table."""
    found = {
        name: {option.opts[0] for option in command.params if isinstance(option, click.Option)}
        for name, command in commands_of(cli.diloco)
    }
    assert found == {name: set(flags.split()) for name, flags in SURFACE.items()}


def test_every_option_says_what_it_does() -> None:
    context = click.Context(cli.diloco)
    for name in cli.COMMANDS:
        command = cli.diloco.get_command(context, name)
        assert command is not None
        assert command.help
        for option in command.params:
            assert not isinstance(option, click.Option) or option.help, (name, option.name)


@pytest.mark.parametrize(
    ("arguments", "reason", "words"),
    [
        (["--quorum", "9"], "QUORUM_ABOVE_LEARNERS", ["quorum is 9", "4 learners"]),
        (["--learnerz", "3"], "CONFIG_UNKNOWN_KEY", ["--learners"]),
        (["--learners", "many"], "CONFIG_INVALID", ["--learners"]),
        (["--learners", "0"], "CONFIG_INVALID", ["num_learners is 0"]),
        (["--preset", "tinny"], "CONFIG_INVALID", ["did you mean 'tiny'"]),
        (["--global-steps", "-1"], "CONFIG_INVALID", ["total_global_steps is -1"]),
        (["--num-fragments", "2"], "CONFIG_CONFLICT", ["num_fragments is 2", "overlap"]),
        (["--slow-learner", "2:1.5"], "CONFIG_INVALID", ["'2:1.5'"]),
        (["--slow-learner", "2:0"], "CONFIG_INVALID", ["'2:0'"]),
        (["--slow-learner", "half"], "CONFIG_INVALID", ["'half'"]),
        (["--slow-learner", "4:0.5"], "CONFIG_INVALID", ["0 to 3"]),
        (["--restart", "sometimes"], "CONFIG_INVALID", ["always, on-failure, never"]),
        (["--pace", "-1"], "CONFIG_INVALID", ["pace is -1.0"]),
        (["--codec-up", "fp8"], "CONFIG_INVALID", ["fp8"]),
        (["--name", "a b"], "CONFIG_INVALID", ["'a b'"]),
        (["--device", "cuda:99"], "DEVICE_UNAVAILABLE", ["cuda:99"]),
        (["--device", "abacus"], "CONFIG_INVALID", ["abacus"]),
        (["--resume"], "CONFIG_INVALID", ["--name or --run-dir"]),
        (["--snapshot", "latest"], "CONFIG_CONFLICT", ["--resume"]),
        (["--resume", "--name", "gone"], "RUN_NOT_FOUND", ["runs/gone"]),
        (["--resume", "--name", "x", "--data", "y"], "CONFIG_CONFLICT", ["--data"]),
        (["--config", "none.toml"], "CONFIG_INVALID", ["none.toml"]),
        (["--data", "/no/such/text"], "DATA_MISSING", ["/no/such/text"]),
    ],
)
def test_run_refuses_bad_settings(
    arguments: list[str], reason: str, words: list[str], somewhere: Path
) -> None:
    refused(diloco("run", "--device", "cpu", *arguments), reason, *words)
    assert not list(somewhere.rglob("config.toml")), "nothing is left behind"


def test_run_refuses_unknown_settings_in_a_file_with_the_nearest_name(somewhere: Path) -> None:
    (somewhere / "f.toml").write_text("[run]\nquorom = 2\n")
    refused(diloco("run", "--config", "f.toml"), "CONFIG_UNKNOWN_KEY", "quorom", "quorum")
    (somewhere / "f.toml").write_text("[fleeet]\npace = 2\n")
    refused(diloco("run", "--config", "f.toml"), "CONFIG_UNKNOWN_KEY", "fleeet", "fleet")
    (somewhere / "f.toml").write_text("[trainer]\nnum_shards = 2\n")
    refused(diloco("run", "--config", "f.toml"), "CONFIG_CONFLICT", "num_shards is 2")
    (somewhere / "f.toml").write_text('[run]\ntrainer_json = "{}"\n')
    refused(diloco("run", "--config", "f.toml"), "CONFIG_CONFLICT", "[trainer]")


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "DATA_EMPTY"), (b"\x00\xff" * 50, "DATA_BINARY")]
)
def test_run_refuses_data_that_is_no_text_and_leaves_nothing(
    content: bytes, reason: str, somewhere: Path
) -> None:
    (somewhere / "text.txt").write_bytes(content)
    refused(diloco("run", "--device", "cpu", "--name", "a", "--data", "text.txt"), reason)
    assert not (somewhere / "runs" / "a").exists(), "the same name can be used again"


def test_run_refuses_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        refused(diloco("run", "--device", "cpu", "--port", port), "PORT_IN_USE", port)


def test_run_refuses_a_directory_that_is_in_use(somewhere: Path) -> None:
    used = somewhere / "runs" / "a"
    used.mkdir(parents=True)
    (used / "precious").touch()
    refused(diloco("run", "--device", "cpu", "--name", "a"), "CONFIG_CONFLICT", "runs/a")
    assert (used / "precious").exists()


def test_resume_refuses_a_run_that_is_running(somewhere: Path) -> None:
    (somewhere / "config.toml").write_text("")
    with hold_run(RunFiles(somewhere)):
        result = diloco("run", "--resume", "--run-dir", ".")
    refused(result, "CONFIG_CONFLICT", "a fleet is running")


def test_status_without_a_fleet(somewhere: Path) -> None:
    refused(diloco("status"), "RUN_NOT_FOUND", "diloco run")
    refused(diloco("status", "--run-dir", "x"), "RUN_NOT_FOUND", "fleet.json")
    refused(diloco("status", "--address", "nowhere"), "CONFIG_INVALID", "nowhere")
    refused(diloco("status", "--address", "10.9.8.7:1"), "CONFIG_CONFLICT", "--insecure")
    refused(diloco("status", "--address", "127.0.0.1:1"), "UNAVAILABLE", "127.0.0.1:1", code=75)
    refused(diloco("status", "--address", "a:1", "--run-dir", "x"), "CONFIG_CONFLICT")
    (somewhere / "fleet.json").write_text("[]")
    refused(diloco("status", "--run-dir", "."), "RUN_NOT_FOUND", "does not describe a fleet")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("running", "does not answer right now: it is starting or being restarted, and the learn"),
        ("draining", "the fleet drains"),
        ("finishing", "the run is complete"),
        ("ended", "its report is being written"),
    ],
)
def test_status_of_a_fleet_whose_synchronizer_is_down(
    somewhere: Path, state: str, words: str
) -> None:
    """The fleet is at work all the same, which is more than no answer."""
    silent = dataclasses.replace(fleet_file("127.0.0.1:1"), state=state)
    silent.write(somewhere / "fleet.json")
    refused(diloco("status", "--run-dir", "."), "UNAVAILABLE", "127.0.0.1:1", code=75)
    with hold_run(RunFiles(somewhere)):
        result = diloco("status", "--run-dir", ".")
        as_json = diloco("status", "--run-dir", ".", "--json")
    assert result.exit_code == as_json.exit_code == 75
    assert words in result.output
    assert re.search(r"learner-0 +running +3", result.output)
    values = json.loads(as_json.output)
    assert values["status"] is None
    assert values["fleet"]["processes"][0]["restarts"] == 3


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["version"], 0),
        (["status", "--help"], 0),
        (["status"], 75),
        (["run", "--quorum", "2", "--resume", "--name", "amber"], 64),
        (["run", "--resume", "--run-dir=runs/amber"], 64),
    ],
)
def test_who_only_looks_does_not_wait_for_torch(
    somewhere: Path, arguments: list[str], code: int
) -> None:
    """torch takes seconds to import; here it cannot be imported at all."""
    root = somewhere / "runs" / "amber"
    root.mkdir(parents=True)
    fleet_file("127.0.0.1:1").write(root / "fleet.json")
    script = "import sys; sys.modules['torch'] = None; from diloco_fleet.cli import main; main()"
    with hold_run(RunFiles(root)):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
        )
    assert done.returncode == code, done.stderr
    assert done.stdout or "a fleet is running" in done.stderr


def test_the_list_of_commands_says_what_their_own_help_says() -> None:
    context = click.Context(cli.diloco)
    for name, summary in cli.COMMANDS.items():
        command = cli.diloco.get_command(context, name)
        assert command is not None
        assert command.help is not None
        assert command.help.partition("\n")[0] == summary
        assert f"{name} " in diloco("--help").output


def test_generate_and_report_without_a_run() -> None:
    refused(diloco("generate"), "RUN_NOT_FOUND")
    refused(diloco("generate", "--model", "x"), "RUN_NOT_FOUND", "x")
    refused(diloco("generate", "--model", "x", "--run-dir", "y"), "CONFIG_CONFLICT")
    refused(diloco("report", "x"), "RUN_NOT_FOUND", "no run in x or runs/x")
    refused(diloco("nonsense"), "CONFIG_INVALID", "nonsense")


@pytest.mark.parametrize("run", ["runs/amber", "amber"])
def test_report_takes_a_run_directory_or_the_id_of_a_run(
    somewhere: Path, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    files = RunFiles(somewhere / "runs" / "amber")
    files.metrics.mkdir(parents=True)
    files.config.touch()
    monkeypatch.setattr(reporting, "plot_losses", lambda *_, **__: None)
    result = diloco("report", run)
    assert result.exit_code == 0, result.output
    assert files.report.is_file()


def test_version() -> None:
    result = diloco("version")
    assert result.exit_code == 0
    assert result.output.startswith("decoupled-diloco ")


class _Admin(admin_pb2_grpc.AdminServiceServicer):
    def GetStatus(self, request: Any, context: Any) -> admin_pb2.GetStatusResponse:  # noqa: N802
        return admin_pb2.GetStatusResponse(run_id="amber", state="complete", global_step=2**40)

    def GetRun(self, request: Any, context: Any) -> admin_pb2.GetRunResponse:  # noqa: N802
        return admin_pb2.GetRunResponse(
            settings=types_pb2.RunSettings(num_fragments=3),
            tensors=[
                types_pb2.TensorSpec(name="a", shape=[3, 4], aliases=["b"]),
                types_pb2.TensorSpec(name="c", shape=[5]),
            ],
        )


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(_Admin(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def fleet_file(address: str, started: float = 1.0) -> FleetFile:
    return FleetFile(
        run_id="amber",
        address=address,
        pid=1,
        state="running",
        started=started,
        processes=(
            ProcessEntry(
                name="learner-0", pid=77, state="running", restarts=3, exit_code=-9, log="l"
            ),
        ),
        pages=("http://127.0.0.1:6/",),
    )


def test_status_finds_the_newest_running_fleet_without_arguments(
    address: str, somewhere: Path
) -> None:
    for name, where, started in (("old", "127.0.0.1:1", 1.0), ("new", address, 2.0)):
        (somewhere / "runs" / name).mkdir(parents=True)
        fleet_file(where, started).write(somewhere / "runs" / name / "fleet.json")
    ended = somewhere / "runs" / "ended"
    ended.mkdir()
    fleet_file("127.0.0.1:1", 3.0).write(ended / "fleet.json")
    runs = [RunFiles(somewhere / "runs" / name) for name in ("old", "new")]
    with hold_run(runs[0]), hold_run(runs[1]):
        result = diloco("status", "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.output)
    assert values["address"] == address
    assert values["status"]["global_step"] == 2**40
    assert values["fleet"]["processes"][0]["pid"] == 77
    assert values["fleet"]["pages"] == ["http://127.0.0.1:6/"]
    with hold_run(runs[1]):
        assert "status page: http://127.0.0.1:6/" in diloco("status").output


def test_status_as_a_table_and_watching_until_complete(address: str) -> None:
    table = diloco("status", "--address", address)
    assert "amber" in table.output
    watched = diloco("status", "--address", address, "--watch")
    assert watched.exit_code == 0
    assert f"step {2**40}" in watched.output or "waiting for the synchronizer" in watched.output


def test_the_layout_counts_tied_tensors_once(address: str) -> None:
    client = StatusClient(address)
    assert client.layout() == Layout(num_parameters=17, num_fragments=3)
    client.close()


def test_the_poller_says_that_the_synchronizer_is_away() -> None:
    with StatusPoller("127.0.0.1:1") as poller:
        give_up = time.monotonic() + 60
        while not poller.snapshot().away_s and time.monotonic() < give_up:
            time.sleep(0.01)
        assert poller.snapshot().away_s > 0.0
        assert poller.snapshot().status is None


def test_the_run_command_is_the_one_of_the_group() -> None:
    assert cli.diloco.get_command(click.Context(cli.diloco), "run") is run_module.command
