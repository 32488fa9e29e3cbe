"""The ledger of leased data, from the lines of the committed rounds alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundData:
    """What the line of a round says of leased data.

    Attributes:
        length: samples of one pass; 0 for data without an end.
        issued: samples that were ever leased, each once per pass.
        merged: of these, samples merged into every fragment.
        leased: of these, samples on lease and not merged.
        free: of these, samples that wait for a new holder.
        returned: samples that were ever given back.
        ranges: (epoch, start, stop) of what is merged from this round on.
    """

    length: int
    issued: int
    merged: int
    leased: int
    free: int
    returned: int
    ranges: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLedger:
    """What became of leased data.

    Attributes:
        passes: passes over the data that were leased, with the fraction of the last; None for
            data without an end.
        leased: samples that were leased, each once per pass.
        merged: samples merged into every fragment.
        open: samples that were on lease, or waited for a new holder, at the last round.
        returned: samples given back by learners that died or left: at most these were trained
            by more than one learner.
        twice: samples merged twice.
        skipped: samples that were leased and are neither merged nor open.
        unlisted: samples merged in rounds whose line was lost with its process.
    """

    passes: float | None
    leased: int
    merged: int
    open: int
    returned: int
    twice: int
    skipped: int
    unlisted: int


def read_round_data(values: Mapping[str, Any]) -> RoundData:
    """Reads the part of a round's line that is about leased data.

    Raises:
        KeyError, TypeError, ValueError: where it is no such part.
    """
    return RoundData(
        **{
            name: int(values[name])
            for name in ("length", "issued", "merged", "leased", "free", "returned")
        },
        ranges=tuple((int(e), int(start), int(stop)) for e, start, stop in values["ranges"]),
    )


def compute_ledger(rounds: Iterable[RoundData | None]) -> DataLedger | None:
    """Balances the rounds of the final lineage, in order; None where no data was leased."""
    lines = [line for line in rounds if line is not None]
    if not lines:
        return None
    last = lines[-1]
    listed = [entry for line in lines for entry in line.ranges]
    return DataLedger(
        passes=last.issued / last.length if last.length else None,
        leased=last.issued,
        merged=last.merged,
        open=last.leased + last.free,
        returned=last.returned,
        twice=_count_twice(listed),
        skipped=max(abs(x.issued - x.merged - x.leased - x.free) for x in lines),
        unlisted=last.merged - sum(stop - start for _, start, stop in listed),
    )


def _count_twice(ranges: Sequence[tuple[int, int, int]]) -> int:
    """How many samples stand in more than one range, counted once per further range."""
    by_epoch: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for epoch, start, stop in ranges:
        by_epoch[epoch].append((start, stop))
    num_twice = 0
    for found in by_epoch.values():
        covered_to = 0
        for start, stop in sorted(found):
            num_twice += max(min(stop, covered_to) - start, 0)
            covered_to = max(covered_to, stop)
    return num_twice
