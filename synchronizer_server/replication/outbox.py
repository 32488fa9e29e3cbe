"""What is on its way to one standby: bounded, in order, with a shorter way for who falls behind."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Final

from decoupled_diloco.v1 import replication_pb2 as pb
from decoupled_diloco.versions import Version
from decoupled_diloco.wire import malformed
from synchronizer_server.replication.messages import Transfer

MAX_RECORDS: Final = 4
"""Records that wait for a standby, and records sent that it has not acknowledged."""


class Outbox:
    """One standby's records.

    Where more than `MAX_RECORDS` would wait, they are dropped and the newest cut takes their
    place: the newest record with every fragment that differs from what the standby was sent.

    Args:
        standby_id: whose it is.
        held: version that the standby holds of each fragment.
        behind: True where it begins with the newest cut.
    """

    def __init__(self, standby_id: str, held: Mapping[int, Version], *, behind: bool) -> None:
        self.standby_id = standby_id
        self._held = dict(held)
        self._behind = behind
        self._waiting: deque[Transfer] = deque()
        self._unacked: deque[tuple[int, int]] = deque()
        self._in_sync: bool | None = None
        self._closed = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def closed(self) -> bool:
        """True once nothing more is sent.

        Raises:
            Exception: why it was closed, where that is an error.
        """
        if self._error is not None:
            raise self._error
        return self._closed

    def close(self, error: Exception | None = None) -> None:
        """Ends the stream; what waits is dropped."""
        if not self._closed:
            self._closed, self._error = True, error
            self._waiting.clear()
            self.wake()

    def wake(self) -> None:
        """Lets the sender look again."""
        self._changed.set()

    async def changed(self) -> None:
        """Waits until there may be something to send."""
        await self._changed.wait()
        self._changed.clear()

    def offer(self, transfer: Transfer) -> None:
        """Queues a record; never waits."""
        if self._behind or self._closed:
            return
        if len(self._waiting) < MAX_RECORDS:
            self._waiting.append(transfer)
        else:
            self._waiting.clear()
            self._behind = True
        self.wake()

    def take(self, newest: Transfer | None) -> Transfer | None:
        """The next record to send; None where there is none, or too many are not acknowledged.

        Args:
            newest: the newest record with all fragments.
        """
        if len(self._unacked) >= MAX_RECORDS:
            return None
        transfer: Transfer | None = None
        if self._behind:
            assert newest is not None, "who is behind lacks a cut"
            versions = enumerate(newest.record.versions)
            lacks = [p for p, version in versions if self._held.get(p) != version]
            fragments = {p: newest.fragments[p] for p in lacks}
            transfer, self._behind = Transfer(record=newest.record, fragments=fragments), False
        elif self._waiting:
            transfer = self._waiting.popleft()
        if transfer is not None:
            self._held = dict(enumerate(transfer.record.versions))
            self._unacked.append((transfer.record.term, transfer.record.global_step))
        return transfer

    def acked(self, ack: pb.ReplicateAck) -> None:
        """Takes an acknowledgement; they come in the order of the records.

        Raises:
            DilocoError: MALFORMED where another one is due.
        """
        if not self._unacked or self._unacked[0] != (ack.term, ack.global_step):
            due = self._unacked[0] if self._unacked else "none"
            raise malformed(
                f"an acknowledgement of round {ack.global_step} of term {ack.term}; due is {due}"
            )
        self._unacked.popleft()
        self.wake()

    def tell(self, *, in_sync: bool) -> None:
        """Queues word of where the standby stands; the newest counts."""
        self._in_sync = in_sync
        self.wake()

    def take_state(self) -> bool | None:
        """Where the standby stands, once per change."""
        state, self._in_sync = self._in_sync, None
        return state
