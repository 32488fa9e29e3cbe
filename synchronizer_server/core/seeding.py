"""The seed: the first parameters of a run, pushed by one incarnation (design section 5)."""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.errors import Reason
from decoupled_diloco.versions import Incarnation
from synchronizer_server.core.effects import (
    CloseStream,
    GrantSeed,
    LearnerChanged,
    PersistSeed,
    PublishSeed,
)
from synchronizer_server.core.events import SeedForbidden, SeedPersisted, SeedStaged
from synchronizer_server.core.roster import LearnerState
from synchronizer_server.core.state import CoreState


@dataclass(slots=True)
class Seeding:
    """Grants the seeding to one incarnation, and to another where that one is lost."""

    state: CoreState

    def joined(self, learner_id: str, incarnation: Incarnation, now: float) -> None:
        """A learner joined: it seeds where nobody does."""
        state = self.state
        if state.seeded or state.seed_persisting or state.seed_forbidden:
            return
        if state.seeder is not None and state.seeder[0] != learner_id:
            return
        state.seeder = (learner_id, incarnation)
        state.seeded_fragments.clear()
        state.seed_progress_at = now
        state.effects.append(GrantSeed(learner_id=learner_id, incarnation=incarnation))

    def forbidden(self, event: SeedForbidden) -> None:
        """The run was merged before: nobody seeds it, and who was about to is stopped."""
        state = self.state
        if state.seeded or state.seed_persisting:
            return
        state.seed_forbidden = event.learner_id
        state.seeded_fragments.clear()
        state.seeder = None

    def lost(self, learner_id: str, incarnation: Incarnation) -> None:
        """A learner is out. If it was the seeder, another one seeds anew."""
        state = self.state
        if state.seeder != (learner_id, incarnation) or state.seed_persisting:
            return
        state.seeder = None
        state.seeded_fragments.clear()

    def advance(self, now: float) -> None:
        """Replaces a seeder that brings nothing, and persists again after a failure.

        The seeding is granted at Join: where nobody has it, all live learners are told to join
        again, and the first that does seeds.
        """
        state = self.state
        if state.seeded or state.complete:
            return
        if state.seed_retry_at is not None and now >= state.seed_retry_at:
            state.seed_retry_at = None
            state.effects.append(PersistSeed())
        at = self.deadline()
        if state.seeder is not None and not state.seed_persisting and at is not None and now >= at:
            self.lost(*state.seeder)
        if state.seeder is not None or state.draining or state.seed_forbidden:
            return
        for learner in list(state.roster.live()):
            state.roster.move(learner, LearnerState.DISCONNECTED)
            state.effects += [
                LearnerChanged(
                    learner_id=learner.learner_id,
                    incarnation=learner.incarnation,
                    state=str(learner.state),
                    reason="told to join again: somebody must push the first parameters",
                ),
                CloseStream(
                    learner_id=learner.learner_id,
                    incarnation=learner.incarnation,
                    reason=Reason.UNKNOWN_LEARNER,
                ),
            ]

    def deadline(self) -> float | None:
        """When something must happen to the seed without an event; None where nothing."""
        state = self.state
        if state.seeded or state.complete:
            return None
        if state.seed_persisting:
            return state.seed_retry_at
        if state.seeder is None or not self._others_live():
            return None
        return state.seed_progress_at + state.settings.push_timeout_s

    def _others_live(self) -> bool:
        seeder = self.state.seeder
        live = self.state.roster.live()
        return any(seeder != (x.learner_id, x.incarnation) for x in live)

    def refusal(self, learner_id: str, incarnation: Incarnation, fragment: int) -> Reason | None:
        """Why this learner may not push the seed of this fragment; None where it may."""
        state = self.state
        if state.seeded or state.seed_persisting:
            return Reason.ALREADY_MERGED
        if state.seed_forbidden:
            return Reason.STORE_LOST
        if state.seeder != (learner_id, incarnation):
            return Reason.NOT_ASKED
        if not 0 <= fragment < state.num_fragments:
            return Reason.UNKNOWN_FRAGMENT
        return None

    def staged(self, event: SeedStaged, now: float) -> None:
        """A fragment of the seed is whole; with the last one the seed is persisted."""
        state = self.state
        if self.refusal(event.learner_id, event.incarnation, event.fragment) is not None:
            return
        state.seeded_fragments.add(event.fragment)
        state.seed_progress_at = now
        if len(state.seeded_fragments) == state.num_fragments:
            state.seed_persisting = True
            state.effects.append(PersistSeed())

    def persisted(self, event: SeedPersisted) -> None:
        """The seed is durable: publish it, and the rounds begin."""
        state = self.state
        state.seed_persisting = False
        state.held = ("", "")
        state.seed_retry_at = None
        state.seeder = None
        state.lineage.start(event.versions)
        state.effects.append(PublishSeed())
