"""Finds the synchronizer that leads, among all whose addresses are known, and moves there.

Learners and observers share it. What is decided stands in ``core.leadership``; here is who asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.settings import PROTOCOL_VERSION
from decoupled_diloco.v1 import admin_pb2, synchronizer_pb2, types_pb2
from learner_client.addresses import usable_addresses
from learner_client.core.leadership import Answer, Leadership, Move, Stall
from learner_client.core.retry import REJOIN, is_fatal
from learner_client.runtime import Runtime
from learner_client.transport.base import Transport
from learner_client.transport.switching import SwitchingTransport

_LOG = logging.getLogger("learner_client")

ASK_DEADLINE_S: Final = 3.0
"""Longest wait for an answer to who leads."""

_ASK_INTERVAL_S: Final = 0.5
_LINGER_S: Final = 0.5
_LOOKS_PER_LEASE: Final = 4
_MAX_TERM_DIGITS: Final = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An answer, with what came with it.

    Attributes:
        answer: the answer.
        run: settings and layout, from one that leads.
        error: why there is none.
        calls: open transport to who answered.
    """

    answer: Answer
    run: admin_pb2.GetRunResponse | None
    error: DilocoError | None
    calls: Transport


class LeaderSearch:
    """The way to whoever leads.

    Args:
        name: who asks, for log lines.
        addresses: addresses from the settings.
        connect: opens the transport to an address.
        runtime: time and chance.
        run_id: run that is looked for; empty takes whichever is served.
        insecure: True where plaintext to another machine was asked for.
        may_learn: False where addresses that somebody names lead nowhere.
        on_move: called with every move.
    """

    def __init__(
        self,
        *,
        name: str,
        addresses: Sequence[str],
        connect: Callable[[str], Transport],
        runtime: Runtime | None = None,
        run_id: str = "",
        insecure: bool = False,
        may_learn: bool = True,
        on_move: Callable[[Move], None] | None = None,
    ) -> None:
        self.leadership = Leadership(addresses)
        self.transport = SwitchingTransport(connect, self.leadership.current)
        self.relay: Callable[[Transport], Awaitable[None]] | None = None
        self._name = name
        self._runtime = runtime or Runtime()
        self._run_id = run_id
        self._insecure = insecure
        self._may_learn = may_learn
        self._on_move = on_move
        self._claim: types_pb2.LeadershipClaim | None = None
        self._joined: types_pb2.LeadershipClaim | None = None
        self._lost = True
        self._why = ""

    @property
    def claim(self) -> types_pb2.LeadershipClaim | None:
        """Highest claim to be relayed; None before the first."""
        return self._claim

    # -- what is heard -----------------------------------------------------------------------

    def heard(self, message: types_pb2.LeadershipClaim, addresses: Iterable[str] = ()) -> None:
        """Somebody passed on a claim, and perhaps addresses."""
        self._learn(addresses)
        if self._is_of_our_run(message.run_id):
            self.leadership.heard(message.term)
            known = -1 if self._claim is None else self._claim.term
            if message.signature and message.term > known:
                self._claim = message

    def joined(self, response: synchronizer_pb2.JoinResponse) -> None:
        """A Join was answered.

        Raises:
            DilocoError: NOT_LEADING where it came from one that leads no longer.
        """
        claim = response.claim
        if claim.term < self.leadership.highest:
            raise DilocoError(
                Reason.NOT_LEADING,
                f"{self._at()} leads term {claim.term}, and term {self.leadership.highest} was "
                "heard of: it was cut off from its peers",
            )
        self._run_id = self._run_id or claim.run_id
        self._learn(response.addresses)
        self.leadership.joined(claim.term)
        self._joined = self._claim = claim

    def judged(self, error: DilocoError) -> DilocoError:
        """Takes what ended a connection or refused a Join; returns what it is to be taken for.

        What one of a lower term refuses for good, such as with FENCED, it may not decide any more.
        """
        told = self._term_of(error)
        self._learn(error.details.get("addresses", "").split(","))
        leadership = self.leadership
        if error.reason is Reason.BAD_CLAIM and self._claim is not None:
            self._disown()
            return DilocoError(
                Reason.NOT_LEADING, f"a claim was no synchronizer's: {error.message}"
            )
        leadership.heard(told or 0)
        if error.reason is Reason.NOT_LEADING:
            leadership.declined()
        is_stale = (leadership.term if told is None else told) < leadership.highest
        if is_fatal(error) and is_stale:
            error = DilocoError(
                Reason.NOT_LEADING,
                f"{self._at()} says {error.reason}, and it does not lead: term "
                f"{leadership.highest} was heard of",
            )
        if error.reason not in REJOIN or not leadership.is_obeyed:
            # Why the last one was left, not why the next one is not found yet.
            self._why = self._why if self._lost else str(error)
            self._lost = True
        return error

    def _disown(self) -> None:
        """What was relayed is not believed: back to the claim of who was joined, or to none."""
        is_joined = self._claim == self._joined
        self._claim = None if is_joined else self._joined
        self.leadership.disowned()

    def _learn(self, addresses: Iterable[str]) -> None:
        if self._may_learn:
            self.leadership.learnt(usable_addresses(addresses, insecure=self._insecure))

    def _is_of_our_run(self, run_id: str) -> bool:
        return not (run_id and self._run_id) or run_id == self._run_id

    @property
    def _has_choice(self) -> bool:
        return len(self.leadership.addresses) > 1

    def _at(self) -> str:
        return self.leadership.current or "the synchronizer"

    # -- where to go -------------------------------------------------------------------------

    async def settle(self) -> None:
        """Goes to who leads where the connection was lost; to be called before the next one.

        With a single address there is nobody else to ask.

        Raises:
            DilocoError: why nobody was found; ask again later unless no waiting heals it.
        """
        if self._lost and self._has_choice:
            await self.find()
        self._lost = False

    def pause_s(self, backoff_s: float) -> float:
        """How long to wait before the next attempt, seconds; less where asking is cheap."""
        return min(backoff_s, _ASK_INTERVAL_S) if self._has_choice else backoff_s

    async def find(self) -> admin_pb2.GetRunResponse:
        """Asks all, goes to the one that leads, and returns what it serves.

        Raises:
            DilocoError: why nobody was found.
        """
        asked = await self._ask(self.leadership.addresses)
        best = self.leadership.choose([item.answer for item in asked])
        chosen = next((item for item in asked if item.answer is best), None)
        try:
            if best is None:
                await self._relay(asked)
                raise self._nobody(asked)
            assert chosen is not None, "one of those asked"
            assert chosen.run is not None, "it leads"
            await self._go(best, chosen.calls)
            return chosen.run
        finally:
            for item in asked:
                if item is not chosen:
                    await item.calls.aclose()

    async def keep_watch(
        self, lease_timeout_s: float, seen: Callable[[], tuple[bool, int]]
    ) -> None:
        """Asks the others whenever nothing new comes for long; to run beside a connection.

        Args:
            lease_timeout_s: as served.
            seen: tells whether the connection claims to hold, and how many versions have come.

        Raises:
            DilocoError: NOT_LEADING once the current synchronizer is to be left.
        """
        if not (self._runtime.has_time and self._may_learn):
            # Without time nothing is ever late; with a fixed transport there is nobody to ask.
            await asyncio.get_running_loop().create_future()
        stall = Stall(lease_timeout_s)
        while True:
            online, num_versions = seen()
            now = self._runtime.clock()
            if stall.is_due(now, online=online, num_versions=num_versions):
                await self.look()
            await self._runtime.sleep(lease_timeout_s / _LOOKS_PER_LEASE)

    async def look(self) -> None:
        """Asks all others, with the connection to the current one in place.

        Raises:
            DilocoError: NOT_LEADING where the current one is to be left.
        """
        leadership = self.leadership
        if not self._has_choice:
            return
        asked = await self._ask(leadership.addresses)
        for item in asked:
            await item.calls.aclose()
        if not leadership.stays([item.answer for item in asked]):
            raise DilocoError(
                Reason.NOT_LEADING,
                f"nothing new from {leadership.current}; asked all: {_told(asked)}",
            )

    async def _go(self, best: Answer, calls: Transport) -> None:
        leadership, left = self.leadership, self.leadership.current
        is_move = leadership.term > 0 and best.address != left
        leadership.chosen(best)
        await self.transport.switch(best.address, calls)
        if is_move:
            move = Move(left=left, address=best.address, term=best.term, why=self._why)
            _LOG.info(
                "%s: moves from %s to %s, which leads term %d: %s",
                self._name, move.left, move.address, move.term, move.why,
            )  # fmt: skip
            if self._on_move is not None:
                self._on_move(move)

    async def _relay(self, asked: Sequence[Asked]) -> None:
        """Lets those who lead an earlier term know of the later one, by its signed claim."""
        claim = self._claim
        if self.relay is None or claim is None or claim.term < self.leadership.highest:
            return
        for item in asked:
            if item.answer.leads:
                with contextlib.suppress(TimeoutError):
                    async with self._runtime.limit(ASK_DEADLINE_S):
                        await self.relay(item.calls)

    def _nobody(self, asked: Sequence[Asked]) -> DilocoError:
        """What to say, and whether to ask again."""
        errors = [item.error for item in asked if item.error is not None]
        nobody_leads = len(errors) == len(asked)
        if nobody_leads and (len(asked) == 1 or all(is_fatal(error) for error in errors)):
            return errors[0]
        at_least = f" term {self.leadership.highest} or later" if self.leadership.highest else ""
        return DilocoError(
            Reason.NOT_LEADING, f"no synchronizer leads{at_least}: {_told(asked)}; asking again"
        )

    # -- asking ------------------------------------------------------------------------------

    async def _ask(self, addresses: Sequence[str]) -> list[Asked]:
        """Asks all at once; those that are slow are left out once a new leader is found."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._ask_one(address)) for address in addresses]
        linger_s = _LINGER_S if self._runtime.has_time else None
        try:
            pending = set(tasks)
            while pending:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if pending and any(self._is_new(task.result()) for task in tasks if task.done()):
                    await asyncio.wait(pending, timeout=linger_s)
                    break
        except asyncio.CancelledError:
            for item in await _answers(tasks):
                await item.calls.aclose()
            raise
        return await _answers(tasks)

    def _is_new(self, asked: Asked) -> bool:
        is_later = asked.answer.term > self.leadership.term
        return is_later and self.leadership.is_acceptable(asked.answer)

    async def _ask_one(self, address: str) -> Asked:
        calls = self.transport.open(address)
        request = admin_pb2.GetRunRequest(protocol_version=PROTOCOL_VERSION)
        try:
            async with self._runtime.limit(ASK_DEADLINE_S):
                run = await calls.get_run(request)
            return self._read(address, run, calls)
        except TimeoutError:
            text = f"no answer within {ASK_DEADLINE_S:.0f} s"
            return self._no(address, DilocoError(Reason.UNAVAILABLE, text), calls)
        except DilocoError as error:
            return self._no(address, error, calls)
        except BaseException:
            await calls.aclose()
            raise

    def _read(self, address: str, run: admin_pb2.GetRunResponse, calls: Transport) -> Asked:
        run_id = run.claim.run_id or run.settings.run_id
        if not self._is_of_our_run(run_id):
            text = f"it serves run {run_id!r}, not {self._run_id!r}; check the address"
            return self._no(address, DilocoError(Reason.RUN_MISMATCH, text), calls)
        self.heard(run.claim)
        answer = Answer(address=address, leads=True, term=run.claim.term)
        return Asked(answer=answer, run=run, error=None, calls=calls)

    def _no(self, address: str, error: DilocoError, calls: Transport) -> Asked:
        answer = Answer(
            address=address,
            follows=error.reason is Reason.NOT_LEADING,
            term=self._term_of(error) or 0,
            detail=str(error.reason),
        )
        self._learn(error.details.get("addresses", "").split(","))
        return Asked(answer=answer, run=None, error=error, calls=calls)

    def _term_of(self, error: DilocoError) -> int | None:
        """Term that an error names, of our run; None where it names none."""
        text = error.details.get("term", "")
        is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_TERM_DIGITS
        if not is_number or not self._is_of_our_run(error.details.get("run_id", "")):
            return None
        return int(text)


async def _answers(tasks: Sequence[asyncio.Task[Asked]]) -> list[Asked]:
    """Gives up those that run still; the rest in their order, so that all is judged alike."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks if not task.cancelled()]


def _told(asked: Sequence[Asked]) -> str:
    return ", ".join(
        f"{item.answer.address} "
        + (f"leads term {item.answer.term}" if item.answer.leads else item.answer.detail)
        for item in asked
    )
