"""Running a scenario: what is begun is healed, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from diloco_fleet.chaos.injector import refuse_impossible
from diloco_fleet.chaos.judge import Verdict
from diloco_fleet.chaos.result import Result
from diloco_fleet.chaos.runner import Interruption, World, run_scenario
from diloco_fleet.chaos.sample import Sample
from diloco_fleet.chaos.scenario import Fault, FaultKind, Hypothesis, Scenario
from diloco_fleet.chaos.schedule import draw_schedule
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


def test_what_is_waited_for_is_said_every_now_and_then(injector: WorldInjector) -> None:
    injector.world.away["learner-2"] = injector.world.now_s + 25.0
    _, said = run(injector, KILL)
    assert said.count("         learner-2 did not contribute") == 2
    assert not [line for line in said if "not as before" in line], "that took no ten seconds"


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


@pytest.mark.parametrize(
    "line",
    ["waiting for a steady state", "the fleet is steady", "no more faults", "everything is healed"],
)
def test_an_interruption_ends_every_phase(injector: WorldInjector, line: str) -> None:
    def interrupt(said: str, interruption: Interruption) -> None:
        if line in said:
            interruption.why = "SIGHUP"

    result, said = run(injector, FREEZE, on_line=interrupt)
    assert result.verdict is Verdict.INTERRUPTED
    assert not injector.open
    assert injector.done[-3:] == ["heal all", "settle", "metrics"]
    assert any(line in x for x in said)


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
    broken = {check.name for check in result.checks if not check.holds}
    assert broken == {"rounds", "tokens", "learners"}


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
