"""Cutting and sharing against a reference that walks every granule."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.partition import Span, cut_evenly, fill_smallest, share_bins

items = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 50)), min_size=1, max_size=8)


@given(items, st.data())
def test_cuts_lie_at_the_border_nearest_to_the_even_place(pairs, data):
    """Where granules are not scarce, each cut is as near to its even place as borders allow."""
    granules = [number for number, _ in pairs]
    sizes = [number * size for number, size in pairs]
    count = data.draw(st.integers(1, sum(granules)))
    runs = cut_evenly(sizes, granules, count)
    flat = [[(s.item, g) for s in run for g in range(s.start, s.stop)] for run in runs]
    assert [granule for run in flat for granule in run] == [
        (i, g) for i, n in enumerate(granules) for g in range(n)
    ]
    assert all(flat)
    assert len(runs) == count

    loads = [sum(pairs[i][1] for i, _ in run) for run in flat]
    mean = Fraction(sum(sizes), count)
    assert max(loads) <= mean + max(size for _, size in pairs)
    if max(size for _, size in pairs) <= mean / 2:
        borders = [0]
        for number, size in pairs:
            borders.extend(borders[-1] + size for _ in range(number))
        for run in range(1, count):
            cut = sum(loads[:run])
            assert abs(cut - run * mean) == min(abs(b - run * mean) for b in borders)


def test_a_giant_granule_leaves_no_run_empty():
    assert cut_evenly([1000, 1, 1, 1], [1, 1, 1, 1], 3) == [
        [Span(0, 0, 1)],
        [Span(1, 0, 1)],
        [Span(2, 0, 1), Span(3, 0, 1)],
    ]


def test_bins_go_where_the_mean_is_largest_until_the_limit():
    assert share_bins([100, 100], [10, 10], 2) == [1, 1]
    assert share_bins([300, 100], [10, 10], 4) == [3, 1]
    assert share_bins([300, 100], [2, 10], 6) == [2, 4]
    assert share_bins([100, 100], [10, 10], 3) == [2, 1], "the first of equals"


def test_the_smallest_bin_takes_the_next_item_and_the_first_of_equals():
    bins: list[list[int]] = [[3], [], []]
    fill_smallest(bins, [0, 1, 2], [5, 5, 1, 6])
    assert bins == [[3], [0, 2], [1]]
