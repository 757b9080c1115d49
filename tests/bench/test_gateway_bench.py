"""The gateway benchmark runs by itself, and its document says what was measured."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from kvpilot.bench.gateway import GatewayBenchOptions, print_table, run_bench
from kvpilot.bench.load import LoadResult, measure, request_body
from kvpilot.bench.processes import mock_engine


def test_the_gateway_alone_is_compared_with_no_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    options = GatewayBenchOptions(
        seconds=1, rounds=1, workers=1, body_kb=20, rivals=(), coordinator=True, coordinator_seconds=2
    )
    document = run_bench(options)
    rows = {(row["target"], row["stream"], row["connections"]): row for row in document["rows"]}
    assert set(rows) == {(t, s, c) for t in ("direct", "kvpilot") for s in (False, True) for c in (1, 16)}
    assert all(row["failed"] == 0 and row["per_second"] > 1 for row in rows.values())
    assert document["events"]["sent"] > 0
    for growth in document["growing_sessions"]:
        assert growth["requests"] > 0
        assert growth["mapped"] > 0
    assert [growth["think_s"] for growth in document["growing_sessions"]] == [0.2, 0.0]
    assert {check["what"] for check in document["checks"]} == {
        "added p50 ms, 1 connection",
        "added p99 ms, 1 connection",
    }
    shown = io.StringIO()
    print_table(document, Console(file=shown, width=80))
    table = shown.getvalue().split("met:")[0].split("missed:")[0]
    assert "+p99 ms" in table and "…" not in table
    assert not [*tmp_path.iterdir()], "sockets are left behind"


def test_load_without_wrk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpilot.bench.load.generator_name", lambda: "asyncio")
    with mock_engine() as url:
        result = measure(url, request_body(20_000, stream=True), connections=2, seconds=0.3)
    assert isinstance(result, LoadResult)
    assert (result.failed, result.requests > 1, result.p50_ms <= result.p99_ms) == (0, True, True)
