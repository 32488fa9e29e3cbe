"""What must never happen (design section 7): shadows everything, and raises AssertionError."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from decoupled_diloco.codecs import get_codec
from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.layout import Role as TensorRole
from decoupled_diloco.versions import Incarnation, Version
from diloco_fleet.simulation.lineages import Key, Lineages, Span, fingerprint
from diloco_fleet.simulation.messages import Join, Push
from synchronizer_server.core import effects as fx
from synchronizer_server.core import events as ev
from synchronizer_server.core.records import RoundRecord
from synchronizer_server.core.rounds import RoundState
from synchronizer_server.merge.accumulate import Accumulator, Granularity, MergeMethod
from synchronizer_server.merge.fragment_state import FragmentState, advance
from synchronizer_server.merge.outer import OuterSettings

if TYPE_CHECKING:
    from diloco_fleet.simulation.leading import Engine, Ticket
    from diloco_fleet.simulation.learner import LearnerProcess
    from diloco_fleet.simulation.node import Node
    from diloco_fleet.simulation.world import World
    from synchronizer_server.tensors import Merged


class BeyondError(Exception):
    """More broke at once than the design can tell apart: two leaders took one number.

    It takes a keeper that is emptied while its leader is cut off from the others, before anything
    is persisted that would tell them of its term.
    """


@dataclass(frozen=True, slots=True)
class Accepted:
    """An accepted push, as the oracle saw it."""

    learner_id: str
    weight: float
    vector: torch.Tensor
    work: Span | None


class Oracle:
    """Hears of every effect that matters."""

    def __init__(self, world: World) -> None:
        self.lineages = Lineages()
        self.num_rounds_published = 0
        self.longest_gap_s = 0.0
        self.seen_versions: set[tuple[int, Version]] = set()
        self._world = world
        self._terms: dict[int, str] = {}
        self._idle: set[int] = set()
        self._copies: dict[tuple[int, bytes], torch.Tensor] = {}
        self._locals: dict[Span, torch.Tensor] = {}
        self._accepted: dict[Key, list[Accepted]] = {}
        self._granted: dict[tuple[int, str], Incarnation] = {}
        self._ever_granted: dict[str, Incarnation] = {}
        self._proposed: dict[str, dict[str, Incarnation]] = {}
        self._reported: dict[tuple[int, str, Incarnation], int] = {}
        self._asked: dict[tuple[int, str, Incarnation], int] = {}
        self._published: Key | None = None
        self._seeds: set[Key] = set()
        self._published_at: float | None = None
        self._num_states = 0

    # -- leadership and stores -------------------------------------------------------------------

    def leads(self, node: Node, term: int) -> None:
        """A process has the lease."""
        highest = node.store.highest_term()
        assert term > highest, f"term {term} is led over a store that knows {highest}"
        self._world.tally["terms"] += 1

    def tip_of(self, node: Node) -> Key | None:
        """Newest record in a store."""
        return self.lineages.tips.get(node.name)

    def lost(self, node: Node) -> None:
        """A store is empty."""
        self.lineages.tips.pop(node.name, None)

    def restored(
        self, node: Node, record: RoundRecord, states: Mapping[int, FragmentState]
    ) -> None:
        """A store gave a run back."""
        assert (record.term, record.global_step) == self.tip_of(node), "not the newest record"
        self.lineages.check_states(record.versions, states)
        self._world.tally["restores"] += 1

    def began(self, node: Node, record: RoundRecord | None, before: Key | None) -> None:
        """A term began in a store, with the record that it takes over; no term begins twice.

        But one that left nothing: begun in an empty store, never served, and then forgotten by a
        keeper that was emptied.
        """
        leader_id = node.leadership.claim().leader_id
        term = node.leadership.claim().term if record is None else record.term
        known = self._terms.setdefault(term, leader_id)
        if known != leader_id and term in self._idle:
            self._terms[term], known = leader_id, leader_id
        if known != leader_id:
            assert not self._world.is_strict, f"{known} and {leader_id} lead term {term}"
            raise BeyondError
        (self._idle.add if record is None else self._idle.discard)(term)
        assert (record is None) == (before is None), "a term begins beside what is there"
        if record is not None:
            self.lineages.add(node.name, record, ())

    def serves(self, node: Node, record: RoundRecord | None) -> None:
        """A term that has begun is served from now on: watchers get what it took over."""
        self._world.tally["terms_served"] += 1
        claim = node.leadership.claim()
        self._idle.discard(claim.term)
        known = self._terms[claim.term]
        if known != claim.leader_id:
            assert not self._world.is_strict, f"{known} and {claim} serve one term"
            raise BeyondError
        if record is not None:
            self._publish(node, (record.term, record.global_step))

    def seeds(self, learner: LearnerProcess) -> None:
        """A learner offers its first parameters: it holds nothing that was merged."""
        assert all(version.global_step == 0 for version, _ in learner.held.values()), (
            f"{learner.name} seeds a run of which it holds merged versions"
        )

    def persisted(
        self, engine: Engine, record: RoundRecord, states: Mapping[int, FragmentState]
    ) -> None:
        """A round, or the seed, is durable at the leader."""
        key = (record.term, record.global_step)
        accepted = self._accepted.pop(key, [])
        told = [(c.learner_id, c.weight) for c in record.contributions]
        assert told == [(x.learner_id, x.weight) for x in accepted], (
            f"{key}: recorded {told}, accepted {accepted}"
        )
        for fragment, state in states.items():
            version = record.versions[fragment]
            self._copies[fragment, version.digest] = state.published
            if record.fragment is None:
                self.lineages.states[fragment, version] = fingerprint(state)
        work = tuple(x.work for x in accepted if x.work is not None)
        self.lineages.add(engine.node.name, record, work)

    def installed(self, node: Node, record: RoundRecord) -> None:
        """A standby persisted a record."""
        self.lineages.install(node.name, record)

    # -- publication -----------------------------------------------------------------------------

    def published(self, engine: Engine, global_step: int) -> None:
        """A round is about to be put before watchers."""
        if engine.closed:
            return  # nobody watches any more
        key = (engine.claim.term, global_step)
        assert key in self.lineages.entries, f"{key} is published and was not persisted"
        if global_step == 0:
            self._seeds.add(key)
            assert len(self._seeds) == 1 or not self._world.is_strict, f"seeds: {self._seeds}"
        self.num_rounds_published += global_step > 0
        now = self._world.kernel.now
        if self._published_at is not None:
            self.longest_gap_s = max(self.longest_gap_s, now - self._published_at)
        self._published_at = now
        self._publish(engine.node, key)

    def _publish(self, node: Node, key: Key) -> None:
        lineages = self.lineages
        assert lineages.is_on(key, self.tip_of(node)), f"{key} is not in the store of {node.name}"
        keeper = self._world.keeper.server
        newest = self._published
        if newest is None or lineages.is_on(newest, key):
            self._published = key
        elif not lineages.is_on(key, newest):
            assert not self._world.is_strict, f"{key} is published, and {newest} beside it"
            self._published = key
        if self._world.is_strict and keeper.term <= key[0]:
            for other in self._world.nodes:
                if other.store_id in (keeper.in_sync or ()):
                    tip = self.tip_of(other)
                    has = lineages.is_on(key, tip) or self._took_over(other, key)
                    assert has, f"{key} is published; {other.name}, in sync, is at {tip}"

    def _took_over(self, node: Node, key: Key) -> bool:
        """The start of a term adds no tensors: who has what it took over misses nothing."""
        entry = self.lineages.entries[key]
        starts = entry.record.fragment is None and entry.parent is not None
        return starts and self.lineages.is_on(entry.parent or key, self.tip_of(node))

    def seen(self, learner: LearnerProcess, fragment: int, version: Version) -> None:
        """A learner holds a version; its digest was checked."""
        assert self._published is not None, f"{learner.name} holds what nobody published"
        self.seen_versions.add((fragment, version))

    def broken(self, learner: LearnerProcess, error: DilocoError) -> None:
        """An update did not fit what the learner said that it holds."""
        raise AssertionError(f"{learner.name}: {error}")

    def stops(self, learner: LearnerProcess, error: DilocoError) -> None:
        """A learner stops for good: only one does whose place another process asked for."""
        grant, proposed = learner.exchange.grant, self._proposed.get(learner.learner_id, {})
        others = [x for request_id, x in proposed.items() if request_id != learner.request_id]
        replaced = any(grant is None or x > grant.incarnation for x in others)
        is_allowed = error.reason is Reason.FENCED and replaced
        assert is_allowed or learner.name == "hostile", f"{learner.name} stops: {error}"
        learner.is_over = True

    # -- the leader's core -----------------------------------------------------------------------

    def proposes(self, request: Join, incarnation: Incarnation) -> None:
        """A leader is about to grant this life to the process that asks."""
        proposed = self._proposed.setdefault(request.learner_id, {})
        proposed[request.request_id] = max(
            incarnation, proposed.get(request.request_id, incarnation)
        )

    def granted(self, engine: Engine, learner_id: str, incarnation: Incarnation) -> None:
        """A learner got a new life."""
        known = self._ever_granted.get(learner_id)
        if known is not None and self._world.is_strict:
            is_new = incarnation > known or incarnation.term < known.term
            assert is_new, f"{learner_id} gets {incarnation} after {known}"
        self._ever_granted[learner_id] = max(incarnation, known or incarnation)
        self._granted[engine.claim.term, learner_id] = incarnation

    def event(self, engine: Engine, event: ev.Event) -> None:
        """Something is fed to the core."""
        if isinstance(event, ev.StepReported):
            key = (engine.claim.term, event.learner_id, event.incarnation)
            self._reported[key] = max(self._reported.get(key, 0), event.local_step)

    def pulls(self, engine: Engine, pull: fx.SendPull) -> None:
        """A learner is asked: one local step serves one round."""
        key = (engine.claim.term, pull.learner_id, pull.incarnation)
        reported = self._reported.get(key, 0)
        assert reported > self._asked.get(key, 0), f"{key} is asked twice for one local step"
        self._asked[key] = reported
        learner = engine.core.state.roster.find(pull.learner_id)
        assert learner is not None, "known"
        assert learner.live, f"{pull.learner_id} is asked and is {learner.state}"
        assert pull.fragment == pull.global_step % self._world.layout.num_fragments

    def state(self, engine: Engine) -> None:
        """After every event: bounds that hold whoever is silent, slow or hostile."""
        state, now = engine.core.state, self._world.kernel.now
        steps = [r.global_step for r in state.rounds]
        assert steps == list(range(state.committed + 1, state.committed + 1 + len(steps)))
        assert len(steps) <= state.settings.overlap, f"in flight: {steps}"
        for round_ in state.rounds:
            for learner_id, pending in round_.pending.items():
                assert pending.limit_s <= state.settings.push_timeout_s
                assert now < pending.late_at(), f"waits for {learner_id} beyond its limit"
            if round_.state is RoundState.GRACE:
                assert now < round_.grace_until, "grace goes on for too long"
        self._num_states += 1
        if self._num_states % 16 == 0:
            waits = engine.core.waits(now)
            assert bool(waits) != state.complete, "it waits without a reason"
            assert all(w.reason and w.detail for w, _ in waits), f"no reason in {waits}"

    # -- contributions ---------------------------------------------------------------------------

    def counts(self, learner: LearnerProcess, counted: int, origin: int, last: int) -> None:
        """A learner counts steps since its last update, or acceptance that it heard of."""
        assert counted <= last - origin, f"{learner.name} counts more than it trained since then"

    def pushes(self, learner: LearnerProcess, push: Push, local: torch.Tensor) -> None:
        """A learner computed an outer gradient from this local copy."""
        assert push.work is not None, "honest"
        uid, first, last = push.work
        self._locals[uid, push.fragment, first, last] = local

    def accepts(
        self, engine: Engine, effect: fx.AcceptPush, ticket: Ticket,
        older_base: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """A push is accepted: the instant of accumulation."""
        del older_base  # what the shell found is what is checked: see `_expected`
        key, term = effect.key, engine.claim.term
        newest = self._granted.get((term, key.learner_id))
        assert newest == key.incarnation, f"{key} is accepted, and {newest} has joined"
        round_ = engine.core.state.round(key.global_step)
        assert round_ is not None, "in flight"
        contribution = round_.accepted[key.learner_id]
        assert effect.weight == contribution.weight
        work = None if ticket.work is None else (
            ticket.work[0], key.fragment, *ticket.work[1:],
        )  # fmt: skip
        vector = self._expected(engine, key.fragment, contribution.base, ticket, work)
        accepted = Accepted(key.learner_id, effect.weight, vector, work)
        known = self._accepted.setdefault((term, key.global_step), [])
        assert key.learner_id not in {x.learner_id for x in known}, f"{key} is accepted twice"
        known.append(accepted)

    def _expected(
        self, engine: Engine, fragment: int, base: Version, ticket: Ticket, work: Span | None
    ) -> torch.Tensor:
        """What must be accumulated: the newest published copy minus the local copy."""
        now = engine.updates.published(fragment)
        copy = self._copies[fragment, base.digest]
        if work is None:
            vector = ticket.vector
            assert vector is not None, "staged"
            return vector if base.digest == engine.updates.version(fragment).digest else (
                vector + (now - copy)
            )  # fmt: skip
        local = self._locals[work]
        vector = copy - local
        if base.digest != engine.updates.version(fragment).digest:
            vector = vector + (now - copy)
        bound = 1e-4 * (1.0 + float(local.abs().max()) + float(copy.abs().max()))
        assert float((vector - (now - local)).abs().max()) < bound, "not published minus local"
        return vector

    def merged(
        self, engine: Engine, effect: fx.MergeRound, before: FragmentState, merged: Merged
    ) -> None:
        """A round was merged: the same again from what the oracle saw."""
        settings, layout = self._world.settings, self._world.layout
        version = engine.updates.version(effect.fragment)
        known = self.lineages.states[effect.fragment, version]
        assert fingerprint(before) == known, f"fragment {effect.fragment} is not {version}"
        spec = layout.fragments[effect.fragment]
        average = spec.role is TensorRole.EMBEDDING
        method = MergeMethod.AVERAGE if average else MergeMethod(settings.merge)
        total = Accumulator(spec.pieces, method, Granularity(settings.granularity))
        for accepted in self._accepted[engine.claim.term, effect.global_step]:
            total.add(accepted.vector, accepted.weight)
        outer = OuterSettings(
            learning_rate=settings.outer_learning_rate,
            momentum=settings.outer_momentum,
            nesterov=True,
        )
        after, _ = advance(before, total.result(), outer, get_codec(settings.codec_down))
        mark = fingerprint(merged.state)
        assert fingerprint(after) == mark, f"round {effect.global_step} merged something else"
        self.lineages.states[effect.fragment, merged.update.result] = mark
