"""Who gives its inner state to whom, and when that is given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.errors import Reason
from decoupled_diloco.versions import Incarnation
from synchronizer_server.core import effects as ef
from synchronizer_server.core import events as ev
from synchronizer_server.core.recovery import MAX_DONORS
from tests.synchronizer.core_script import ACTIONS, Script, only, settings, words

P = 4


class Bench(Script):
    """A warm fleet in which every learner has reported that it has everything."""

    def __init__(self, *names: str, **changes: object) -> None:
        super().__init__(settings(num_learners=len(names), **changes))
        self.warm(*names)
        self.auto = set(ACTIONS)
        for name in names:
            self.has(name, self.versions_now)

    def join(self, name: str) -> list[ef.Effect]:
        """Also beyond the planned number."""
        before = self.lives.get(name)
        self.lives[name] = Incarnation(1, 1 if before is None else before.number + 1)
        return self.feed(
            ev.LearnerJoined(learner_id=name, incarnation=self.lives[name], shard=ord(name[0]))
        )

    @property
    def versions_now(self) -> tuple[int, ...]:
        lineage = self.core.state.lineage
        return tuple(lineage.current(f).global_step for f in range(P))

    def has(self, name: str, known: tuple[int, ...]) -> list[ef.Effect]:
        """It reports a step with these versions applied."""
        self.steps[name] = self.steps.get(name, 0) + 1
        return self.feed(
            ev.StepReported(
                learner_id=name,
                incarnation=self.lives[name],
                local_step=self.steps[name],
                num_steps=1,
                num_tokens=1,
                known_global_steps=known,
            )
        )

    def ask(self, name: str, recovery_id: str = "", **changes: object) -> list[str]:
        event = {
            "recovery_id": recovery_id or f"for {name}",
            "learner_id": name,
            "incarnation": self.lives[name],
            "known_global_steps": self.versions_now,
        }
        return news(self.feed(ev.RecoveryAsked(**(event | changes))))

    def progress(self, recovery_id: str, donor: str, **how: bool) -> list[str]:
        return news(
            self.feed(ev.DonationProgressed(recovery_id=recovery_id, learner_id=donor, **how))
        )

    def fail(self, recovery_id: str, donor: str, reason: Reason = Reason.TRUNCATED) -> list[str]:
        return news(
            self.feed(
                ev.DonationFailed(
                    recovery_id=recovery_id, learner_id=donor, reason=reason, message="broke"
                )
            )
        )

    def pass_steps(self, count: int, *names: str) -> list[str]:
        """So many rounds are merged."""
        found: list[str] = []
        until = self.core.state.committed + count
        while self.core.state.committed < until:
            found += news(self.report(*names)) + news(self.advance(0.1))
        return found

    def waiting(self) -> dict[str, str]:
        waits = self.core.waits(self.now)
        return {w.subject: w.reason for w, _ in waits if w.subject.startswith("recovery")}


def news(effects: list[ef.Effect]) -> list[str]:
    kinds = (ef.AskDonor, ef.DropDonor, ef.EndRecovery)
    return [words(e) for e in effects if isinstance(e, kinds)]


def test_a_learner_gets_the_state_of_one_that_has_every_version() -> None:
    bench = Bench("a", "b")
    bench.up("c")
    effects = bench.feed(
        ev.RecoveryAsked(
            recovery_id="r",
            learner_id="c",
            incarnation=bench.lives["c"],
            known_global_steps=bench.versions_now,
        )
    )
    (asked,) = only(effects, ef.AskDonor)
    assert (asked.learner_id, asked.recipient_id) == ("a", "c")
    assert asked.incarnation == bench.lives["a"]
    assert asked.known_global_steps == bench.versions_now
    assert bench.waiting() == {"recovery of c": "donor_copy"}
    assert bench.progress("r", "a") == []
    assert bench.waiting() == {"recovery of c": "transfer"}
    assert bench.progress("r", "a", is_whole=True) == []
    assert bench.waiting() == {"recovery of c": "delivery"}
    bench.feed(ev.RecoveryEnded(recovery_id="r"))
    assert bench.waiting() == {}


def test_nobody_gives_before_anything_is_merged() -> None:
    bench = Script(settings())
    bench.up("a", "b")
    bench.seed("a")
    event = ev.RecoveryAsked(
        recovery_id="r", learner_id="b", incarnation=bench.lives["b"], known_global_steps=(0,) * P
    )
    assert news(bench.feed(event)) == ["end recovery r: NO_DONOR"]


def test_who_has_every_version_comes_before_who_has_not_and_then_who_gave_least() -> None:
    bench = Bench("a", "b", "c")
    bench.auto.clear()
    for name in "abc":
        bench.has(name, (0,) * P if name == "a" else bench.versions_now)
    bench.up("x", "y", "z")
    assert bench.ask("x") == ["ask b to give to x"]
    bench.progress("for x", "b", is_whole=True)
    assert bench.ask("y") == ["ask c to give to y"]
    bench.progress("for y", "c", is_whole=True)
    assert bench.ask("z") == ["ask b to give to z"]


def test_who_recovers_itself_has_not_trained_or_is_not_live_gives_nothing() -> None:
    bench = Bench("a", "b")
    bench.up("new")
    bench.close("a")
    assert bench.ask("b") == ["end recovery for b: NO_DONOR"]
    bench.open("a")
    assert bench.ask("b", "second") == ["ask a to give to b"]
    assert bench.ask("a") == ["end recovery for a: NO_DONOR"]


def test_a_donor_gives_to_one_at_a_time_and_the_next_waits_its_turn() -> None:
    bench = Bench("a")
    bench.up("x", "y")
    assert bench.ask("x") == ["ask a to give to x"]
    assert bench.ask("y") == []
    assert bench.waiting() == {"recovery of x": "donor_copy", "recovery of y": "donor"}
    assert bench.progress("for x", "a") == []
    assert bench.progress("for x", "a", is_whole=True) == ["ask a to give to y"]


@pytest.mark.parametrize(
    "how", ["dies", "declines", "joins anew", "stalls", "stalls in the middle"]
)
def test_the_next_donor_is_asked_where_one_fails(how: str) -> None:
    bench = Bench("a", "b")
    bench.up("x")
    bench.ask("x")
    match how:
        case "dies":
            found = news(bench.close("a"))
        case "declines":
            found = bench.fail("for x", "a", Reason.NO_DONOR)
        case "joins anew":
            found = news(bench.join("a"))
        case _:
            if how == "stalls in the middle":
                bench.progress("for x", "a")
            found = news(bench.advance(5.0))
            bench.heard("x")
    reason = {"declines": "NO_DONOR", "dies": "LEARNER_GONE", "joins anew": "LEARNER_GONE"}
    dropped = f"take no more from a: {reason.get(how, 'NO_PROGRESS')}"
    assert found[:2] == [dropped, "ask b to give to x"]
    if how == "joins anew":
        return
    # Whatever the first still says changes nothing.
    assert bench.fail("for x", "a") == []
    assert bench.progress("for x", "a", is_whole=True) == []


def test_a_few_donors_are_asked_then_it_is_given_up() -> None:
    names = "abcdefg"
    bench = Bench(*names)
    bench.up("x")
    bench.ask("x")
    found = [bench.fail("for x", donor) for donor in names[:MAX_DONORS]]
    last = names[MAX_DONORS - 1]
    assert found[0] == ["take no more from a: TRUNCATED", "ask b to give to x"]
    assert found[-1] == [f"take no more from {last}: TRUNCATED", "end recovery for x: NO_DONOR"]
    assert bench.waiting() == {}


def test_it_is_void_once_more_than_h_global_steps_have_passed() -> None:
    bench = Bench("a", "b")
    bench.up("x")
    bench.ask("x")
    step = bench.settings.sync_interval
    for _ in range(step):
        assert bench.pass_steps(1, "a", "b") == []
        bench.progress("for x", "a")
    assert bench.pass_steps(1, "a", "b") == ["end recovery for x: RECOVERY_VOID"]


def test_a_recipient_that_does_not_read_ends_it_and_no_donor_is_blamed() -> None:
    for how in ({"is_blocked": True}, {"is_whole": True}):
        bench = Bench("a", "b")
        bench.up("x")
        bench.ask("x")
        bench.progress("for x", "a", **how)
        assert news(bench.advance(5.0)) == ["end recovery for x: NO_PROGRESS"]


def test_a_recipient_that_joins_anew_or_asks_again_ends_the_recovery_before() -> None:
    bench = Bench("a", "b")
    bench.up("x")
    bench.ask("x", "first")
    assert bench.ask("x", "second") == [
        "end recovery first: RECOVERY_VOID",
        "ask b to give to x",
    ]
    assert news(bench.join("x")) == ["end recovery second: FENCED"]


def test_what_is_over_or_was_never_asked_is_ignored() -> None:
    bench = Bench("a", "b")
    bench.up("x")
    assert bench.fail("nothing", "a") == []
    assert bench.progress("nothing", "a") == []
    assert news(bench.feed(ev.RecoveryEnded(recovery_id="nothing"))) == []
    bench.ask("x")
    bench.feed(ev.RecoveryEnded(recovery_id="for x"))
    assert bench.fail("for x", "a") == []


ACTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "fail", "progress", "whole", "end", "close", "open", "join", "advance", "step"]
        ),
        st.integers(0, 4),
    ),
    max_size=40,
)


class Story:
    """What a run of random acts has led to so far, checked at every effect."""

    NAMES = "abcde"

    def __init__(self) -> None:
        self.bench = Bench(*self.NAMES)
        self.asked: set[str] = set()
        self.ended: set[str] = set()
        self.giving: dict[str, str] = {}

    def look(self, effects: list[ef.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ef.AskDonor):
                assert effect.recovery_id in self.asked - self.ended
                assert effect.learner_id != effect.recipient_id
                roster = self.bench.core.state.roster
                assert roster.current(effect.learner_id, effect.incarnation) is not None
                assert effect.learner_id not in self.giving.values()
                self.giving[effect.recovery_id] = effect.learner_id
            elif isinstance(effect, ef.DropDonor):
                assert self.giving.pop(effect.recovery_id) == effect.learner_id
            elif isinstance(effect, ef.EndRecovery):
                assert effect.recovery_id in self.asked - self.ended
                self.ended.add(effect.recovery_id)
                self.giving.pop(effect.recovery_id, None)

    def feed(self, event: ev.Event) -> None:
        self.look(self.bench.feed(event))

    def act(self, act: str, index: int) -> None:
        name, bench = self.NAMES[index], self.bench
        match act:
            case "ask":
                recovery_id = f"r{len(self.asked)}"
                self.asked.add(recovery_id)
                self.feed(
                    ev.RecoveryAsked(
                        recovery_id=recovery_id,
                        learner_id=name,
                        incarnation=bench.lives[name],
                        known_global_steps=bench.versions_now,
                    )
                )
            case "close":
                self.look(bench.close(name))
            case "open":
                self.look(bench.open(name))
            case "join":
                self.look(bench.join(name) + bench.open(name))
            case "advance":
                self.look(bench.advance(0.5 * index))
            case "step":
                self.look(bench.has(name, bench.versions_now))
            case _:
                self.act_on_one(act, index)

    def act_on_one(self, act: str, index: int) -> None:
        """Something happens to one of the recoveries under way."""
        under_way = sorted(self.asked - self.ended)
        if not under_way:
            return
        one = under_way[index % len(under_way)]
        donor = self.giving.get(one, self.NAMES[index])
        match act:
            case "fail":
                reason = Reason.CORRUPT
                self.feed(
                    ev.DonationFailed(recovery_id=one, learner_id=donor, reason=reason, message="")
                )
            case "progress":
                self.feed(ev.DonationProgressed(recovery_id=one, learner_id=donor))
            case "whole" if self.giving.pop(one, None) is not None:
                self.feed(ev.DonationProgressed(recovery_id=one, learner_id=donor, is_whole=True))
            case "end":
                self.giving.pop(one, None)
                self.ended.add(one)
                self.feed(ev.RecoveryEnded(recovery_id=one))


@given(ACTS)
def test_every_recovery_ends_or_waits_for_somebody_whatever_happens(acts) -> None:
    story = Story()
    for act, index in acts:
        story.act(act, index)
    # With nobody acting any more, time alone ends what a donor or a recipient holds up.
    story.look(story.bench.advance(200.0))
    assert story.asked <= story.ended
    assert story.bench.waiting() == {}
