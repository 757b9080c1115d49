"""``kvpilot bench plan`` on a small scale."""

from __future__ import annotations

from kvpilot.bench.plan import run_bench


def test_a_decision_is_measured_with_everything_moving() -> None:
    document = run_bench(sessions=2_000, references=400_000, decisions=20, seed=1, tell=lambda _: None)
    assert 390_000 < document["references"] < 410_000
    assert document["moves"] > 0
    assert 0 < document["wall_ms"]["p50"] <= document["wall_ms"]["p99"]
