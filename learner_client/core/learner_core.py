"""A learner's bookkeeping: counters, versions, copies, pulls and reports (design section 4)."""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.errors import Reason
from decoupled_diloco.versions import Version
from learner_client.core.counters import Counters, Totals
from learner_client.core.due import DueFragments
from learner_client.core.reports import StepReport, merge_reports


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What a copy of a fragment is a copy of.

    Attributes:
        fragment: its index.
        base: version applied last when it was copied: the base of its outer gradient.
        application: counts the updates applied to the fragment until then.
        local_step: local step at which it was copied.
        totals: position in the training at which it was copied.
    """

    fragment: int
    base: Version
    application: int
    local_step: int
    totals: Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """A pull as heard.

    Attributes:
        term: term of the round.
        group: group that owns the fragment.
        global_step: global step of the round.
        fragment: the fragment asked for.
    """

    term: int
    group: int
    global_step: int
    fragment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPush:
    """Answer to a pull: push this copy.

    Attributes:
        pull: what was asked.
        stamp: the copy to push.
        counters: steps and tokens that the push states.
    """

    pull: PullRequest
    stamp: Stamp
    counters: Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDecline:
    """Answer to a pull: not now.

    Attributes:
        pull: what was asked.
        reason: why.
    """

    pull: PullRequest
    reason: Reason


class LearnerCore:
    """Events in, values out. Not safe in several threads at a time.

    Args:
        num_fragments: P.
        overlap: tau.
        local_step: local step at which the learner goes on.
        counters: from a saved state; from zero by default.
        versions: version applied of each fragment, from a saved state.
    """

    def __init__(
        self,
        *,
        num_fragments: int,
        overlap: int,
        local_step: int = 0,
        counters: Counters | None = None,
        versions: dict[int, Version] | None = None,
    ) -> None:
        self.counters = counters or Counters(num_fragments)
        self.due = DueFragments(num_fragments, overlap)
        self._num_fragments = num_fragments
        self._term = self._begun_at = 0
        self._local_step = local_step
        self._position = (0, 0)
        self._versions: dict[int, Version] = {}
        self._applications = [0] * num_fragments
        self._stamps: dict[int, Stamp] = {}
        self._report: StepReport | None = None
        for version in (versions or {}).values():
            self._adopt(version)
        self._versions.update(versions or {})

    @property
    def local_step(self) -> int:
        """Inner steps over all lives of this learner id."""
        return self._local_step

    @property
    def global_step(self) -> int:
        """Global step of the newest update applied."""
        return self._position[1]

    @property
    def term(self) -> int:
        """Term of leadership, as granted at the last Join."""
        return self._term

    @property
    def versions(self) -> dict[int, Version]:
        """Version applied of each fragment that has one."""
        return dict(self._versions)

    @property
    def known_global_steps(self) -> tuple[int, ...]:
        """Global step of each fragment's applied version; empty until all have one."""
        if len(self._versions) < self._num_fragments:
            return ()
        return tuple(self._versions[p].global_step for p in range(self._num_fragments))

    # -- the network's side ----------------------------------------------------------------

    def joined(self, *, term: int, local_step: int, global_step: int) -> None:
        """Takes what a Join granted; the local step never goes back."""
        if term != self._term:
            self._term, self._begun_at = term, global_step
            self.due.rewound(global_step)
        self.due.heard(global_step)
        self._local_step = max(self._local_step, local_step)

    def heard(self, version: Version) -> None:
        """Notes a version that is published.

        One of an earlier term that is beyond where the current term began is lost: to follow it
        would be to copy what nobody asks for, and not what is asked for.
        """
        if version.term >= self._term or version.global_step <= self._begun_at:
            self.due.heard(version.global_step)

    def pull(self, pull: PullRequest) -> AnswerPush | AnswerDecline:
        """Answers a pull from the newest copy.

        Declined: NOT_READY where the fragment was not copied since the last update to it, or was
        not trained since its counters were reset; STALE_TERM; UNKNOWN_FRAGMENT.
        """
        if pull.term != self._term:
            return AnswerDecline(pull=pull, reason=Reason.STALE_TERM)
        if pull.group != 0 or not 0 <= pull.fragment < self._num_fragments:
            return AnswerDecline(pull=pull, reason=Reason.UNKNOWN_FRAGMENT)
        stamp = self._stamps.get(pull.fragment)
        if stamp is None:
            return AnswerDecline(pull=pull, reason=Reason.NOT_READY)
        counters = self.counters.of(pull.fragment, stamp.totals)
        if counters.num_steps == 0:
            return AnswerDecline(pull=pull, reason=Reason.NOT_READY)
        return AnswerPush(pull=pull, stamp=stamp, counters=counters)

    def accepted(self, stamp: Stamp) -> None:
        """A push of this copy was accepted: counters run from there, if not from later already."""
        self.counters.reset(stamp.fragment, stamp.totals)

    def take_report(self) -> StepReport | None:
        """Takes everything that is to be reported, as one report."""
        report, self._report = self._report, None
        return report

    def give_back(self, report: StepReport) -> None:
        """A report that was taken could not be sent: it goes with the next one."""
        newer = self._report
        self._report = report if newer is None else merge_reports(report, newer)

    # -- the inner-step boundary, in this order --------------------------------------------

    def count(self, num_tokens: int) -> None:
        """Counts one inner step and its tokens on all fragments."""
        self._local_step += 1
        self.counters.count(num_tokens)

    def applied(self, fragment: int, version: Version) -> None:
        """An update was written into the model: counters start anew, its t is adopted."""
        self._versions[fragment] = version
        self._applications[fragment] += 1
        self._stamps.pop(fragment, None)
        self.counters.applied(fragment)
        self._adopt(version)
        self.heard(version)

    def to_copy(self) -> tuple[int, ...]:
        """Fragments to copy now: those due next that were trained since their counters started."""
        return tuple(
            p for p in self.due.now() if p in self._versions and self.counters.of(p).num_steps > 0
        )

    def stamp(self, fragment: int) -> Stamp:
        """What a copy made now is a copy of."""
        return Stamp(
            fragment=fragment,
            base=self._versions[fragment],
            application=self._applications[fragment],
            local_step=self._local_step,
            totals=self.counters.totals,
        )

    def copied(self, stamp: Stamp) -> None:
        """A copy is complete and may be pushed."""
        assert stamp.application == self._applications[stamp.fragment], stamp
        self._stamps[stamp.fragment] = stamp

    def forget(self, fragment: int) -> None:
        """The copy of a fragment is given up: it is no longer due."""
        self._stamps.pop(fragment, None)

    def report(
        self,
        *,
        num_tokens: int,
        loss: float | None,
        step_s: float,
        overhead_s: float,
        data_lease_id: int = 0,
        data_position: int = 0,
    ) -> None:
        """Hands over the report of this step; merged with what nobody took yet."""
        newer = StepReport(
            local_step=self._local_step,
            num_steps=1,
            num_tokens=num_tokens,
            loss=loss,
            step_s=step_s,
            overhead_s=overhead_s,
            applied=self.known_global_steps,
            data_lease_id=data_lease_id,
            data_position=data_position,
        )
        self._report = merge_reports(self._report, newer)

    def _adopt(self, version: Version) -> None:
        self._position = max(self._position, (version.term, version.global_step))
