"""Watches a fleet through the admin services of its synchronizers: one thread for each of them, so
that one that is frozen holds up no look at the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import grpc

from decoupled_diloco.errors import DilocoError
from decoupled_diloco.v1 import admin_pb2
from diloco_fleet.chaos.record import STALE_S
from diloco_fleet.chaos.sample import LearnerSeen, Sample
from diloco_fleet.status import Seen, StatusClient, who_leads

LOOK_S: Final = 0.25
"""Time between two looks."""

_END_S: Final = 10.0


class Watch:
    """Looks at every synchronizer all the time. Use as a context manager.

    Args:
        addresses: where they listen, by name.
        insecure: True where plaintext to another machine was asked for.
        clock: monotonic, seconds.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        *,
        insecure: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._answers: dict[str, tuple[float, Seen]] = {}
        self._stop = threading.Event()
        self._clients = {
            name: StatusClient(address, insecure=insecure) for name, address in addresses.items()
        }
        self._threads = [
            threading.Thread(target=self._look, args=item, name=f"watch-{item[0]}", daemon=True)
            for item in self._clients.items()
        ]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._clients.values():
            client.close()
        for thread in self._threads:
            thread.join(_END_S)

    def answers(self) -> dict[str, Seen]:
        """What each synchronizer answered last, without what is too old to be true."""
        now = self._clock()
        with self._lock:
            return {n: seen for n, (at_s, seen) in self._answers.items() if now - at_s <= STALE_S}

    def _look(self, name: str, client: StatusClient) -> None:
        while not self._stop.wait(LOOK_S):
            # A closed channel raises ValueError or cancels: the watch is over.
            with suppress(DilocoError, ValueError, grpc.FutureCancelledError):
                [seen] = client.look()
                with self._lock:
                    self._answers[name] = (self._clock(), seen)


def make_sample(
    answers: Mapping[str, Seen],
    *,
    at_s: float,
    running: Sequence[str],
    restarts: Mapping[str, int] = MappingProxyType({}),
    struck: Mapping[int, str] = MappingProxyType({}),
    ended: str = "",
) -> Sample:
    """Brings together what synchronizers and injector know.

    Args:
        answers: of synchronizers, by name.
        at_s: the time.
        running: names of the processes that run.
        restarts: see `Sample`.
        struck: see `Sample`.
        ended: see `Sample`.
    """
    leading = who_leads(list(answers.values()))
    name = next((name for name, seen in answers.items() if seen is leading), None)
    nobody = Sample(
        at_s=at_s, running=frozenset(running), restarts=restarts, struck=struck, ended=ended
    )
    if leading is None or leading.status is None or name is None:
        return nobody
    status = leading.status
    return replace(
        nobody,
        leader=name,
        term=leading.term,
        global_step=status.global_step,
        in_sync=any(replica.in_sync for replica in status.replication.replicas),
        lease_held=status.replication.lease_held,
        learners={learner.learner_id: _learner(learner) for learner in status.learners},
    )


def _learner(learner: admin_pb2.LearnerStatus) -> LearnerSeen:
    return LearnerSeen(
        state=learner.state,
        incarnation=(learner.incarnation.term, learner.incarnation.number),
        local_step=learner.local_step,
        accepted=learner.accepted,
        silent_s=learner.heard_seconds_ago,
    )
