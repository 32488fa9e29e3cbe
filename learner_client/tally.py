"""Counts for people who look."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class OfflineTime:
    """How long the synchronizer was away, in all; from when it first answered.

    One thread tells it, others read: what they see never goes back.
    """

    _seconds: float = 0.0
    _since: float | None = None
    _was_online: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def heed(self, *, online: bool) -> None:
        """Takes whether it answers now."""
        with self._lock:
            self._was_online = self._was_online or online
            if online:
                self._seconds, self._since = self._until_now(), None
            elif self._was_online and self._since is None:
                self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds up to now."""
        with self._lock:
            return self._until_now()

    def _until_now(self) -> float:
        since = self._since
        return self._seconds + (0.0 if since is None else time.monotonic() - since)


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts for people who look; since the start of this process.

    Attributes:
        pushes: answers to pushes, by outcome or by reason code.
        declined: pulls declined, by reason code.
        num_tokens: tokens trained.
        loss: training loss of the newest step that told one, nats per token.
        num_updates: updates received and verified.
        num_applied: updates written into the model.
        num_digest_mismatches: updates whose result was not what the synchronizer has.
        bytes_up: payload bytes of pushes.
        bytes_down: payload bytes of updates.
        offline: time without the synchronizer.
    """

    pushes: Counter[str] = field(default_factory=Counter)
    declined: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    loss: float | None = None
    num_updates: int = 0
    num_applied: int = 0
    num_digest_mismatches: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    offline: OfflineTime = field(default_factory=OfflineTime)

    def trained(self, num_tokens: int, loss: float | None) -> None:
        """Counts a step."""
        self.num_tokens += num_tokens
        self.loss = self.loss if loss is None else loss
