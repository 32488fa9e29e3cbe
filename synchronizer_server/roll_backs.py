"""Who waits until a fragment is put back."""

from __future__ import annotations

import asyncio

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.versions import Version


class RollBacks:
    """Answers that are outstanding, by fragment; all who ask for one fragment get the same."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Version]] = {}

    def wait(self, fragment: int) -> asyncio.Future[Version]:
        """The version that a fragment gets when it is put back, once it is published."""
        if fragment not in self._waiting:
            self._waiting[fragment] = asyncio.get_running_loop().create_future()
        return self._waiting[fragment]

    def published(self, fragment: int, version: Version) -> None:
        """A fragment was put back."""
        waiting = self._waiting.pop(fragment, None)
        if waiting is not None:
            waiting.set_result(version)

    def failed(self, fragment: int, error: DilocoError) -> None:
        """A fragment cannot be put back."""
        waiting = self._waiting.pop(fragment, None)
        if waiting is not None:
            waiting.set_exception(error)
            waiting.exception()  # nobody may be left who asks

    def ended(self) -> None:
        """No round opens any more."""
        for fragment in list(self._waiting):
            self.failed(
                fragment,
                DilocoError(
                    Reason.DRAINING, f"the rounds ended before fragment {fragment} was put back"
                ),
            )
