"""The command `diloco chaos run`: exit codes, results, signals, mistakes, several scenarios."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from diloco_fleet.chaos import timeline
from diloco_fleet.chaos.alone import alone_at
from diloco_fleet.chaos.runner import Interruption, World
from diloco_fleet.cli import main
from diloco_fleet.commands import chaos
from tests.fleet.chaos_world import World as Fleet
from tests.fleet.chaos_world import WorldInjector


@pytest.fixture
def injector() -> WorldInjector:
    return WorldInjector(Fleet())


GOOD = """
about = "a learner dies"
duration_s = 30
[steady]
expired = 0
[[faults]]
fault = "kill"
who = "learner-1"
at_s = [2]
"""


@pytest.fixture
def at_world(monkeypatch: pytest.MonkeyPatch, injector: WorldInjector) -> WorldInjector:
    """The command works on a world of a few numbers."""
    monkeypatch.setattr(chaos, "_make_injector", lambda *_: injector)
    # The picture has tests of its own, and takes its time.
    monkeypatch.setattr(timeline, "draw_timeline", lambda *_: Figure())

    def make_world(interruption: Interruption) -> World:
        return World(
            say=click.echo,
            wall=injector.world.now,
            sleep=injector.world.sleep,
            interruption=interruption,
        )

    monkeypatch.setattr(chaos, "_make_world", make_world)
    return injector


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(chaos.command, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


def test_the_command_writes_the_result_and_its_exit_code_is_the_verdict(
    at_world: WorldInjector, tmp_path: Path
) -> None:
    file, out = tmp_path / "mine.toml", tmp_path / "out"
    file.write_text(GOOD)
    code, output = invoke("run", str(file), "--out", str(out))
    assert code == 0, output
    assert {path.name for path in out.iterdir()} == {"chaos.json", "chaos.md", "chaos.png"}
    assert json.loads((out / "chaos.json").read_text())["verdict"] == "passed"
    file.write_text(GOOD.replace("expired = 0", "participation = 1.0"))
    code, output = invoke("run", str(file), "--out", str(out))
    assert code == 1, output
    assert "BROKEN  participation" in output


def test_signals_end_the_command_as_interrupted(at_world: WorldInjector, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    before = signal.getsignal(signal.SIGTERM)
    sleep = at_world.world.sleep

    def interrupted(seconds: float) -> None:
        signal.raise_signal(signal.SIGTERM)
        sleep(seconds)

    at_world.world.sleep = interrupted  # type: ignore[method-assign]
    code, output = invoke("run", str(file), "--out", str(tmp_path / "out"))
    assert code == 143
    assert "mine: interrupted, by SIGTERM" in output
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_is_ignored_stays_so(at_world: WorldInjector, tmp_path: Path) -> None:
    """Under nohup a terminal that is closed ends nothing."""
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    sleep = at_world.world.sleep

    def hung_up(seconds: float) -> None:
        signal.raise_signal(signal.SIGHUP)
        sleep(seconds)

    at_world.world.sleep = hung_up  # type: ignore[method-assign]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code, output = invoke("run", str(file), "--out", str(tmp_path / "out"))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 0, output


def test_a_fleet_that_cannot_be_left_has_a_result(
    at_world: WorldInjector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = tmp_path / "mine.toml", tmp_path / "out"
    file.write_text(GOOD)

    def leave(*_: object) -> None:
        if out.exists():
            raise DilocoError(Reason.STORAGE_FAILED, "its disk cannot be kept")

    monkeypatch.setattr(WorldInjector, "__exit__", leave)
    with pytest.raises(DilocoError, match="its disk cannot be kept"):
        invoke("run", str(file), "--out", str(out))
    assert json.loads((out / "chaos.json").read_text())["verdict"] == "passed"


def test_of_several_one_that_fails_does_not_stop_the_others(
    at_world: WorldInjector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by its verdict nor by an error; the exit code tells of either."""
    monkeypatch.chdir(tmp_path)
    Path("good.toml").write_text(GOOD)
    Path("bad.toml").write_text(GOOD.replace("expired = 0", "participation = 1.0"))
    code, output = invoke("run", "bad.toml", "good.toml", "good.toml")
    assert code == 1
    assert output.splitlines()[-3:] == ["bad: failed", "good: passed", "good: passed"]
    assert len(list((tmp_path / "runs").iterdir())) == 3
    enter = WorldInjector.__enter__
    lives = iter([DilocoError(Reason.STORAGE_FAILED, "no disk"), None])

    def entered(self: WorldInjector) -> WorldInjector:
        if (error := next(lives)) is not None:
            raise error
        return enter(self)

    monkeypatch.setattr(WorldInjector, "__enter__", entered)
    code, output = invoke("run", "bad.toml", "good.toml")
    assert code == 1
    assert output.splitlines()[-2:] == ["bad: STORAGE_FAILED", "good: passed"]


def test_nothing_begins_where_one_of_several_is_refused(
    at_world: WorldInjector, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(GOOD)
    bad.write_text(GOOD.replace("learner-1", "learner-9"))
    with pytest.raises(UsageError, match="no learner-9"):
        invoke("run", str(good), str(bad))
    assert set(at_world.done) <= {"heal all"}


def test_a_seed_that_draws_no_strike_is_refused(at_world: WorldInjector, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD.replace("at_s = [2]", "mtbf_s = 1e5"))
    with pytest.raises(UsageError, match="seed 3 draws no strike within 30 s"):
        invoke("run", str(file), "--seed", "3")


def test_a_terminal_that_is_closed_ends_nothing_half_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at_world: WorldInjector
) -> None:
    file, out = tmp_path / "mine.toml", tmp_path / "out"
    file.write_text(GOOD)

    def echo(_: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(chaos.click, "echo", echo)
    monkeypatch.setattr(
        chaos,
        "_make_world",
        lambda x: World(
            say=chaos._say, wall=at_world.world.now, sleep=at_world.world.sleep, interruption=x
        ),
    )
    code, _ = invoke("run", str(file), "--out", str(out))
    assert code == 0
    assert json.loads((out / "chaos.json").read_text())["verdict"] == "passed"


def test_all_scenarios_are_known_by_one_word(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--out takes the result of one scenario"):
        invoke("run", "all", "--out", str(tmp_path))


def test_a_fleet_takes_one_experiment_at_a_time(at_world: WorldInjector, tmp_path: Path) -> None:
    """Two would heal each other's faults, and take each other's recoveries for their own."""
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    docker = ("run", str(file), "--injector", "docker", "--project")
    attached = ("run", str(file), "--out", str(tmp_path / "out"), "--attach", str(tmp_path))
    with alone_at("project a"), alone_at(f"{tmp_path.resolve()}"):
        for arguments in ((*docker, "a", "--out", str(tmp_path / "a")), attached):
            with pytest.raises(UsageError, match="another `diloco chaos run` is at work on"):
                invoke(*arguments)
        assert invoke(*docker, "b", "--out", str(tmp_path / "b"))[0] == 0
    assert invoke(*attached)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "leader-kil"], ["did you mean leader-kill?"]),
        (["run", "learner-kill", "--attach", "no-such-run"], ["RUN_NOT_FOUND", "no-such-run"]),
        (["run", "learner-kill", "--attach", "x", "--injector", "docker"], ["--attach"]),
        (["run"], ["SCENARIO"]),
        (["run", "all", "learner-kill"], ["give it alone"]),
        (["run", "learner-kill", "--out", "."], ["already exists", "--out"]),
        (["run", "learner-kill", "--out", "/dev/null"], ["no folder", "--out"]),
        (["run", "learner-kill", "--out", "x" * 300], ["CONFIG_INVALID", "name too long"]),
        (["run", "learner-kill", "--attach", "x" * 300], ["CONFIG_INVALID", "name too long"]),
    ],
)
def test_mistakes_are_one_line_with_exit_code_64(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["chaos", *arguments])
    assert caught.value.code == 64
    [line] = capsys.readouterr().err.splitlines()
    for word in words:
        assert word in line
    assert not list(tmp_path.iterdir())


def test_no_result_is_written_over_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chaos.json").write_text("{}")
    where = ["--attach", "no-such-run", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as caught:
        main(["chaos", "run", "learner-kill", *where])
    assert caught.value.code == 64
    assert "has a result already; choose another --out" in capsys.readouterr().err


def test_a_machine_without_an_engine_is_told_so_in_one_line(tmp_path: Path) -> None:
    """In a process of its own: the SDK leaves a socket behind where it cannot connect."""
    command = ("chaos", "run", "leader-kill", "--injector", "docker")
    done = subprocess.run(
        [sys.executable, "-m", "diloco_fleet.cli", *command],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=150,
        env={**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/no-engine.sock"},
    )  # fmt: skip
    assert done.returncode == 64, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ENGINE_UNAVAILABLE: the container engine does not answer")
