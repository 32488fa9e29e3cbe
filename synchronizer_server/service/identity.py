"""Who calls: an incarnation that is current, or the reason why it is not."""

from __future__ import annotations

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.versions import Incarnation
from synchronizer_server.core.roster import Learner
from synchronizer_server.engine import Engine


def require_current(engine: Engine, learner_id: str, incarnation: Incarnation) -> Learner:
    """Returns the learner whose newest incarnation this is.

    Raises:
        DilocoError: FENCED where a later incarnation has joined (that process must stop);
            STALE_TERM or UNKNOWN_LEARNER where the same process is to join again.
    """
    known = engine.core.state.roster.find(learner_id)
    if known is None or known.incarnation < incarnation:
        raise DilocoError(Reason.UNKNOWN_LEARNER, f"{learner_id[:40]} has not joined; join again")
    if known.incarnation > incarnation:
        raise DilocoError(
            Reason.FENCED,
            f"{learner_id} lives on as incarnation {known.incarnation}; this one ({incarnation}) "
            "is fenced and must stop",
        )
    if incarnation.term != engine.core.state.term:
        raise DilocoError(
            Reason.STALE_TERM,
            f"incarnation {incarnation} is of an earlier term, {engine.core.state.term} leads; "
            "join again",
        )
    return known
