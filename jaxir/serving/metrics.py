"""Metrics for Prometheus: requests, their time, queues and batch sizes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from jaxir.serving.service import MAX_BATCH, Service

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The metrics of one service, in their own registry because a process may hold several services."""

    def __init__(self, service: Service):
        self._registry = CollectorRegistry()
        labels = ["endpoint", "method", "status"]
        self._requests = Counter("jaxir_requests", "Requests answered.", labels, registry=self._registry)
        self._seconds = Histogram(
            "jaxir_request_seconds",
            "Seconds from a request's headers to the end of its answer.",
            ["endpoint"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self.in_progress = Gauge(
            "jaxir_requests_in_progress", "Requests in progress.", registry=self._registry
        )
        self._registry.register(_Engines(service))
        ProcessCollector(registry=self._registry)

    def count(self, endpoint: str, method: str, status: int, seconds: float) -> None:
        """Counts an answered request. Use few distinct endpoints and methods: each makes a time series."""
        self._requests.labels(endpoint, method, status).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Returns all metrics in the format of an Accept header, and the content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _Engines:
    """A Prometheus collector of the service's counters. It must run on the service's event loop."""

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        per_batcher = ["indexes", "tower"]
        queue = GaugeMetricFamily("jaxir_queue_length", "Texts that wait for an engine.", labels=per_batcher)
        sizes = HistogramMetricFamily("jaxir_batch_size", "Texts per batch.", labels=per_batcher)
        busy = CounterMetricFamily(
            "jaxir_engine_busy_seconds", "Seconds that an engine was busy.", labels=per_batcher
        )
        for (indexes, tower), batcher in self._service.batchers.items():
            queue.add_metric([indexes, tower], batcher.waiting)
            busy.add_metric([indexes, tower], batcher.busy_seconds)
            bounds = [1 << n for n in range(MAX_BATCH.bit_length())]
            buckets = [(f"{b:.1f}", sum(n for s, n in batcher.sizes.items() if s <= b)) for b in bounds]
            texts = sum(size * number for size, number in batcher.sizes.items())
            sizes.add_metric([indexes, tower], [*buckets, ("+Inf", batcher.sizes.total())], sum_value=texts)
        shapes = GaugeMetricFamily(
            "jaxir_compiled_shapes", "Number of compiled programs, one per batch shape.", labels=per_batcher
        )
        for (indexes, tower), compiled in self._service.compiled_shapes().items():
            shapes.add_metric([indexes, tower], compiled)
        cut = CounterMetricFamily(
            "jaxir_texts_cut", "Texts truncated at the model's maximum length.", labels=per_batcher
        )
        for (indexes, tower), texts in self._service.texts_cut().items():
            cut.add_metric([indexes, tower], texts)
        documents = GaugeMetricFamily(
            "jaxir_index_documents", "Number of documents in an index.", labels=["index", "engine"]
        )
        for opened in self._service.opened:
            documents.add_metric([opened.name, opened.index.info.engine], opened.index.info.count)
        yield from (queue, sizes, busy, shapes, cut, documents)
