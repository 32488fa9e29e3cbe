"""The seam between a synchronizer and the keeper of the lease of leadership (design section 6)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from decoupled_diloco.claims import Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """What the keeper says of one group of one run.

    Attributes:
        holder: claim of who holds the lease now; None where nobody does.
        address: where the holder is reached; empty without one.
        remaining_s: how long the lease lasts still, by the keeper's clock; 0 without a holder.
        term: highest term that the keeper knows; 0 where it knows none.
        in_sync: standbys by whose take-over nothing is lost; None where the keeper knows nothing
            of this run: it is new, or the keeper was emptied, or a leader had it forget.
    """

    holder: Claim | None
    address: str
    remaining_s: float
    term: int
    in_sync: frozenset[str] | None


class LeaseKeeper(Protocol):
    """Lease, term and standbys in sync of one group of one run; every call is one round trip.

    Every call may raise ``DilocoError``: ``MEMBERSHIP_UNAVAILABLE`` when the keeper does not
    answer (whether it did what was asked is then unknown), ``MALFORMED`` when what it holds is
    not ours. The keeper checks no signatures; who reads does.
    """

    async def read(self) -> LeaseView:
        """What the keeper says now."""

    async def acquire(
        self, claim: Claim, *, address: str, timeout_s: float, standby_id: str
    ) -> LeaseView:
        """Takes the lease, if it may: nobody else holds it, ``claim.term`` is above the keeper's
        term, and ``standby_id`` is in ``in_sync`` or the keeper knows nothing of this run.

        Taking it sets the term to the claim's and keeps ``in_sync``, as revision 0 of that term:
        who is named there may lead where the new holder cannot even begin. Before it serves what
        its store holds, of which others may lack the newest, it says with ``set_in_sync`` who is
        in sync now. A keeper that knows nothing names ``standby_id`` alone from here on. Asking
        again with a claim that holds the lease already renews it.

        Returns:
            What the keeper says afterwards; the lease is taken where ``holder == claim``.
        """

    async def renew(
        self, claim: Claim, *, address: str, timeout_s: float, in_sync: Collection[str],
        revision: int,
    ) -> LeaseView:  # fmt: skip
        """Prolongs the lease; takes it again where it ran out and nobody else took it, and where
        the keeper was emptied or put back to a time before this term, with ``term`` and
        ``in_sync`` written anew in these cases alone, under ``revision``: that of the newest
        ``set_in_sync`` that was asked for, so that none before it lands on what is written here.

        Refused (nothing changes) where somebody else holds it or the keeper's term is higher.

        Returns:
            What the keeper says afterwards; the lease is held where ``holder == claim``.
        """

    async def set_in_sync(
        self, claim: Claim, standby_ids: Collection[str], *, revision: int
    ) -> bool:
        """Says which stores are in sync; written anew where the keeper was emptied.

        False, and nothing changes, where ``claim.term`` is not the keeper's term, another claim
        holds the lease, or a higher ``revision`` of this term was written already: a write that
        was held up on its way must not undo a later one.
        """

    async def release(self, claim: Claim, *, forget: bool = False) -> None:
        """Gives the lease up, if this claim holds it; term and standbys in sync stay.

        Forgetting is possible, too, once the lease has run out and nobody has led a later term.

        Args:
            claim: who gives it up.
            forget: leave nothing behind, as in a keeper that was emptied, but a term above the
                claim's, so that no write of this claim lands that was held up on its way: what a
                leader without the run's rounds has told is worth nothing.
        """

    async def aclose(self) -> None:
        """Releases what is held open. Calling it again does nothing."""
