"""Positions of the data that nobody has: what was given back, and what was never handed out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from synchronizer_server.core.data_records import DataRange


class FreeRanges:
    """Hands out what was given back first (lowest epoch and position first), then fresh data.

    Args:
        length: samples of one pass; 0 for data without an end.
        epoch: pass of the next fresh position.
        position: the next fresh position.
        returned: what was given back.
    """

    def __init__(
        self, length: int, *, epoch: int, position: int, returned: Iterable[DataRange]
    ) -> None:
        self._length = length
        self._epoch = epoch
        self._position = position
        self._returned: list[DataRange] = []
        for found in returned:
            self.give(found)

    @property
    def fresh(self) -> tuple[int, int]:
        """Epoch and position that were never handed out, first of all."""
        return self._epoch, self._position

    @property
    def returned(self) -> tuple[DataRange, ...]:
        """What was given back and is still here, in order; neighbours are one range."""
        return tuple(self._returned)

    def take(self, most: int) -> DataRange:
        """Hands out the next range, of at least one and at most ``most`` positions."""
        if self._returned:
            first = self._returned.pop(0)
            stop = min(first.start + most, first.stop)
            if stop < first.stop:
                self._returned.insert(0, DataRange(first.epoch, stop, first.stop))
            return DataRange(first.epoch, first.start, stop)
        start = self._position
        stop = min(start + most, self._length) if self._length else start + most
        taken = DataRange(self._epoch, start, stop)
        self._go_to(self._epoch, stop)
        return taken

    def _go_to(self, epoch: int, position: int) -> None:
        is_over = self._length > 0 and position >= self._length
        self._epoch, self._position = (epoch + 1, 0) if is_over else (epoch, position)

    def give(self, given: DataRange) -> None:
        """Takes a range back; nobody may have a part of it."""
        at = bisect_right(self._returned, given)
        first, last = at, at
        start, stop = given.start, given.stop
        if at > 0 and _touch(self._returned[at - 1], given):
            first, start = at - 1, self._returned[at - 1].start
        if at < len(self._returned) and _touch(given, self._returned[at]):
            last, stop = at + 1, self._returned[at].stop
        self._returned[first:last] = [DataRange(given.epoch, start, stop)]

    def common(self, wanted: DataRange) -> list[DataRange]:
        """The parts of a range that are free, in order; fresh data counts up to any position."""
        first, last = overlapping(self._returned, wanted)
        parts = [x for found in self._returned[first:last] if (x := wanted.common(found))]
        if wanted.epoch == self._epoch:
            start = max(wanted.start, self._position)
            fresh = DataRange(wanted.epoch, start, wanted.stop)
            parts += [fresh] if fresh.num_samples > 0 else []
        elif wanted.epoch > self._epoch:
            parts.append(wanted)
        if len(parts) == 2 and parts[0].stop == parts[1].start:  # given back up to the fresh ones
            parts = [DataRange(wanted.epoch, parts[0].start, parts[1].stop)]
        return parts

    def ahead(self, wanted: DataRange) -> int:
        """How many fresh positions come before the end of a range; below 0 where it is behind."""
        return (wanted.epoch - self._epoch) * self._length + wanted.stop - self._position

    def carve(self, wanted: DataRange) -> None:
        """Takes out a range that is free; fresh data before it counts as given back."""
        first, last = overlapping(self._returned, wanted)
        kept: list[DataRange] = []
        for found in self._returned[first:last]:
            left = DataRange(found.epoch, found.start, max(wanted.start, found.start))
            right = DataRange(found.epoch, min(wanted.stop, found.stop), found.stop)
            kept += [x for x in (left, right) if x.num_samples > 0]
        self._returned[first:last] = kept
        while self._epoch < wanted.epoch:
            self._skip_to(self._length)
        if wanted.epoch == self._epoch and wanted.stop > self._position:
            if wanted.start > self._position:
                self._skip_to(wanted.start)
            self._go_to(self._epoch, wanted.stop)

    def _skip_to(self, position: int) -> None:
        self.give(DataRange(self._epoch, self._position, position))
        self._go_to(self._epoch, position)


def overlapping(ranges: Sequence[DataRange], wanted: DataRange) -> tuple[int, int]:
    """First index, and the one behind the last, of what has a part of a range.

    A search, not a walk: there may be thousands, and who joins may ask about a thousand.

    Args:
        ranges: in order; no two have a common position.
        wanted: the range.
    """
    first = bisect_right(ranges, (wanted.epoch, wanted.start), key=lambda x: (x.epoch, x.stop))
    last = first
    while last < len(ranges) and ranges[last].common(wanted) is not None:
        last += 1
    return first, last


def _touch(before: DataRange, after: DataRange) -> bool:
    return (before.epoch, before.stop) == (after.epoch, after.start)
