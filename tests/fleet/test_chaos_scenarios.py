"""Scenarios as files: what is shipped is right, what is wrong is refused by name, seeds decide."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from decoupled_diloco.errors import EXIT_USAGE, DilocoError, Reason, UsageError
from diloco_fleet import fleet_settings
from diloco_fleet.chaos import scenario_file
from diloco_fleet.chaos.own_fleet import resolve_shape
from diloco_fleet.chaos.scenario import FaultKind, Scenario
from diloco_fleet.chaos.scenario_file import SHIPPED, load_scenario, parse_scenario
from diloco_fleet.chaos.schedule import draw_schedule
from diloco_fleet.chaos.targets import (
    check_exists,
    check_target,
    resolve_groups,
    resolve_target,
)

GOOD = """
about = "a learner dies"
duration_s = 60
[steady]
rounds_lost = 0
[[faults]]
fault = "kill"
who = "random learner"
at_s = [10, 20]
short = { at_s = [1] }
[short]
duration_s = 5
"""
NAMES = {"learner-0", "learner-1", "learner-10", "synchronizer-0", "synchronizer-1", "redis"}


def parse(text: str, *, short: bool = False) -> Scenario:
    return parse_scenario(text, "test", where="test.toml", short=short)


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def cut(between: str) -> str:
    """A partition between groups."""
    lasting = changed('"kill"', f'"partition"\nbetween = {between}\nduration_s = 3')
    return lasting.replace('who = "random learner"\n', "")


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_can_be_run(name: str, short: bool) -> None:
    """Settings included; and a Poisson process that draws nothing would show nothing."""
    scenario = load_scenario(name, short=short)
    assert draw_schedule(scenario, 0)
    assert scenario.steady.rounds_lost == 0
    resolve_shape(scenario.fleet, "test", {})


def test_every_shipped_file_has_a_name_that_is_known() -> None:
    folder = Path(scenario_file.__file__).parent / "scenarios"
    assert sorted(path.stem for path in folder.glob("*.toml")) == sorted(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_short_forms_take_less_than_a_minute_of_faults(name: str) -> None:
    short = load_scenario(name, short=True)
    assert short.duration_s < min(60.0, load_scenario(name).duration_s)
    assert {fault.fault for fault in short.faults} == {
        fault.fault for fault in load_scenario(name).faults
    }


def test_the_short_form_replaces_keys() -> None:
    assert parse(GOOD).faults[0].at_s == (10.0, 20.0)
    short = parse(GOOD, short=True)
    assert (short.duration_s, short.faults[0].at_s) == (5.0, (1.0,))


DEEP = ".".join("a" * 3000)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (changed("duration_s = 60\n[steady]", "[steady]"), ["no end", "duration_s"]),
        (changed("duration_s = 60\n[steady]", "duration_s = inf\n[steady]"), ["no end"]),
        (changed('"kill"', '"kil"'), ["unknown fault kil", "did you mean kill?"]),
        (changed("rounds_lost", "round_lost"), ["[steady]", "did you mean rounds_lost?"]),
        (changed("who =", "whom ="), ["fault 1", "did you mean who?"]),
        (changed("random learner", "random lerner"), ["nobody is called", "'random learner'"]),
        (changed("random learner", "the donor"), ["donor", "mid_recovery"]),
        (changed("at_s = [10, 20]", "mtbf_s = 3\nat_s = [10, 20]"), ["give one of"]),
        (changed("at_s = [10, 20]", "at_s = [10, 70]"), ["70 s is after its end"]),
        (changed("at_s = [10, 20]", "first_s = 1\nat_s = [10, 20]"), ["first_s", "no use"]),
        (changed("at_s = [10, 20]", "at_s = [nan]"), ["at_s is nan"]),
        (changed("at_s = [10, 20]", "at_s = [-1]"), ["at_s is -1"]),
        (changed("at_s = [10, 20]", f"at_s = [1{'0' * 400}]"), ["more than 64 bits"]),
        (changed("rounds_lost = 0", f"rounds_lost = 1{'0' * 400}"), ["more than 64 bits"]),
        (changed("at_s = [10, 20]", "mtbf_s = 0.1").replace("60", "6000"), ["about 60000 strikes"]),
        (changed("at_s = [10, 20]", f"at_s = {[1] * 10001}"), ["10001 strikes"]),
        (changed('"kill"', '"clock-skew"\nduration_s = 3\noffset_s = 0'), ["no wrong clock"]),
        (changed("short = { at_s", "short = { at_z"), ["short: unknown key at_z", "at_s?"]),
        (cut('["learner-0", "learner-0"]'), ["learner-0 is named twice"]),
        (cut('["learner-0, redis", "redis, learner-1"]'), ["redis is named twice"]),
        (cut('["rest, learner-0", "learner-1"]'), ["the rest", "alone"]),
        (cut('["rest", "rest"]'), ["one group at most"]),
        (cut('["the donor", "rest"]'), ["donor", "mid_recovery"]),
        (cut('["learner-0", " , "]'), ["two groups"]),
        (changed("at_s = [10, 20]", "at_s = 10"), ["at_s is 10; expected a list"]),
        (changed("at_s = [10, 20]", 'on = "leader-chang"'), ["leader-change"]),
        (changed('"kill"', '"freeze"'), ["duration_s is missing"]),
        (changed('"kill"', '"partition"'), ["two groups"]),
        (changed('"kill"', '"disk-full"\nduration_s = 3'), ["only synchronizers have a store"]),
        (changed('"kill"', '"latency"\nduration_s = 3'), ["delay_s is missing"]),
        (changed('"kill"', '"kill"\nmbit_per_s = 3'), ["mbit_per_s", "no use"]),
        (changed("rounds_lost = 0\n", ""), ["no query"]),
        (changed("rounds_lost = 0", "uptime = 1.5"), ["uptime is 1.5"]),
        (changed("[short]\nduration_s", "[short]\nduration"), ["[short]", "did you mean"]),
        (GOOD.split("[[faults]]", maxsplit=1)[0], ["no fault"]),
        ("duration_s = = 3", ["test.toml"]),
        (changed('"random learner"', f"{{ {DEEP} = 1 }}"), ["within each other"]),
        (changed("[short]", f"[short]\nfleet.{DEEP} = 1"), ["within each other"]),
        (changed("[steady]", f"[fleet.run]\nsync_interval.{DEEP} = 1\n[steady]"), ["each other"]),
    ],
)
def test_what_is_wrong_is_refused_by_name(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.exit_code == EXIT_USAGE
    for word in ["test.toml", *words]:
        assert word in caught.value.message


def test_an_unknown_scenario_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean leader-kill"):
        load_scenario("leader-kil")
    with pytest.raises(UsageError, match="cannot be read") as caught:
        load_scenario(str(tmp_path / "none.toml"))
    assert caught.value.reason is Reason.CONFIG_INVALID


def test_sections_of_settings_are_those_of_diloco_run() -> None:
    assert tuple(fleet_settings.SECTIONS) == scenario_file.SECTIONS


def test_settings_of_the_fleet_are_those_of_diloco_run() -> None:
    shape = parse(GOOD + "[fleet]\nlearners = 2\nstandby = false\n[fleet.run]\nquorum = 2\n").fleet
    resolved = resolve_shape(shape, "test", {})
    assert (resolved.run.value.num_learners, resolved.run.value.quorum) == (2, 2)
    wrong = parse(GOOD + "[fleet.run]\nquorun = 2\n").fleet
    with pytest.raises(UsageError, match="did you mean quorum"):
        resolve_shape(wrong, "test", {})
    for line in ("quorum = { a = 1 }", '"a b\\n" = 1', "quorum = nan"):
        with pytest.raises(UsageError) as caught:
            resolve_shape(parse(GOOD + f"[fleet.run]\n{line}\n").fleet, "test", {})
        assert "[fleet] of the scenario" in caught.value.message, "and no file that is gone"
    own = parse(GOOD + "[fleet.run]\nnum_learners = 2\n").fleet
    with pytest.raises(UsageError, match="scenario's own"):
        resolve_shape(own, "test", {})


# -- schedules ------------------------------------------------------------------------------------


def test_a_seed_decides_the_schedule() -> None:
    churn = load_scenario("learner-churn")
    assert draw_schedule(churn, 3) == draw_schedule(churn, 3)
    assert draw_schedule(churn, 3) != draw_schedule(churn, 4)


def test_one_fault_does_not_move_where_another_is_changed() -> None:
    everything = load_scenario("everything")
    kills = [x for x in draw_schedule(everything, 1) if x.fault_index == 0]
    text = Path(scenario_file.__file__).parent / "scenarios" / "everything.toml"
    other = parse(text.read_text().replace("at_s = [20, 200]", "at_s = [20, 60, 200]"))
    again = [x for x in draw_schedule(other, 1) if x.fault_index == 0]
    assert [(x.at_s, x.pick) for x in kills] == [(x.at_s, x.pick) for x in again]


def test_a_poisson_process_has_gaps_of_its_mean_that_are_drawn_anew() -> None:
    """Exponential: mean and deviation are alike, and no gap is the one before."""
    text = changed("at_s = [10, 20]", "mtbf_s = 20").replace("duration_s = 60", "duration_s = 1e5")
    times = [strike.at_s for strike in draw_schedule(parse(text), 0)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(20.0, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(20.0, rel=0.1)
    assert len(set(gaps)) == len(gaps)
    assert times == sorted(times)


# -- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "pick", "found"),
    [
        ("learner-1", 0.0, ("learner-1",)),
        ("learner-7", 0.0, ()),
        ("random learner", 0.0, ("learner-0",)),
        ("random learner", 0.99, ("learner-10",)),
        ("every learner", 0.0, ("learner-0", "learner-1", "learner-10")),
        ("the leader", 0.0, ("synchronizer-1",)),
        ("the follower", 0.5, ("synchronizer-0",)),
        ("redis", 0.0, ("redis",)),
    ],
)
def test_a_target_is_who_it_is_now(target: str, pick: float, found: tuple[str, ...]) -> None:
    check_target(target, "here")
    assert resolve_target(target, NAMES, "synchronizer-1", pick) == found


def test_nobody_leads_and_nobody_follows_while_no_leader_is_known() -> None:
    assert resolve_target("the leader", NAMES, None, 0.0) == ()
    assert resolve_target("the follower", NAMES, None, 0.0) == ()


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ([["random learner", "random learner"]], (("learner-0", "learner-1"),)),
        ([["random learner"], ["learner-0"]], (("learner-1",), ("learner-0",))),
        ([["every learner"], ["learner-1"]], (("learner-0", "learner-10"), ("learner-1",))),
        ([["the follower", "random learner"], ["rest"]], (("synchronizer-0", "learner-0"), ())),
        ([["the leader", "learner-7"], ["redis"]], ((), ("redis",))),
        ([["the leader"], ["synchronizer-1"]], (("synchronizer-1",), ())),
    ],
)
def test_nobody_is_on_both_sides_and_a_group_is_whole_or_nobody(
    groups: list[list[str]], found: tuple[tuple[str, ...], ...]
) -> None:
    assert resolve_groups(groups, NAMES, "synchronizer-1", 0.0) == found


@pytest.mark.parametrize("target", ["learner-7", "the follower", "redis"])
def test_a_target_that_a_fleet_does_not_have_is_refused(target: str) -> None:
    alone = {"learner-0", "synchronizer"}
    with pytest.raises(DilocoError, match=f"no {target}; it has learner-0, synchronizer") as caught:
        check_exists(target, alone, "here")
    assert caught.value.reason is Reason.TARGET_NOT_FOUND
    assert caught.value.exit_code == EXIT_USAGE
    for there in ("learner-0", "random learner", "the leader", "synchronizer"):
        check_exists(there, alone, "here")


def test_the_catalogue_of_faults_is_that_of_the_documents() -> None:
    """A fault that nobody can name in a scenario would be none."""
    text = (Path(__file__).parents[2] / "docs/chaos.md").read_text(encoding="utf-8")
    for kind in FaultKind:
        assert f"`{kind}`" in text
