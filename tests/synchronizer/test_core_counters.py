"""What a push claims is bounded by what its learner reported; nobody honest is ever cut down."""

from __future__ import annotations

import pytest
from core_script import ACTIONS, TOKENS, Script, only
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.versions import Incarnation, Version
from synchronizer_server.core import effects as ef
from synchronizer_server.core import events as ev
from synchronizer_server.core.counters import credible
from synchronizer_server.core.roster import Learner, Roster

LIFE = Incarnation(1, 1)
FRAGMENT = 2


def learner(name: str, *, local_step: int = 100, rate: float = 64.0, **more: object) -> Learner:
    return Learner(
        learner_id=name, incarnation=LIFE, shard=0, heard_at=0.0, local_step=local_step,
        most_tokens_per_step=rate, step_s=0.1, reported_at=10.0, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def claim(*, tokens: int, steps: int, local_step: int) -> ev.PushOpened:
    return ev.PushOpened(
        key=ev.PushKey("a", LIFE, 6, FRAGMENT), term=1, base=Version(1, 2, b"b" * 32),
        local_step=local_step, num_tokens=tokens, num_steps=steps,
    )  # fmt: skip


def counted(header: ev.PushOpened, who: Learner, *others: Learner, now: float = 10.0):
    found = credible(header, who, [who, *others], step_s=0.1, now=now)
    return found.num_tokens, found.num_steps, found.local_step


@given(
    rates=st.lists(st.integers(1, 4096), min_size=1, max_size=60), ahead=st.integers(0, 8),
    since=st.integers(1, 60), others=st.lists(st.integers(300, 4096), max_size=4),
)  # fmt: skip
def test_honest_claims_stand_however_batches_vary_and_reports_lag(rates, ahead, since, others):
    """All of its steps but the last few are reported; it claims those since its last merge."""
    reported = max(len(rates) - ahead, 1)
    since = min(since, len(rates))
    who = learner("a", local_step=reported, rate=float(max(rates[:reported])))
    who.merged_steps[FRAGMENT] = len(rates) - since
    tokens = sum(rates[-since:])
    if tokens / since > 2 * who.most_tokens_per_step:
        return  # batches of the steps under way are far above all that was ever reported
    fleet = [learner(f"o{i}", rate=float(x)) for i, x in enumerate(others)]
    header = claim(tokens=tokens, steps=since, local_step=len(rates))
    assert credible(header, who, [who, *fleet], step_s=0.1, now=10.0) == header


@pytest.mark.parametrize(
    ("tokens", "steps", "local_step", "expected"),
    [
        (64 * 10, 10, 100, (640, 10, 100)),
        (64 * 10, 10, 108, (640, 10, 108)),
        (2**44, 10, 100, (1280, 10, 100)),  # twice the most that it reported per step
        (64 * 90, 90, 100, (64 * 20, 20, 100)),  # it contributed at step 80
        (2**44, 2**31, 2**53, (128 * 28, 28, 108)),
        (1, 2**20, 2**53, (1, 28, 108)),
    ],
)
def test_absurd_claims_are_cut_down(tokens, steps, local_step, expected):
    who = learner("a", merged_steps={FRAGMENT: 80})
    assert counted(claim(tokens=tokens, steps=steps, local_step=local_step), who) == expected


def test_reports_that_are_held_up_give_more_slack():
    who = learner("a")
    header = claim(tokens=64, steps=1, local_step=400)
    assert counted(header, who, now=10.0)[2] == 108
    assert counted(header, who, now=30.0)[2] == 400, "200 steps fit into 20 s, twice"


def test_a_learner_that_went_back_to_an_older_state_is_not_measured_by_what_it_gave_up():
    who = learner("a", local_step=50, merged_steps={FRAGMENT: 80})
    assert counted(claim(tokens=64 * 5, steps=5, local_step=50), who) == (320, 5, 50)


def test_reports_of_absurd_tokens_are_bounded_by_the_others():
    evil = learner("a", rate=2.0**50)
    header = claim(tokens=2**44, steps=1, local_step=100)
    b, c = learner("b"), learner("c")
    assert counted(header, evil, b, c) == (64 * 16, 1, 100)
    assert counted(header, evil, b)[0] == 2**44, "of two nobody can say who is right"


def test_the_weight_the_record_and_the_log_show_what_counts():
    s = Script().warm("a", "b", "c")
    s.report("a", "b", "c")
    effects = s.push("a", tokens=2**40, num_steps=4, local_step=2**50)
    (accept,) = only(effects, ef.AcceptPush)
    assert accept.weight == (2 * TOKENS) ** 2 * 4
    (cut,) = only(effects, ef.CountersCut)
    assert "BAD_COUNTERS" in cut.detail
    assert str(2**40) in cut.detail
    record = s.core.state.rounds[0].accepted["a"]
    assert (record.num_tokens, record.num_steps) == (2 * TOKENS * 4, 4)
    assert record.local_step <= s.steps["a"] + 8
    s.auto = set(ACTIONS)
    s.mute = {"a"}
    s.push("b")
    s.push("c")
    for _ in range(12):
        s.report("a", "b", "c")
        for round_ in list(s.core.state.rounds):
            if "a" in round_.pending:
                again = s.push("a", t=round_.global_step, tokens=2**40)
                assert not only(again, ef.CountersCut), "said once in a row"
        s.advance(0.1)


def roster_of(**step_s: float) -> Roster:
    roster = Roster()
    for name, seconds in step_s.items():
        who = roster.join(ev.LearnerJoined(learner_id=name, incarnation=LIFE, shard=0), 0.0)
        roster.opened(who, 0.0)
        who.step_s = seconds
    return roster


def test_absurd_numbers_of_steps_do_not_set_the_pace():
    assert roster_of(a=1.0, b=1.0, evil=1e-9).median_step_s() == 1.0
    paced = roster_of(a=1.0, b=1.0, evil=1e-9, vile=1e-9).median_step_s()
    assert paced is not None
    assert paced > 0.01, "even two of four"
