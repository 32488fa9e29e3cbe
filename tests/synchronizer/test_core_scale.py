"""The usual norm of a fragment's outer gradients: what it refuses, and who can move it."""

from __future__ import annotations

import math

from core_script import Script, answers, only, settings
from hypothesis import given
from hypothesis import strategies as st

from synchronizer_server.core import effects as ef
from synchronizer_server.core.scale import NormScale

FACTOR = 50.0
honest = st.floats(0.5, 2.0)


def filled(norms: dict[str, list[float]], *, num_steps: int = 1) -> NormScale:
    """A scale that took the learners' norms in turn."""
    scale = NormScale(FACTOR)
    for row in zip(*norms.values(), strict=True):
        for name, norm in zip(norms, row, strict=True):
            scale.observe(0, name, norm, num_steps)
    return scale


def test_it_acts_once_there_are_eight_contributions_of_two_learners():
    scale = NormScale(FACTOR)
    for _ in range(3):
        scale.observe(0, "a", 2.0, 4)
        scale.observe(0, "b", 2.0, 4)
    assert scale.bound(0, 1) is None
    for _ in range(30):
        scale.observe(1, "a", 2.0, 4)
    assert scale.bound(1, 1) is None, "a learner that is alone is bounded by the absolute norm"
    scale.observe(0, "a", 2.0, 4)
    scale.observe(0, "b", 2.0, 4)
    assert scale.bound(0, 1) == FACTOR
    assert scale.bound(0, 16) == 4 * FACTOR, "a walk of 16 steps is four times as long"
    assert scale.bound(2, 1) is None, "every fragment has a scale of its own"


@given(st.lists(honest, min_size=8, max_size=20), st.data())
def test_one_hostile_learner_of_three_never_moves_it_beyond_an_honest_one(norms, data):
    """Whatever it gets accepted, the bound stays between those of its neighbours."""
    hostile = data.draw(
        st.lists(st.floats(0.0, 1e30), min_size=len(norms), max_size=len(norms)), label="hostile"
    )
    other = data.draw(st.lists(honest, min_size=len(norms), max_size=len(norms)), label="other")
    bound = filled({"a": norms, "b": other, "evil": hostile}).bound(0, 1)
    assert bound is not None
    assert 0.5 * FACTOR <= bound <= 2.0 * FACTOR


def test_one_that_contributes_more_often_has_no_more_votes():
    scale = filled({"a": [1.0] * 4, "b": [1.0] * 4})
    for _ in range(50):
        scale.observe(0, "evil", 49.0, 1)
    bound = scale.bound(0, 1)
    assert bound is not None
    assert bound <= FACTOR * 1.0 + 1e-9


def test_of_two_the_higher_counts_so_that_none_can_shut_the_other_out():
    bound = filled({"a": [1.0] * 8, "evil": [1e-9] * 8}).bound(0, 1)
    assert bound == FACTOR


def test_a_zero_vector_says_nothing_of_what_is_usual():
    scale = filled({"a": [1.0] * 8, "b": [1.0] * 8})
    for _ in range(64):
        scale.observe(0, "b", 0.0, 1)
    assert scale.bound(0, 1) == FACTOR


def warm(norm: float = 1.0) -> Script:
    """Three learners whose contributions have a norm, until the scale of every fragment acts."""
    s = Script(settings(norm_bound_factor=FACTOR)).warm("a", "b", "c")
    s.auto = {"merge", "persist"}
    for _ in range(4 * s.P):
        s.report("a", "b", "c")
        for name in "abc":
            s.push(name, norm=norm)
        s.advance(0.1)
    assert all(s.core.state.scale.bound(f, 1) for f in range(s.P))
    return s


def test_a_norm_far_above_the_usual_is_refused_with_both_numbers_and_moves_nothing():
    s = warm()
    s.report("a", "b", "c")
    fragment = s.core.state.rounds[0].fragment
    before = s.core.state.scale.bound(fragment, 1)
    assert answers(s.push("a", norm=49.0)) == ["a accepted"]
    effects = s.push("b", norm=1e3)
    assert answers(effects) == ["b refused NORM_BOUND"]
    (answer,) = only(effects, ef.AnswerPush)
    assert "norm 1000" in answer.message
    assert "above 50," in answer.message
    assert answers(s.push("c", norm=1.0)) == ["c accepted"]
    after = s.core.state.scale.bound(fragment, 1)
    assert after == before, "one long outer gradient among many does not move a median"


def test_the_norm_that_is_usual_depends_on_the_steps_behind_it():
    s = warm()
    s.advance(0.1)
    s.report("a", "b", "c")
    local_step = s.steps["a"]
    assert answers(s.push("a", norm=60.0, num_steps=1)) == ["a refused NORM_BOUND"]
    assert answers(s.push("b", norm=60.0, num_steps=2, local_step=local_step)) == ["b accepted"]
    assert math.sqrt(2) * FACTOR > 60.0


def test_what_is_refused_moves_nothing_however_often_it_comes():
    """Of two learners the higher median counts: only accepted norms may get into it."""
    s = Script(settings(norm_bound_factor=FACTOR, quarantine_after=0)).warm("a", "b", "c")
    s.leave("c")
    s.auto = {"merge", "persist"}
    seen = []
    for turn in range(32 * s.P):
        s.report("a", "b")
        s.push("a", norm=1.0)
        refused = answers(s.push("b", norm=1.0 if turn < 8 * s.P else 1e6))
        seen += [x for x in refused if "NORM_BOUND" in x]
        s.advance(0.1)
    assert len(seen) >= 20 * s.P, "many more than were ever accepted of it"
    assert {s.core.state.scale.bound(f, 1) for f in range(s.P)} == {FACTOR}
