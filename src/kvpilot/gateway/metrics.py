"""The gateway's own numbers, for Prometheus. Several workers share a port, so every line names its worker."""

from __future__ import annotations

import os
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvpilot.gateway.link import GatewayLink


class Metrics:
    def __init__(self, link: GatewayLink) -> None:
        self._registry = CollectorRegistry()
        self._worker = str(os.getpid())
        prefix = "kvpilot_gateway"
        registry = self._registry
        requests = Counter(
            f"{prefix}_requests",
            "Requests by path and status",
            ("worker", "path", "status"),
            registry=registry,
        )
        self._requests = cache(lambda path, status: requests.labels(self._worker, path, status))
        self.aborted = self._counter(f"{prefix}_aborted", "Requests whose client went away")
        self.managed = self._counter(f"{prefix}_managed", "Management requests answered here")
        self.hints_dropped = self._counter(
            f"{prefix}_hints_dropped", "Hints dropped: malformed, or not supported"
        )
        self.prepare = Histogram(
            f"{prefix}_prepare_seconds",
            "From the body's last byte to the forwarding of the request",
            ("worker",),
            buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1),
            registry=registry,
        ).labels(self._worker)
        self.in_flight = self._gauge(f"{prefix}_in_flight", "Requests being forwarded")
        self._sent = self._gauge(f"{prefix}_events_sent", "Events the coordinator took")
        self._shed = self._gauge(
            f"{prefix}_events_shed",
            "Events given up: the queue was full, or cut off as the coordinator went",
        )
        self._queued = self._gauge(f"{prefix}_events_queued", "Events waiting for the coordinator")
        self._sent.set_function(lambda: link.sent)
        self._shed.set_function(lambda: link.shed)
        self._queued.set_function(lambda: link.queued)

    def count(self, path: str, status: int) -> None:
        self._requests(path, status).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("worker",), registry=self._registry).labels(self._worker)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("worker",), registry=self._registry).labels(self._worker)
