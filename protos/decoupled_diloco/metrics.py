"""Metrics as both sides describe them: one table of names, from which a scrape is filled.

The table is what the documents, the dashboard and the alert rules are held against; a value that
it does not name cannot be exported.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from prometheus_client import Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

PREFIX: Final = "diloco_"


class Kind(StrEnum):
    """Types of metrics, as Prometheus calls them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


_FAMILIES: Final = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
    Kind.SUMMARY: SummaryMetricFamily,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric.

    Attributes:
        name: its name as it is queried, for a counter with ``_total``; of histograms and summaries
            the parts (``_bucket``, ``_sum``, ``_count``) follow it.
        kind: its type.
        text: what it counts or measures, for people.
        labels: names of its labels.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()

    def histogram(self, buckets: Sequence[float]) -> Histogram:
        """What takes the observations of a histogram without labels; belongs to no registry."""
        assert self.kind is Kind.HISTOGRAM, self.name
        return Histogram(self.name, self.text, buckets=buckets, registry=None)


def counter(name: str, text: str, *labels: str) -> MetricSpec:
    """A metric that only goes up; a new start of its process begins it anew."""
    return MetricSpec(name=name, kind=Kind.COUNTER, text=text, labels=labels)


def gauge(name: str, text: str, *labels: str) -> MetricSpec:
    """A metric that goes up and down."""
    return MetricSpec(name=name, kind=Kind.GAUGE, text=text, labels=labels)


BUILD_INFO: Final = gauge(
    "diloco_build_info",
    "Always 1; what runs is in the labels.",
    "component",
    "version",
    "python",
)


class Sheet:
    """The values of one scrape.

    Args:
        specs: everything that may be on it; what gets no value is still described.
        **constant: labels with the same value everywhere but on `BUILD_INFO`.
    """

    def __init__(self, specs: Iterable[MetricSpec], **constant: str) -> None:
        self._constant = constant
        self._specs = {spec.name: spec for spec in specs}
        self._families: dict[str, Metric] = {}
        for spec in self._specs.values():
            labels = [*(self._constant if spec is not BUILD_INFO else ()), *spec.labels]
            self._families[spec.name] = _FAMILIES[spec.kind](spec.name, spec.text, labels=labels)

    def put(self, name: str, value: float, **labels: str) -> None:
        """Puts the value of a counter or a gauge."""
        family = self._families[name]
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily), name
        family.add_metric(self._values(name, labels), float(value))

    def summary(self, name: str, *, count: float, total: float, **labels: str) -> None:
        """Puts number and sum of what was measured."""
        family = self._families[name]
        assert isinstance(family, SummaryMetricFamily), name
        family.add_metric(self._values(name, labels), int(count), float(total))

    def histogram(self, name: str, histogram: Histogram) -> None:
        """Puts the state of a histogram."""
        [state] = histogram.collect()
        # When an object was made is of no use to anybody who looks.
        samples = [x for x in state.samples if not x.name.endswith("_created")]
        self._families[name].samples.extend(samples)

    def build_info(self, component: str) -> None:
        """Puts what runs here."""
        self.put(
            BUILD_INFO.name,
            1,
            component=component,
            version=version(),
            python=platform.python_version(),
        )

    def families(self) -> list[Metric]:
        """Everything, in the order of the table."""
        return list(self._families.values())

    def _values(self, name: str, labels: dict[str, str]) -> list[str]:
        spec = self._specs[name]
        assert len(labels) == len(spec.labels), f"{name} has labels {spec.labels}"
        values = [labels[x] for x in spec.labels]
        return [*self._constant.values(), *values] if spec is not BUILD_INFO else values


@functools.cache
def version() -> str:
    """Version of the installed project; ``unknown`` where it runs from sources alone."""
    try:
        return importlib.metadata.version("decoupled-diloco")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
