"""The metrics of all replicas on one page, labelled by replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from foretoken.serve.metrics import PREFIX


class Gathered(Collector):
    """Collects metrics.

    Args:
        families: Metrics of each replica by its name.
        failovers: Number of requests that continued on another replica, by outcome.
    """

    def __init__(self, families: Mapping[str, Iterable[Metric]], failovers: Mapping[str, int]) -> None:
        self._families, self._failovers = families, failovers

    def collect(self) -> Iterator[Metric]:
        """Returns every family once."""
        yield GaugeMetricFamily(PREFIX + "replicas", "Replicas that answer.", value=len(self._families))
        failovers = CounterMetricFamily(
            PREFIX + "failovers", "Requests whose replica was lost, by what became of them.", labels=["outcome"]
        )
        for outcome, count in self._failovers.items():
            failovers.add_metric([outcome], count)
        yield failovers
        yield from _merged(self._families)

    def render(self) -> tuple[bytes, str]:
        """Returns the page and its content type."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry), CONTENT_TYPE_LATEST


def _merged(families: Mapping[str, Iterable[Metric]]) -> Iterable[Metric]:
    merged: dict[str, Metric] = {}
    for replica, own in sorted(families.items()):
        for family in own:
            whole = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = {**sample.labels, "replica": replica}
                whole.samples.append(sample._replace(labels=labels))
    return merged.values()
