"""Tells the membership who is alive, and again whatever a keeper that was emptied forgot."""

from __future__ import annotations

import asyncio
import logging

from decoupled_diloco.errors import DilocoError
from decoupled_diloco.logs import ChangeLogger
from synchronizer_server.engine import Engine
from synchronizer_server.membership.base import Membership

logger = logging.getLogger(__name__)


async def run_heartbeats(engine: Engine, membership: Membership) -> None:
    """Heartbeats for the live learners in one batch per interval, for ever; nothing waits for it.

    A membership that fails is said once, and again when it is back.
    """
    settings = engine.parts.settings
    changes = ChangeLogger(logger)
    while True:
        await asyncio.sleep(settings.heartbeat_interval_s)
        try:
            await beat(engine, membership)
        except DilocoError as error:
            engine.vitals.membership_failure = error.reason
            changes.log("membership", str(error.reason), error.message, level=logging.WARNING)
        else:
            engine.vitals.membership_failure = None
            if changes.reason("membership") is not None:
                changes.log("membership", "reachable")


async def beat(engine: Engine, membership: Membership) -> None:
    """One heartbeat for all, seeded mark and quorum, and the end of who is silent.

    Raises:
        DilocoError: as ``Membership``.
    """
    state = engine.core.state
    await membership.heartbeat(engine.live_incarnations(), state.term)
    if state.seeded:
        await membership.mark_seeded(state.term)
    quorum = state.quorum
    if quorum != engine.parts.settings.quorum or engine.quorum_owed:
        await membership.set_quorum(quorum, state.term)
        engine.quorum_owed = engine.quorum_owed and quorum != state.quorum
    limit_s = engine.parts.settings.heartbeat_timeout_s
    for member in await membership.expire(limit_s, state.term):
        logger.info(
            "%s (%s) is no member any more: unheard for %.1f s",
            member.learner_id,
            member.incarnation,
            member.age_s,
        )
