"""Prometheus metrics, read from the coordinator's own counters when asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpilot.coordinator.device import Device
from kvpilot.coordinator.forecasts import Forecasts
from kvpilot.coordinator.service import CoordinatorService


class ServiceCollector(Collector):
    def __init__(self, service: CoordinatorService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        mapper, executor = service.mapper.stats, service.executor.stats
        yield _counter("events", "Events taken in from gateways.", "event", mapper.events)
        yield _counter("context_changes", "How requests continued their context.", "change", mapper.changes)
        yield _plain("requests_mapped", "Finished requests whose tokens were mapped.", mapper.mapped)
        yield _plain("requests_mapped_within_1s", "Of these, within a second.", mapper.mapped_within_1s)
        yield _plain(
            "events_without_request", "Events whose request's start is unknown.", mapper.without_request
        )
        yield _plain("requests_expired", "Requests whose end was never told.", mapper.expired)
        yield _plain(
            "late_stores_removed",
            "Evicted chunks that came back and were removed.",
            executor.late_stores_removed,
        )
        yield _counter("backend_errors", "Failures of the cache layer.", "error", executor.backend_errors)
        yield _counter(
            "segmented", "Prompts whose segments were found, by method.", "method", service.segments.methods
        )
        if service.awaited.asker is not None:
            yield _counter(
                "prompts_asked",
                "Requests whose tokens were asked from the engine.",
                "outcome",
                service.awaited.asker.outcomes,
            )
        actions = CounterMetricFamily("kvpilot_actions", "Finished actions.", labels=["kind", "status"])
        for (kind, status), count in service.actions.totals.items():
            actions.add_metric([kind, status], count)
        yield actions
        yield _counter("action_chunks", "Chunks confirmed moved or removed.", "kind", service.actions.chunks)
        states = Counter(s.state.value for s in service.book.sessions.values())
        yield _gauge("sessions", "Known sessions.", "state", states)
        yield _gauge(
            "tier_used_bytes",
            "Bytes held per tier.",
            "tier",
            {u.tier.value: u.used_bytes for u in service.residency.usage},
        )
        yield _gauge(
            "tier_capacity_bytes",
            "Capacity per tier.",
            "tier",
            {u.tier.value: u.capacity_bytes for u in service.residency.usage},
        )
        yield from _device(service.device)
        yield from _forecasts(service.forecasts)
        yield _counter(
            "demoted_chunks_in_hindsight",
            "Chunks sent down for room, by who came back first: right = who was kept in their place.",
            "verdict",
            service.hindsight.chunks,
        )
        if service.recorder is not None:
            lines = {"recorded": service.recorder.lines, "dropped": service.recorder.dropped}
            yield _counter("recording_lines", "Lines of the recording of the traffic.", "outcome", lines)
        size = service.references.size()
        sizes = {
            "owners": size.owners,
            "nodes": size.nodes,
            "tokens": size.tokens,
            "chunks": size.chunks,
            "bytes": size.nbytes,
        }
        yield _gauge("reference_table", "Size of the reference table.", "what", sizes)
        yield GaugeMetricFamily(
            "kvpilot_open_actions", "Actions under way.", len(service.actions.open_records())
        )
        yield GaugeMetricFamily(
            "kvpilot_mode_active", "1 = acts, 0 = passive.", int(service.mode == "kvpilot")
        )


def _device(device: Device) -> Iterator[Metric]:
    state = device.state
    yield GaugeMetricFamily("kvpilot_engine_plugin", "1 = the device pool is steered.", int(device.active))
    yield _gauge("device_blocks", "Blocks of the device pool.", "state", dict(state.blocks if state else {}))
    requests = dict(state.requests if state else {})
    yield _gauge("engine_requests", "Requests in the engine.", "state", requests)
    taken = state.taken if state else 0
    yield _plain("device_taken_blocks", "Blocks that sessions needed and others were given.", taken)
    orders = CounterMetricFamily(
        "kvpilot_device_orders", "Orders to the engine's plug-in.", labels=["kind", "outcome"]
    )
    for (kind, outcome), count in device.outcomes.items():
        orders.add_metric([kind, outcome], count)
    yield orders


def _forecasts(forecasts: Forecasts) -> Iterator[Metric]:
    labels = ["waits_for", "interval"]
    ended = CounterMetricFamily(
        "kvpilot_forecast_pauses", "Pauses that ended and had an interval stated.", labels=labels
    )
    inside = CounterMetricFamily(
        "kvpilot_forecast_pauses_inside",
        "Of these, inside it: interval is the share that is stated.",
        labels=labels,
    )
    width = GaugeMetricFamily(
        "kvpilot_forecast_interval_width",
        "Upper end by lower end of recently stated intervals, geometric mean.",
        labels=labels,
    )
    for (kind, share), held in sorted(forecasts.intervals.held.items()):
        names = [kind, f"{share:g}"]
        ended.add_metric(names, held.ended)
        inside.add_metric(names, held.inside)
        width.add_metric(names, held.width)
    yield from (ended, inside, width)


def _counter(name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"kvpilot_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _gauge(name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"kvpilot_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _plain(name: str, text: str, value: int) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvpilot_{name}", text, value=value)


def metrics_text(service: CoordinatorService) -> bytes:
    """The exposition of one service (a registry of its own: several may live in one process in tests)."""
    registry = CollectorRegistry()
    registry.register(ServiceCollector(service))
    return bytes(generate_latest(registry))
