"""Who calls: an incarnation that is current, or the reason why it is not."""

from __future__ import annotations

from decoupled_diloco.errors import DilocoError
from decoupled_diloco.versions import Incarnation
from synchronizer_server.core.roster import Learner
from synchronizer_server.engine import Engine


def require_current(engine: Engine, learner_id: str, incarnation: Incarnation) -> Learner:
    """Returns the learner whose newest incarnation this is.

    Raises:
        DilocoError: FENCED where a later incarnation has joined (that process must stop);
            STALE_TERM or UNKNOWN_LEARNER where the same process is to join again.
    """
    state = engine.core.state
    stranger = state.roster.why_not_current(learner_id, incarnation, state.term)
    if stranger is not None:
        raise DilocoError(*stranger)
    learner = state.roster.find(learner_id)
    assert learner is not None, "current"
    return learner
