"""Pushes under way: staged bytes and answers, by key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from decoupled_diloco.codecs import Stager
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.v1 import types_pb2
from synchronizer_server.core.events import PushKey


@dataclass(slots=True, eq=False)
class Ticket:
    """One push, over all the streams that carry it.

    Attributes:
        key: its name.
        encoding: what its header claims.
        stager: bytes received, in wire format; None before the core agreed.
        vector: decoded and validated, fp32 [n]; None before it is whole.
        streams: counts the streams that carried it; only the newest may add bytes.
        answer: the response, once there is one.
    """

    key: PushKey
    encoding: types_pb2.Encoding
    stager: Stager | None = None
    vector: torch.Tensor | None = None
    streams: int = 0
    answer: asyncio.Future[pb.PushResponse] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def settle(self, response: pb.PushResponse) -> None:
        """Answers it; the first answer stands."""
        if not self.answer.done():
            self.answer.set_result(response)
        self.stager = self.vector = None


class TicketDesk:
    """Tickets by key. What is staged in total is bounded: admission is by bytes.

    Args:
        max_staged_bytes: bound over all pushes.
    """

    def __init__(self, max_staged_bytes: int) -> None:
        self._max_staged_bytes = max_staged_bytes
        self._tickets: dict[PushKey, Ticket] = {}

    def __iter__(self) -> Iterator[Ticket]:
        return iter(list(self._tickets.values()))

    def find(self, key: PushKey) -> Ticket | None:
        """The ticket of a key, if it is under way."""
        return self._tickets.get(key)

    def take(self, key: PushKey, encoding: types_pb2.Encoding) -> Ticket:
        """The ticket of a key; a new one where none is under way."""
        if key not in self._tickets:
            self._tickets[key] = Ticket(key, encoding)
        return self._tickets[key]

    def drop(self, key: PushKey) -> Ticket | None:
        """Removes a ticket."""
        return self._tickets.pop(key, None)

    @property
    def staged_bytes(self) -> int:
        """Bytes set aside for pushes under way."""
        return sum(t.encoding.payload_bytes for t in self if t.stager is not None)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a push of this size may be staged now; one above the bound goes alone."""
        staged_bytes = self.staged_bytes
        return not staged_bytes or staged_bytes + num_bytes <= self._max_staged_bytes
