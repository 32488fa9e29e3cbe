"""The keeper (Redis): the shipped semantics of the twin in memory, behind a network that fails.

Every call rides on a connection of its own: one that was held up on its way may be executed long
after its caller gave it up, and after later ones.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

from decoupled_diloco.errors import DilocoError, Reason
from diloco_fleet.simulation.kernel import Kernel, Process, Work
from diloco_fleet.simulation.network import Network
from synchronizer_server.membership.memory import MemoryMembership
from synchronizer_server.membership.memory_lease import MemoryLease
from synchronizer_server.membership.memory_server import MemoryLeaseServer

Question = Coroutine[Any, Any, Any]


class Keeper(Process):
    """One Redis.

    Args:
        kernel: time.
        network: how it is reached.
        timeout_s: how long its callers wait.
    """

    def __init__(self, kernel: Kernel, network: Network, timeout_s: float) -> None:
        super().__init__(kernel, "keeper")
        self.server = MemoryLeaseServer(clock=lambda: kernel.now)
        self.lease = MemoryLease(self.server)
        self.membership = MemoryMembership(server=self.server)
        self.num_emptied = 0
        self.num_restored = 0
        self._network = network
        self._timeout_s = timeout_s
        self.begin()

    def ask(self, caller: Process, question: Callable[[], Question], held_s: float = 0.0) -> Work:
        """Asks it; the question is held up for ``held_s`` seconds on its way.

        Raises:
            DilocoError: MEMBERSHIP_UNAVAILABLE where it does not answer; what it refuses.
        """
        try:
            return (
                yield self._network.call(
                    caller, self, lambda: _run(question), self._timeout_s, held_s
                )
            )
        except DilocoError as error:
            if error.reason is not Reason.UNAVAILABLE:
                raise
            raise DilocoError(
                Reason.MEMBERSHIP_UNAVAILABLE, "the keeper does not answer; try again later"
            ) from error

    def empty(self) -> None:
        """It forgets everything."""
        self.num_emptied += 1
        self.server.empty()

    def backup(self) -> dict[str, Any]:
        """What it holds now."""
        return {
            field.name: copy.deepcopy(getattr(self.server, field.name))
            for field in dataclasses.fields(self.server)
            if field.name != "clock"
        }

    def restore(self, backup: dict[str, Any]) -> None:
        """Puts it back to an earlier time."""
        self.num_restored += 1
        for name, value in backup.items():
            setattr(self.server, name, copy.deepcopy(value))


def _run(question: Callable[[], Question]) -> Work:
    """Runs a coroutine that never waits, as those of the twin in memory are."""
    yield 0.0
    try:
        question().send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the keeper in memory never waits")
