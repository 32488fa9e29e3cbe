"""Everything that a learner does with inner state: it recovers from a peer, and gives to peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from decoupled_diloco.errors import Reason, UsageError
from decoupled_diloco.v1 import synchronizer_pb2
from decoupled_diloco.versions import Version
from learner_client.core.learner_core import LearnerCore
from learner_client.donor import CopyDesk, Donor
from learner_client.grants import Grant
from learner_client.inner_state import InnerState
from learner_client.link import Link
from learner_client.recovery import Recoverer

RECOVER_MODES: Final = ("params", "peer", "checkpoint")
"""What a learner begins with beside the published parameters; see ``Learner``."""


class InnerWork:
    """Recovery and donation of one learner.

    Args:
        inner_state: the state; None where there is none to take or give.
        recover: one of ``RECOVER_MODES``.

    Attributes:
        is_restored: True where a saved state was loaded: then no peer is asked.

    Raises:
        UsageError: ``CONFIG_INVALID`` for another mode, ``CONFIG_CONFLICT`` for one that needs an
            inner state where there is none.
    """

    def __init__(self, inner_state: InnerState | None, recover: str) -> None:
        if recover not in RECOVER_MODES:
            raise UsageError(
                Reason.CONFIG_INVALID, f"recover is {recover!r}; one of {', '.join(RECOVER_MODES)}"
            )
        if recover != "params" and inner_state is None:
            raise UsageError(
                Reason.CONFIG_CONFLICT,
                f"recover={recover!r} needs an inner state; give "
                "inner_state=OptimizerState(model, optimizer)",
            )
        self.is_restored = False
        self._inner_state = inner_state
        self._asks_peers = recover != "params"
        self._copies = CopyDesk(inner_state)
        self._donor: Donor | None = None
        self._recoverer: Recoverer | None = None

    def serve(self, core: LearnerCore) -> None:
        """Makes the copy that a peer waits for, if one does. On the training thread."""
        self._copies.serve(core)

    # -- in the event loop -----------------------------------------------------------------

    def begin(self, link: Link, versions: Callable[[], dict[int, Version]]) -> None:
        """The background work begins.

        Args:
            link: the way to the synchronizer.
            versions: version held of each fragment.
        """
        self._donor = Donor(link, self._copies)
        if self._asks_peers and self._inner_state is not None and not self.is_restored:
            self._recoverer = Recoverer(link, self._inner_state, versions)
            link.exchange.may_train = self._recoverer.may_train

    async def recover(self, grant: Grant) -> None:
        """Recovers where that is still to be done; within one session.

        Raises:
            DilocoError: the session is lost; the next one goes on.
        """
        if self._recoverer is not None:
            await self._recoverer.run(grant)

    def asked(self, donate: synchronizer_pb2.Donate, grant: Grant) -> None:
        """A peer recovers from this learner."""
        assert self._donor is not None, "begun"
        self._donor.asked(donate, grant)

    async def aclose(self) -> None:
        """Ends what is under way."""
        if self._donor is not None:
            await self._donor.aclose()
