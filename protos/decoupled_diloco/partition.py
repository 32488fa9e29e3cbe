"""Arithmetic of spreading sizes over bins: what the layout's strategies have in common.

Knows nothing of tensors: items are indices into ``sizes``. All results are exact and depend on the
arguments alone.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """The granules ``start`` to ``stop`` of one item."""

    item: int
    start: int
    stop: int


def fill_smallest(bins: list[list[int]], items: Iterable[int], sizes: Sequence[int]) -> None:
    """Puts each item in turn into the bin that is smallest so far, of equal ones the first.

    With the items in descending order of size and empty bins at the start, the largest bin is at
    most 4/3 of what the best possible partition has (Graham's bound; paper appendix C).
    """
    heap = [(sum(sizes[item] for item in held), index) for index, held in enumerate(bins)]
    heapq.heapify(heap)
    for item in items:
        load, index = heap[0]
        bins[index].append(item)
        heapq.heapreplace(heap, (load + sizes[item], index))


def share_bins(sizes: Sequence[int], limits: Sequence[int], total: int) -> list[int]:
    """Shares ``total`` bins out between groups, each at least one and at most its limit.

    One more goes where size per bin is greatest, so that the greatest is as small as can be.
    """
    counts = [1] * len(sizes)
    while sum(counts) < total:
        open_groups = [i for i, limit in enumerate(limits) if counts[i] < limit]
        counts[max(open_groups, key=lambda i: (Fraction(sizes[i], counts[i]), -i))] += 1
    return counts


def cut_evenly(sizes: Sequence[int], granules: Sequence[int], count: int) -> list[list[Span]]:
    """Cuts the items, laid end to end, into ``count`` non-empty runs of whole granules.

    Item i has ``granules[i]`` granules of equal size; ``count`` is at most their sum. Each cut is
    at the granule border nearest to its even place, so that a run exceeds the mean by at most one
    granule (the largest); where granules are scarce a run is a single one.
    """
    first = list(accumulate(granules, initial=0))
    start = list(accumulate(sizes, initial=0))
    borders = [0]
    for run in range(1, count):
        even = start[-1] * run  # the even place, times count to stay exact
        item = bisect_right(start, even // count) - 1
        granule = count * (sizes[item] // granules[item])
        past = even - count * start[item]
        nearest = first[item] + (2 * past + granule) // (2 * granule)
        borders.append(min(max(nearest, borders[-1] + 1), first[-1] - (count - run)))
    borders.append(first[-1])
    return [_spans(first, begin, end) for begin, end in pairwise(borders)]


def _spans(first: Sequence[int], begin: int, end: int) -> list[Span]:
    """The granules ``begin`` to ``end``, counted over all items, by item."""
    spans = []
    item = bisect_right(first, begin) - 1
    while first[item] < end:
        stop = min(end, first[item + 1])
        spans.append(Span(item, max(begin, first[item]) - first[item], stop - first[item]))
        item += 1
    return spans
