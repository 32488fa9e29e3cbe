"""What is seen of a fleet at one moment, and what follows from one moment to the next. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSeen:
    """A learner as who leads sees it.

    Attributes:
        state: joined, live, expected, disconnected, gone, left or drained.
        incarnation: term and number of its life.
        local_step: last inner step that it reported.
        accepted: contributions that who leads has accepted.
        silent_s: seconds since it was last heard.
    """

    state: str
    incarnation: tuple[int, int]
    local_step: int
    accepted: int
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A fleet at one moment.

    Attributes:
        at_s: when, seconds of the runner's monotonic clock.
        running: names of the processes that run.
        leader: name of who leads; None where nobody does or answers.
        term: its term.
        global_step: last committed global step.
        in_sync: whether a take-over now would lose nothing.
        lease_held: whether who leads holds its lease.
        learners: what who leads sees of each.
        restarts: how often each process was started again.
        struck: faults that processes did to themselves at points of the protocol: who, by number
            of the strike.
        ended: why nothing more will happen; empty while the fleet is at work.
    """

    at_s: float
    running: frozenset[str]
    leader: str | None = None
    term: int = 0
    global_step: int = 0
    in_sync: bool = False
    lease_held: bool = False
    learners: Mapping[str, LearnerSeen] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    struck: Mapping[int, str] = field(default_factory=dict)
    ended: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What has happened until now, since the first sample.

    Attributes:
        sample: the newest sample of a fleet.
        merged_at_s: when the global step was last seen to rise.
        merges: how often it was.
        contributions: contributions of each learner that were seen.
        steps: inner steps of each learner that were seen.
        incarnations: newest life of each learner that was seen.
        events: what has changed with the newest sample: names of `scenario.Event`.
        led: whether anybody who leads has been seen.
    """

    sample: Sample
    merged_at_s: float
    merges: int = 0
    contributions: Mapping[str, int] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    incarnations: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    events: frozenset[str] = frozenset()
    led: bool = False


def begin(sample: Sample) -> Progress:
    """Returns the progress at the first sample."""
    lives = {name: seen.incarnation for name, seen in sample.learners.items()}
    led = sample.leader is not None
    return Progress(sample=sample, merged_at_s=sample.at_s, incarnations=lives, led=led)


def advance(before: Progress, sample: Sample) -> Progress:
    """Returns the progress with one more sample; it is counted from the first leader that is seen.

    Where nobody leads, or nobody answers, what is known of the learners stays as it was.
    """
    old = before.sample
    if sample.leader is None:
        known = replace(sample, term=old.term, global_step=old.global_step, learners=old.learners)
        return Progress(
            sample=known,
            merged_at_s=before.merged_at_s,
            merges=before.merges,
            contributions=before.contributions,
            steps=before.steps,
            incarnations=before.incarnations,
            led=before.led,
        )
    if not before.led:
        # What a leader has counted before anybody looked is no progress.
        return begin(sample)
    new_term = sample.term != old.term
    rose = sample.global_step > old.global_step
    contributions, steps = dict(before.contributions), dict(before.steps)
    lives = dict(before.incarnations)
    for name, seen in sample.learners.items():
        last = old.learners.get(name)
        # A leader counts what it accepted itself.
        since = 0 if new_term or last is None else last.accepted
        gained = seen.accepted - since if seen.accepted >= since else seen.accepted
        contributions[name] = contributions.get(name, 0) + gained
        lives[name] = max(lives.get(name, seen.incarnation), seen.incarnation)
        stepped = max(seen.local_step - last.local_step, 0) if last is not None else 0
        steps[name] = steps.get(name, 0) + stepped
    return Progress(
        sample=sample,
        merged_at_s=sample.at_s if rose else before.merged_at_s,
        merges=before.merges + max(sample.global_step - old.global_step, 0),
        contributions=contributions,
        steps=steps,
        incarnations=lives,
        events=frozenset(_events(old, sample)),
        led=True,
    )


def _events(old: Sample, new: Sample) -> list[str]:
    found = []
    if new.term > old.term > 0:
        found.append("leader-change")
    for name, seen in new.learners.items():
        last = old.learners.get(name)
        before = last.state if last is not None else "gone"
        if seen.state in _AWAY and before not in _AWAY:
            found.append("learner-gone")
        if last is not None and seen.state == "live" and before != "live":
            found.append("learner-back")
    return found


_AWAY = ("disconnected", "gone", "left")
