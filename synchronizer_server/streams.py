"""Report streams: what is to be said to each connected learner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from decoupled_diloco.errors import DilocoError, Reason
from decoupled_diloco.v1 import synchronizer_pb2 as pb
from decoupled_diloco.versions import Incarnation

_MAX_QUEUED = 1024


class ReportStream:
    """Messages to one learner, in order; a learner that does not read is cut off, never waited for.

    Args:
        learner_id: whose stream it is.
        incarnation: under which life.
    """

    def __init__(self, learner_id: str, incarnation: Incarnation) -> None:
        self.learner_id = learner_id
        self.incarnation = incarnation
        self._queue: asyncio.Queue[pb.ReportResponse | None] = asyncio.Queue()
        self._error: Exception | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """True once nothing more is said here, and nothing more is heard."""
        return self._closed

    def send(self, message: pb.ReportResponse) -> bool:
        """Queues a message; does nothing on a closed stream.

        Returns:
            False where the stream was cut off just now, since the learner does not read.
        """
        if self._closed:
            return True
        if self._queue.qsize() < _MAX_QUEUED:
            self._queue.put_nowait(message)
            return True
        while not self._queue.empty():
            self._queue.get_nowait()
        self.close(DilocoError(Reason.NO_PROGRESS, f"{self.learner_id} does not read"))
        return False

    def close(self, error: Exception | None = None) -> None:
        """Ends the stream after what is queued, with a status where there is an error."""
        if not self._closed:
            self._closed = True
            self._error = error
            self._queue.put_nowait(None)

    async def messages(self) -> AsyncIterator[pb.ReportResponse]:
        """Yields what is to be said until the stream ends.

        Raises:
            Exception: why it was closed.
        """
        while (message := await self._queue.get()) is not None:
            yield message
        if self._error is not None:
            raise self._error
