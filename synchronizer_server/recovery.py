"""The relay of inner state from a donor to a recovering learner: a bounded stream, nothing kept.

A few chunks per recovery wait here at most. Where the recipient reads slowly, the donor's stream is
read slowly, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeVar

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.journal import Journal
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.versions import Incarnation
from synchronizer_server.core import effects as fx

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITING: Final = 4
"""Messages of one recovery that wait for its recipient; a chunk is 1 MiB at most."""

Tell = Callable[[str, Incarnation, pb.ReportResponse], None]


class Donation:
    """One donor's part in a recovery, from being asked until it is done or dropped.

    Attributes:
        learner_id: the donor.
        incarnation: under which life it was asked.
        known: global step by fragment that it must have applied.
        is_open: True once its stream is there; a second one is refused.
        over: why nothing more is taken from it; set by the core.
    """

    def __init__(self, learner_id: str, incarnation: Incarnation, known: tuple[int, ...]) -> None:
        self.learner_id = learner_id
        self.incarnation = incarnation
        self.known = known
        self.is_open = False
        self.over: asyncio.Future[DilocoError] = asyncio.get_running_loop().create_future()

    def end(self, error: DilocoError) -> None:
        """Takes nothing more from it; the first reason stands."""
        if not self.over.done():
            self.over.set_result(error)


class Relay:
    """One recovery: what is on its way to the recipient.

    Args:
        recovery_id: names it.
        learner_id: the recipient.

    Attributes:
        donation: the donor asked last.
        num_bytes: bytes of inner state taken from it.
        is_whole: True once that is all of it.
        error: why it came to nothing; set by the core.
    """

    def __init__(self, recovery_id: str, learner_id: str) -> None:
        self.recovery_id = recovery_id
        self.learner_id = learner_id
        self.donation: Donation | None = None
        self.num_bytes = 0
        self._waiting: deque[pb.RecoverResponse] = deque()
        self.is_whole = False
        self.error: DilocoError | None = None
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._reader = asyncio.current_task()
        self._is_writing = False

    # -- the recipient's side --------------------------------------------------------------------

    async def messages(self) -> AsyncIterator[pb.RecoverResponse]:
        """Yields headers and chunks until a donor's state is whole; a header starts anew.

        Raises:
            DilocoError: why it came to nothing.
        """
        while True:
            if self.error is not None:
                raise self.error
            if self._waiting:
                message = self._waiting.popleft()
                self._room.set()
                self._is_writing = True
                yield message
                self._is_writing = False
            elif self.is_whole:
                return
            else:
                self._news.clear()
                await self._news.wait()

    # -- the donor's side ------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """True while the donor has to wait for the recipient."""
        return len(self._waiting) >= MAX_WAITING

    async def offer(self, donation: Donation, message: pb.RecoverResponse) -> None:
        """Hands a message on, once there is room.

        Raises:
            DilocoError: why nothing more is taken from this donor.
        """
        while self.is_full and not donation.over.done():
            self._room.clear()
            await first_of(self._room.wait(), donation.over)
        if donation.over.done():
            raise donation.over.result()
        self._waiting.append(message)
        self.num_bytes += len(message.chunk.data)
        self._news.set()

    def whole(self) -> None:
        """The donor has sent everything."""
        self.is_whole = True
        self._news.set()

    # -- the core's side -------------------------------------------------------------------------

    def ask(self, donation: Donation) -> None:
        """Another donor: what the one before sent is thrown away."""
        self._waiting.clear()
        self._room.set()
        self.num_bytes = 0
        self.donation = donation

    def end(self, error: DilocoError) -> None:
        """It came to nothing, for the donor and for the recipient."""
        if self.error is None:
            self.error = error
        self.close(error)
        self._news.set()
        if self._is_writing and self._reader is not None:
            self._reader.cancel()  # it does not read, so that no status would reach it either

    def close(self, error: DilocoError) -> None:
        """The recipient is served or gone: nothing more is taken."""
        if self.donation is not None:
            self.donation.end(error)
        self._waiting.clear()


class RelayDesk:
    """All recoveries of one synchronizer, by id.

    Args:
        tell: says something on a learner's report stream.
        journal: events worth a figure later.
    """

    def __init__(self, tell: Tell, journal: Journal) -> None:
        self._tell = tell
        self._journal = journal
        self._relays: dict[str, Relay] = {}
        self._num_opened = 0

    def open(self, learner_id: str, term: int) -> Relay:
        """A new recovery; called in the task that serves the recipient."""
        self._num_opened += 1
        relay = Relay(f"{term}.{self._num_opened}", learner_id)
        self._relays[relay.recovery_id] = relay
        return relay

    def find(self, recovery_id: str) -> Relay | None:
        """The recovery of an id, while it is under way."""
        return self._relays.get(recovery_id)

    def close(self, relay: Relay, error: DilocoError | None) -> None:
        """The recipient has everything, or its stream is over for the reason given."""
        if self._relays.pop(relay.recovery_id, None) is None:
            return
        donor = relay.donation.learner_id if relay.donation is not None else ""
        if error is None:
            logger.info(
                "%s has the inner state of %s, %d bytes", relay.learner_id, donor, relay.num_bytes
            )
        else:
            logger.info("%s has no inner state: %s", relay.learner_id, error)
        self._journal.write(
            "recovered" if error is None else "not_recovered",
            learner_id=relay.learner_id,
            donor=donor,
            num_bytes=relay.num_bytes,
            reason="" if error is None else str(error.reason),
        )
        relay.close(error or DilocoError(Reason.RECOVERY_VOID, "the recovery is over"))

    def close_all(self, error: DilocoError) -> None:
        """The synchronizer stops."""
        for relay in list(self._relays.values()):
            relay.end(error)

    def carry_out(self, effect: fx.AskDonor | fx.DropDonor | fx.EndRecovery) -> None:
        """What the core wants done."""
        relay = self._relays.get(effect.recovery_id)
        if relay is None:
            return
        match effect:
            case fx.AskDonor():
                self._ask(relay, effect)
            case fx.DropDonor():
                self._drop(relay, effect)
            case fx.EndRecovery():
                relay.end(DilocoError(effect.reason, effect.message))

    def _ask(self, relay: Relay, effect: fx.AskDonor) -> None:
        logger.info("%s recovers from %s", effect.recipient_id, effect.learner_id)
        self._journal.write("recovery", learner_id=effect.recipient_id, donor=effect.learner_id)
        relay.ask(Donation(effect.learner_id, effect.incarnation, effect.known_global_steps))
        donate = pb.Donate(
            recovery_id=effect.recovery_id, known_global_steps=effect.known_global_steps
        )
        self._tell(effect.learner_id, effect.incarnation, pb.ReportResponse(donate=donate))

    def _drop(self, relay: Relay, effect: fx.DropDonor) -> None:
        logger.info(
            "%s gives no inner state to %s, %s: %s",
            effect.learner_id,
            relay.learner_id,
            effect.reason,
            effect.message,
        )
        if relay.donation is not None:
            relay.donation.end(DilocoError(effect.reason, effect.message))


async def first_of(work: Awaitable[T], over: asyncio.Future[DilocoError]) -> T | None:
    """Awaits ``work``; None where ``over`` comes first."""
    working: asyncio.Future[T] = asyncio.ensure_future(work)
    waiting: list[asyncio.Future[Any]] = [working, over]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return None if over.done() else await working
    finally:
        working.cancel()
