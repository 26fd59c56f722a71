"""Metrics as text: what Prometheus scrapes, made by prometheus-client from samples.

A registry of its own for each scrape, for samples are read when somebody asks. Nothing is collected
between two scrapes, and nothing of prometheus-client's global registry is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from asyncgrpo_agent import __version__
from asyncgrpo_agent.core.metric_model import Family, Histogram, Sample

BUILD: Final = Family("build", "info", "The agent that is scraped.", ("version", "role"))
_OPENMETRICS: Final = "application/openmetrics-text"

_ClientFamily: TypeAlias = (
    GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily | InfoMetricFamily
)


def build_sample(role: str) -> Sample:
    return Sample(BUILD, (__version__, role), 1)


def expose(
    samples: Iterable[Sample], *, accept: str = "", with_process: bool = True
) -> tuple[str, bytes]:
    """Content type and text; OpenMetrics for those whose Accept header names it.

    `with_process` adds memory, CPU and files of this process.
    """
    registry = CollectorRegistry()
    registry.register(_Samples(samples))
    if with_process:
        ProcessCollector(registry=registry)
    # Of the header nothing else is taken: the library copies parts of it into the content type.
    encode, content_type = choose_encoder(_OPENMETRICS if _OPENMETRICS in accept else "")
    return content_type, encode(registry)


class _Samples(Collector):
    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = list(samples)

    def collect(self) -> Iterator[_ClientFamily]:
        families: dict[str, tuple[Family, list[Sample]]] = {}
        for sample in self._samples:
            families.setdefault(sample.family.name, (sample.family, []))[1].append(sample)
        for family, samples in families.values():
            yield _client_family(family, samples)

    def describe(self) -> list[_ClientFamily]:
        """The registry has nothing else to compare names with."""
        return []


def _client_family(family: Family, samples: list[Sample]) -> _ClientFamily:
    name, words = family.full_name, family.help
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, words, labels=family.labels)
        for sample in samples:
            assert isinstance(sample.value, Histogram)
            histogram.add_metric(sample.labels, sample.value.buckets, sample.value.total)
        return histogram
    if family.kind == "info":
        info = InfoMetricFamily(name, words)
        for sample in samples:
            info.add_metric((), dict(zip(family.labels, sample.labels, strict=True)))
        return info
    kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    plain: GaugeMetricFamily | CounterMetricFamily = kind(name, words, labels=family.labels)
    for sample in samples:
        assert isinstance(sample.value, float | int)
        plain.add_metric(sample.labels, sample.value)
    return plain
