"""``kvpilot bench gateway``: what the gateway costs, side by side with vllm-router and LiteLLM.

All in front of the same mock engine, in one run, interleaved. kvpilot pays for what it does more: it asks the
engine for token ids (a reply of about 150 KB for a request of 100 KB), takes them out again, and tells them to a
coordinator. Targets: at one connection p50 +1.5 ms, p99 +6 ms; at 16 connections 0.4 of vllm-router's requests
per second, 20 times LiteLLM's.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpilot.bench import rivals
from kvpilot.bench.growing import THINK_S, Growth, growing_sessions
from kvpilot.bench.load import generator_name, measure, request_body
from kvpilot.bench.processes import free_port, kvpilot_gateway, mock_engine, process, until_chatting

DIRECT, KVPILOT = "direct", "kvpilot"
CONNECTIONS = (1, 16)
ADDED_P50_MS, ADDED_P99_MS = 1.5, 6.0
OF_ROUTER, OF_LITELLM = 0.4, 20.0


@dataclass(frozen=True, slots=True)
class GatewayBenchOptions:
    """What to measure: ``seconds`` per measurement, ``rounds`` of all of them, ``body_kb`` per request."""

    seconds: float = 4.0
    rounds: int = 3
    body_kb: int = 100
    workers: int = 2
    rivals: tuple[str, ...] = tuple(rival.name for rival in rivals.RIVALS)
    coordinator: bool = True
    """Whether to run the stage with kvpilot's real coordinator on growing sessions."""
    coordinator_seconds: float = 15.0
    cache: Path | None = None
    """Where rivals are installed; None = the user's cache folder."""


Progress = Callable[[str], None]


def run_bench(options: GatewayBenchOptions, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Run it all and return the document (see :func:`report`). Raises RuntimeError when it cannot be run."""
    chosen = [rival for rival in rivals.RIVALS if rival.name in options.rivals]
    cache = options.cache or rivals.default_cache()
    binaries = {}
    for rival in chosen:
        progress(f"installing {rival.requirement} (only the first time)")
        binaries[rival.name] = rivals.install(rival, cache)
    results: list[dict[str, Any]] = []
    growth: list[Growth | str] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpilot-bench-")))
        engine_url = stack.enter_context(mock_engine())
        if options.coordinator:
            for think_s in THINK_S:
                progress(
                    f"growing sessions that pause {think_s:g} s, with the coordinator beside the gateway"
                )
                own = folder / f"pause-{think_s:g}"
                own.mkdir()
                seconds = options.coordinator_seconds
                growth.append(growing_sessions(engine_url, options.workers, seconds, own, think_s))
        gateway = stack.enter_context(kvpilot_gateway(folder, engine_url, options.workers))
        sink = [sys.executable, "-m", "kvpilot.bench.event_sink", str(gateway.config_file)]
        stack.enter_context(process(sink))
        urls = {DIRECT: engine_url, KVPILOT: gateway.url}
        for rival in chosen:
            progress(f"starting {rival.name}")
            port = free_port()
            command = rivals.command(rival, binaries[rival.name], engine_url, port, free_port(), folder)
            child = stack.enter_context(process(command, folder / f"{rival.name}.log"))
            urls[rival.name] = f"http://127.0.0.1:{port}"
            until_chatting(rival.name, child, urls[rival.name])
        for number in range(options.rounds):
            progress(f"round {number + 1} of {options.rounds}")
            results += measure_all(urls, options, reverse=number % 2 == 1)
        events = gateway.events()
    return report(options, results, events, growth)


def measure_all(urls: dict[str, str], options: GatewayBenchOptions, *, reverse: bool) -> list[dict[str, Any]]:
    """One round over all variants; targets are interleaved so that a busy spell hits them alike."""
    rows = []
    for stream in (False, True):
        body = request_body(options.body_kb * 1024, stream=stream)
        for connections in CONNECTIONS:
            for target in sorted(urls, reverse=reverse):
                result = measure(urls[target], body, connections, options.seconds)
                rows.append(
                    {"target": target, "stream": stream, "connections": connections, **asdict(result)}
                )
    return rows


def report(
    options: GatewayBenchOptions,
    results: list[dict[str, Any]],
    events: dict[str, int],
    growth: list[Growth | str],
) -> dict[str, Any]:
    """The document: ``rows`` (median over rounds per target and variant), ``checks`` against the targets."""
    rows = [_median_row(group) for group in _groups(results)]
    by_key = {(row["target"], row["stream"], row["connections"]): row for row in rows}
    for row in rows:
        direct = by_key[DIRECT, row["stream"], row["connections"]]
        row["added_p50_ms"] = round(row["p50_ms"] - direct["p50_ms"], 3)
        row["added_p99_ms"] = round(row["p99_ms"] - direct["p99_ms"], 3)
    return {
        "generator": generator_name(),
        "body_kb": options.body_kb,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "kvpilot_workers": options.workers,
        "versions": {
            rival.name: rival.requirement for rival in rivals.RIVALS if rival.name in options.rivals
        },
        "rows": rows,
        "checks": _checks(by_key),
        "events": events,
        "growing_sessions": [asdict(one) if isinstance(one, Growth) else {"skipped": one} for one in growth],
    }


def _groups(results: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    keys = sorted({(row["stream"], row["connections"], row["target"]) for row in results})
    for stream, connections, target in keys:
        wanted = (target, stream, connections)
        yield [row for row in results if (row["target"], row["stream"], row["connections"]) == wanted]


def _median_row(group: list[dict[str, Any]]) -> dict[str, Any]:
    row = {name: group[0][name] for name in ("target", "stream", "connections")}
    for name in ("per_second", "p50_ms", "p99_ms"):
        row[name] = round(statistics.median(result[name] for result in group), 3)
    row["failed"] = sum(result["failed"] for result in group)
    return row


def _checks(rows: dict[tuple[str, bool, int], dict[str, Any]]) -> list[dict[str, Any]]:
    checks = []

    def check(name: str, stream: bool, value: float, limit: float, *, at_most: bool) -> None:
        met = value <= limit if at_most else value >= limit
        row = {"what": name, "stream": stream, "value": round(value, 3), "target": limit, "met": met}
        checks.append(row)

    for stream in (False, True):
        one = rows[KVPILOT, stream, 1]
        check("added p50 ms, 1 connection", stream, one["added_p50_ms"], ADDED_P50_MS, at_most=True)
        check("added p99 ms, 1 connection", stream, one["added_p99_ms"], ADDED_P99_MS, at_most=True)
        many = rows[KVPILOT, stream, 16]["per_second"]
        for rival, factor in ((rivals.VLLM_ROUTER, OF_ROUTER), (rivals.LITELLM, OF_LITELLM)):
            theirs = rows.get((rival.name, stream, 16))
            if theirs and theirs["per_second"]:
                ratio = many / theirs["per_second"]
                check(f"requests/s ÷ {rival.name}, 16 connections", stream, ratio, factor, at_most=False)
    return checks


def print_table(document: dict[str, Any], console: Console) -> None:
    """The document for people."""
    title = (
        f"{document['body_kb']} KB requests, {document['generator']}, kvpilot with "
        f"{document['kvpilot_workers']} workers, median of {document['rounds']} rounds"
    )
    table = Table(title=title)
    # Short: the table fits 80 columns.
    for column in ("reply", "conn.", "target", "req/s", "p50 ms", "p99 ms", "+p50 ms", "+p99 ms"):
        table.add_column(column, justify="left" if column in ("reply", "target") else "right")
    for row in document["rows"]:
        numbers = [f"{row[name]:.2f}" for name in ("p50_ms", "p99_ms", "added_p50_ms", "added_p99_ms")]
        kind = "stream" if row["stream"] else "whole"
        failed = f" ({row['failed']} failed)" if row["failed"] else ""
        table.add_row(
            kind, str(row["connections"]), row["target"] + failed, f"{row['per_second']:.0f}", *numbers
        )
    console.print(table)
    for check in document["checks"]:
        kind = "stream" if check["stream"] else "whole"
        verdict = "met" if check["met"] else "missed"
        console.print(f"{verdict}: {check['what']} ({kind}) = {check['value']}, target {check['target']}")
    events = document["events"]
    console.print(f"events: {events['sent']} taken by a consumer, {events['shed']} shed")
    for growth in document["growing_sessions"]:
        if "skipped" in growth:
            console.print(f"growing sessions: {growth['skipped']}")
            continue
        console.print(
            f"growing sessions that pause {growth['think_s']:g} s, with the coordinator: {growth['requests']} requests "
            f"at {growth['per_second']:.0f}/s, {growth['mapped_within_1s_share']:.1%} mapped within 1 s, "
            f"{growth['events_shed']} events shed, {growth['mapped']} mapped in all"
        )
