"""Leased data: which samples this learner is to train on, one range after the other.

``learner.data`` hands out positions of the data, pass by pass (epoch), as pairs
``(epoch, index)``::

    for epoch, index in learner.data.indices(shuffle_seed=0):
        loss = train_on(dataset[index])
        learner.step(num_tokens=...)

Positions that were handed out before a call of ``learner.step`` count as trained in it. Where a
DataLoader fetches ahead, say how many of them were: ``learner.step(..., num_samples=len(batch))``.

The next range is fetched before the present one is used up. Where it has not come yet, the wait is
here and not in ``learner.step``: it is said with its reason, and counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from decoupled_diloco.settings import RunSettings
from decoupled_diloco.versions import Incarnation
from learner_client.leases import Lease, Progress, SavedLeases

Index = tuple[int, int]
"""Epoch from 0, and index of a sample within it."""

MAX_KEPT_LEASES: Final = 1024
"""Leases that are remembered after they are used up: a synchronizer has no more unmerged ones."""

_USUAL_LEASES: Final = 512

_POLL_S: Final = 0.05
_ENOUGH: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DataStatus:
    """Leased data as this learner sees it, since the start of the process.

    Attributes:
        num_leases: ranges leased.
        num_samples: samples handed out.
        num_lost: leases that were lost, since this learner was silent for too long.
        num_waits: times that training waited for a lease.
        wait_s: time of these waits, seconds.
        waits_for: what it waits for now; empty where it does not.
    """

    num_leases: int
    num_samples: int
    num_lost: int
    num_waits: int
    wait_s: float
    waits_for: str


@dataclass(slots=True)
class _Held:
    """A lease: handed out up to one position, trained up to another."""

    lease: Lease
    handed_to: int
    trained_to: int
    is_lost: bool = False


class LeasedData:
    """The leases of one learner; every method may be called from any thread.

    Args:
        is_over: True once no more data comes: the run is complete, or the learner leaves.
        failure: what ends the training of this process, if anything does.
        on_wait: told what is waited for; with an empty text when it came.

    Attributes:
        on_want: called where another lease is wanted.
    """

    def __init__(
        self,
        *,
        is_over: Callable[[], bool],
        failure: Callable[[], DilocoError | None],
        on_wait: Callable[[str], None],
    ) -> None:
        self._lock = threading.Condition()
        self._is_over = is_over
        self._failure = failure
        self._on_wait = on_wait
        self.on_want: Callable[[], None] = lambda: None
        self._length = 0
        self._most_samples = 0
        self._is_leased = False
        self._asked = 1
        self._held: deque[_Held] = deque()
        self._used: deque[Lease] = deque(maxlen=MAX_KEPT_LEASES)
        self._reason = "the first lease"
        self._waits_for = ""
        self._num_leases = self._num_samples = self._num_lost = self._num_waits = 0
        self._wait_s = 0.0
        self._waits_since: float | None = None
        self._orders: tuple[tuple[int, int], list[int]] = ((-1, 0), [])

    # -- what a training loop calls --------------------------------------------------------------

    def indices(self, *, shuffle_seed: int | None = None) -> Iterator[Index]:
        """Yields (epoch, index) until the run is over.

        Args:
            shuffle_seed: with it, the samples of every epoch come in an order that this seed and
                the epoch decide, the same for all learners; without, in their own order.

        Raises:
            UsageError: CONFIG_CONFLICT where the run does not lease its data, or where data
                without an end is to be shuffled.
            DilocoError: what ended this learner.
        """
        while (batch := self.batch(1, shuffle_seed=shuffle_seed)) is not None:
            yield batch[0]

    def batch(
        self,
        num_samples: int,
        *,
        shuffle_seed: int | None = None,
        give_up: Callable[[], bool] | None = None,
    ) -> list[Index] | None:
        """Returns the next samples, all of them; None once the run is over.

        Waits where the next lease has not come yet: not for the usual step, since it is fetched
        before it is needed.

        Args:
            num_samples: how many.
            shuffle_seed: as ``indices``.
            give_up: looked at while it waits; None is returned where it says so.

        Raises:
            UsageError, DilocoError: as ``indices``.
        """
        self._check(shuffle_seed)
        try:
            while not self._is_over():
                taken = self.take(num_samples, shuffle_seed=shuffle_seed)
                if taken is not None:
                    return taken
                if give_up is not None and give_up():
                    return None
                with self._lock:
                    if self._waits_since is None:
                        self._waits_since = time.monotonic()
                    if not self._has(num_samples):
                        self._lock.wait(_POLL_S)
            return None
        finally:
            with self._lock:
                self._wait_s, self._waits_since = self._waited_s(), None

    def take(self, num_samples: int, *, shuffle_seed: int | None = None) -> list[Index] | None:
        """As ``batch``, but never waits: None where so many samples are not there.

        Raises:
            UsageError, DilocoError: as ``indices``; CONFIG_CONFLICT also for so many samples that
                the leases of a whole cycle of merges would be too many.
        """
        self._check(shuffle_seed)
        self._check_size(num_samples)
        with self._lock:
            self._asked = max(self._asked, num_samples)
            if not self._has(num_samples):
                began, self._waits_for = not self._waits_for, self._reason
                self._num_waits += began
                positions = None
            else:
                began, self._waits_for = bool(self._waits_for), ""
                positions = self._hand_out(num_samples)
            waits_for = self._waits_for
        if began:
            self._on_wait(waits_for)
        if self.wants:
            self.on_want()
        if positions is None:
            return None
        return [(epoch, self._index(epoch, at, shuffle_seed)) for epoch, at in positions]

    @property
    def status(self) -> DataStatus:
        """Leased data as this learner sees it."""
        with self._lock:
            return DataStatus(
                num_leases=self._num_leases,
                num_samples=self._num_samples,
                num_lost=self._num_lost,
                num_waits=self._num_waits,
                wait_s=self._waited_s(),
                waits_for=self._waits_for,
            )

    def _waited_s(self) -> float:
        """With the wait under way, which may be the one that never ends."""
        since = self._waits_since
        return self._wait_s + (0.0 if since is None else time.monotonic() - since)

    def _check(self, shuffle_seed: int | None) -> None:
        failure = self._failure()
        if failure is not None:
            raise failure
        if not self._is_leased:
            raise UsageError(
                Reason.CONFIG_CONFLICT,
                "this run does not lease its data: train on the data shard learner.shard, or "
                "start the synchronizer with data_mode = leases",
            )
        if shuffle_seed is not None and not self._length:
            raise UsageError(
                Reason.CONFIG_CONFLICT,
                "data without an end cannot be shuffled: start the synchronizer of a new run with "
                "data_length = samples of one pass, or leave out shuffle_seed",
            )

    def _check_size(self, num_samples: int) -> None:
        if not 1 <= num_samples <= self._most_samples:
            raise UsageError(
                Reason.CONFIG_CONFLICT,
                f"{num_samples} samples of leased data at once; from 1 to {self._most_samples} can "
                "be, so that what is not merged stays bounded: raise data_lease_length",
            )

    def _has(self, num_samples: int) -> bool:
        return sum(x.lease.stop - x.handed_to for x in self._held if not x.is_lost) >= num_samples

    def _hand_out(self, num_samples: int) -> list[Index]:
        positions: list[Index] = []
        for held in self._held:
            if held.is_lost:
                continue
            stop = min(held.handed_to + num_samples - len(positions), held.lease.stop)
            positions += [(held.lease.epoch, at) for at in range(held.handed_to, stop)]
            held.handed_to = stop
        self._num_samples += num_samples
        return positions

    def _index(self, epoch: int, position: int, shuffle_seed: int | None) -> int:
        if shuffle_seed is None:
            return position
        with self._lock:
            if self._orders[0] != (epoch, shuffle_seed):
                self._orders = (
                    (epoch, shuffle_seed),
                    epoch_order(self._length, epoch=epoch, seed=shuffle_seed),
                )
            return self._orders[1][position]

    # -- what the learner calls at its boundary --------------------------------------------------

    def trained(self, num_samples: int | None = None) -> Progress:
        """Counts a step: so many of the samples handed out are trained, all by default.

        Raises:
            UsageError: CONFIG_INVALID for more samples than were handed out.
        """
        with self._lock:
            is_lost = self._count(num_samples)
            while self._held and self._is_done(self._held[0]) and len(self._held) > 1:
                self._used.append(self._held.popleft().lease)
            return self._progress(is_lost)

    @property
    def progress(self) -> Progress:
        """Where the data stands."""
        with self._lock:
            return self._progress(False)

    def _progress(self, is_lost: bool) -> Progress:
        if not self._held or self._held[0].is_lost:
            return Progress(is_lost=is_lost)
        first = self._held[0]
        return Progress(lease_id=first.lease.lease_id, position=first.trained_to, is_lost=is_lost)

    def saved(self, incarnation: Incarnation) -> SavedLeases:
        """What a snapshot keeps; samples that were only fetched ahead are to be trained anew."""
        with self._lock:
            held = tuple((x.lease, x.trained_to) for x in self._held if not x.is_lost)
            return SavedLeases(incarnation=incarnation, used=tuple(self._used), held=held)

    def restore(self, saved: SavedLeases) -> None:
        """Goes on where a snapshot was taken; before the learner joins."""
        with self._lock:
            self._used.extend(saved.used)
            self._held.extend(_Held(lease, to, to) for lease, to in saved.held)

    def _count(self, num_samples: int | None) -> bool:
        handed = sum(x.handed_to - x.trained_to for x in self._held)
        left = handed if num_samples is None else num_samples
        if not 0 <= left <= handed:
            raise UsageError(
                Reason.CONFIG_INVALID,
                f"num_samples is {left}, but {handed} samples were handed out and not trained; "
                "give the size of the batch of this step",
            )
        is_lost = False
        for held in self._held:
            step = min(held.handed_to - held.trained_to, left)
            held.trained_to += step
            left -= step
            is_lost = is_lost or (held.is_lost and step > 0)
        self._held = deque(x for x in self._held if not (x.is_lost and x.trained_to == x.handed_to))
        return is_lost

    def _is_done(self, held: _Held) -> bool:
        return held.trained_to == held.lease.stop

    # -- what the background thread calls --------------------------------------------------------

    def begin(self, settings: RunSettings) -> None:
        """The settings of the run are known."""
        with self._lock:
            self._is_leased = settings.data_mode == "leases"
            self._length = settings.data_length
            # A sample is merged about H steps after it was trained; twice that is open at most.
            length = settings.data_lease_length
            open_samples = _USUAL_LEASES * min(length, settings.data_length or length)
            self._most_samples = open_samples // (2 * settings.sync_interval)

    @property
    def wants(self) -> bool:
        """Whether another lease is to be fetched: the one in use and another are enough."""
        with self._lock:
            ahead = [x.lease.stop - x.handed_to for x in self._held if not x.is_lost]
            num_leases = sum(x > 0 for x in ahead)
            is_enough = num_leases >= _ENOUGH and sum(ahead) >= _ENOUGH * self._asked
            return self._is_leased and not is_enough

    @property
    def claims(self) -> list[Lease]:
        """Leases of which something may not be merged yet, in order."""
        with self._lock:
            return [*self._used, *(x.lease for x in self._held if not x.is_lost)]

    def offer(self, lease: Lease) -> None:
        """A lease came.

        Raises:
            DilocoError: MALFORMED where it cannot be one.
        """
        with self._lock:
            newest = max((x.lease.lease_id for x in self._held if not x.is_lost), default=0)
            if not newest < lease.lease_id or not lease.start < lease.stop:
                raise DilocoError(Reason.MALFORMED, f"leased {lease}: that cannot be")
            if self._length and lease.stop > self._length:
                raise DilocoError(
                    Reason.MALFORMED, f"leased {lease} of data with {self._length} samples"
                )
            self._held.append(_Held(lease, lease.start, lease.start))
            self._num_leases += 1
            self._reason = "the next lease"
            self._lock.notify_all()

    def waits(self, reason: str) -> None:
        """Why the next lease has not come."""
        with self._lock:
            self._reason = reason

    def lost(self) -> None:
        """All leases belong to others by now; what is handed out of them is trained in vain."""
        with self._lock:
            self._num_lost += len([x for x in self._held if not x.is_lost])
            self._used.clear()
            for held in self._held:
                held.is_lost = True
            self._held = deque(x for x in self._held if x.trained_to < x.handed_to)


def epoch_order(length: int, *, epoch: int, seed: int) -> list[int]:
    """Returns the order of one epoch's samples: decided by seed and epoch, the same everywhere."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
    order: list[int] = torch.randperm(length, generator=generator).tolist()
    return order
