"""Running a scenario: what is begun is healed, whatever happens on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from diloco_fleet.chaos.injector import refuse_impossible
from diloco_fleet.chaos.judge import Verdict
from diloco_fleet.chaos.result import Result
from diloco_fleet.chaos.runner import Interruption, World, run_scenario
from diloco_fleet.chaos.sample import Sample
from diloco_fleet.chaos.scenario import Fault, FaultKind, Hypothesis, Scenario
from diloco_fleet.chaos.schedule import draw_schedule
from diloco_fleet.cli import main
from diloco_fleet.commands import chaos
from diloco_fleet.metrics import RunMetrics, Step
from tests.fleet.chaos_world import World as Fleet
from tests.fleet.chaos_world import WorldInjector


def scenario(*faults: Fault) -> Scenario:
    return Scenario(
        name="test", about="", duration_s=30.0, settle_s=20.0, steady=Hypothesis(expired=0),
        faults=faults,
    )  # fmt: skip


FREEZE = Fault(fault=FaultKind.FREEZE, who="learner-1", at_s=(2.0,), duration_s=500.0)
KILL = Fault(fault=FaultKind.KILL, who="random learner", at_s=(2.0, 12.0))
EMPTY = Fault(fault=FaultKind.REDIS_EMPTY, at_s=(2.0,))


def run(
    injector: WorldInjector,
    *faults: Fault,
    on_line: Callable[[str, Interruption], None] = lambda _line, _interruption: None,
) -> tuple[Result, list[str]]:
    interruption, said = Interruption(), []

    def say(line: str) -> None:
        said.append(line)
        on_line(line, interruption)

    chosen = scenario(*faults)
    world = World(
        say=say,
        wall=injector.world.now,
        sleep=injector.world.sleep,
        interruption=interruption,
    )
    result, _ = run_scenario(chosen, draw_schedule(chosen, 0), injector, world, seed=0)
    return result, said


@pytest.fixture
def injector() -> WorldInjector:
    return WorldInjector(Fleet())


def test_a_fleet_that_holds_passes(injector: WorldInjector) -> None:
    result, said = run(injector, KILL)
    assert result.verdict is Verdict.PASSED, said
    assert list(result.recovery_s) == ["kill 0", "kill 1"]
    assert injector.done[-3:] == ["heal all", "settle", "metrics"]


def test_what_lasts_is_healed_at_the_end(injector: WorldInjector) -> None:
    result, _ = run(injector, FREEZE)
    assert injector.done == ["freeze learner-1", "heal", "heal all", "settle", "metrics"]
    assert result.verdict is Verdict.PASSED


def test_steps_that_are_under_way_at_the_end_are_waited_for(injector: WorldInjector) -> None:
    """A fleet that goes on has not written them yet, and nobody would have been stepping."""

    def written(until: float) -> RunMetrics:
        step = Step(
            time=until, global_step=1, loss=1.0, num_tokens=1, step_s=1.0, overhead_s=0.0, life=0
        )
        return RunMetrics(steps={"learner-0": (step,)})

    injector.written = [written(1.0), written(2.0), written(9e9)]
    run(injector, KILL)
    assert injector.done.count("metrics") == 3


def test_an_interruption_heals_at_once_and_is_no_verdict(injector: WorldInjector) -> None:
    def interrupt(line: str, interruption: Interruption) -> None:
        if "freeze learner-1" in line:
            interruption.why = "SIGTERM"

    result, _ = run(injector, FREEZE, on_line=interrupt)
    assert result.verdict is Verdict.INTERRUPTED
    assert "SIGTERM" in result.stopped
    assert injector.done == ["freeze learner-1", "heal", "heal all", "settle", "metrics"]
    assert not injector.open


def test_a_runner_that_fails_half_way_heals_first(injector: WorldInjector) -> None:
    def blind(line: str, _: Interruption) -> None:
        injector.broken = injector.broken or "freeze learner-1" in line

    with pytest.raises(OSError, match="the eye is broken"):
        run(injector, FREEZE, on_line=blind)
    assert injector.done == ["freeze learner-1", "heal all"]
    assert not injector.open


def test_a_fault_that_cannot_be_done_after_all_fails_and_the_rest_goes_on(
    injector: WorldInjector,
) -> None:
    result, _ = run(injector, EMPTY, KILL)
    assert result.verdict is Verdict.FAILED
    assert [check.found for check in result.checks if not check.holds] == ["Redis is not there"]
    assert sum(line.startswith("kill") for line in injector.done) == 2


def test_what_cannot_be_healed_is_said_and_never_passes(injector: WorldInjector) -> None:
    injector.stubborn = {0}
    result, said = run(injector, FREEZE)
    assert result.verdict is Verdict.FAILED
    assert result.unhealed == ("strike 0",)
    assert any("not healed: strike 0" in line for line in said)


def test_a_fleet_that_wrote_nothing_does_not_pass(injector: WorldInjector) -> None:
    injector.written = [RunMetrics()] * 99
    result, _ = run(injector, KILL)
    assert result.verdict is Verdict.FAILED
    assert {check.name for check in result.checks if not check.holds} == {"rounds", "tokens"}


def test_a_scenario_of_which_nothing_happened_does_not_pass(injector: WorldInjector) -> None:
    """Chance drew strikes, and there was nobody to strike: that breaks nothing, and shows none."""
    nobody = Fault(fault=FaultKind.KILL, who="random learner", mtbf_s=5.0, spare=3)
    result, _ = run(injector, nobody)
    assert result.verdict is Verdict.FAILED
    assert [check.name for check in result.checks if not check.holds] == ["strikes"]


def test_a_fleet_that_nobody_can_look_at_any_more_ends_as_aborted(injector: WorldInjector) -> None:
    def gone() -> Sample:
        raise DilocoError(Reason.ENGINE_UNAVAILABLE, "the engine does not answer")

    def blind(line: str, _: Interruption) -> None:
        if "freeze learner-1" in line:
            injector.look = gone  # type: ignore[method-assign]

    result, _ = run(injector, FREEZE, on_line=blind)
    assert result.verdict is Verdict.ABORTED
    assert "the engine does not answer" in result.stopped
    assert not injector.open


def test_a_fleet_that_cannot_settle_has_a_result_that_says_so(injector: WorldInjector) -> None:
    def settle() -> None:
        raise DilocoError(Reason.STORAGE_FAILED, "the disk is gone")

    injector.settle = settle  # type: ignore[method-assign]
    result, said = run(injector, KILL)
    assert result.verdict is Verdict.FAILED
    assert result.unreadable == ("the disk is gone",)
    assert "the disk is gone" in said


def test_what_cannot_be_done_is_refused_before_anything_begins(injector: WorldInjector) -> None:
    lost = Fault(fault=FaultKind.LOSS, who="learner-1", share=0.1, at_s=(2.0,), duration_s=5.0)
    with pytest.raises(UsageError, match="cannot do it: a world loses no packets") as caught:
        refuse_impossible(injector, scenario(lost))
    assert caught.value.reason is Reason.FAULT_IMPOSSIBLE
    ghost = Fault(fault=FaultKind.KILL, who="learner-9", at_s=(2.0,))
    with pytest.raises(UsageError, match="no learner-9") as caught:
        refuse_impossible(injector, scenario(ghost))
    assert caught.value.reason is Reason.TARGET_NOT_FOUND
    refuse_impossible(injector, scenario(KILL, FREEZE, EMPTY))


# -- the command ----------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "leader-kil"], ["did you mean leader-kill?"]),
        (["run", "learner-kill", "--attach", "no-such-run"], ["RUN_NOT_FOUND", "no-such-run"]),
        (["run", "learner-kill", "--attach", "x", "--injector", "docker"], ["--attach"]),
        (["run"], ["SCENARIO"]),
        (["run", "learner-kill", "--out", "."], ["already exists", "--out"]),
        (["run", "learner-kill", "--out", "/dev/null"], ["no folder", "--out"]),
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
