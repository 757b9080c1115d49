"""The benchmark measures what it says: every dialect is understood in it."""

from __future__ import annotations

from kvpilot.bench.hints import identify, run_bench, variants


def test_every_request_of_the_benchmark_is_understood_whole() -> None:
    for case in variants(8):
        hints = identify(case)
        assert 7_000 < len(case.body) < 20_000
        reasons = [reason for reason in hints.dropped if "more than" not in reason]
        assert reasons == []
        said = hints.session.id or hints.retention or hints.commands or hints.edits
        assert bool(said) == (case.name != "nothing said")


def test_the_document_has_both_quantiles_of_every_request() -> None:
    ticks = iter(range(10_000))
    document = run_bench(4, 3, clock=lambda: next(ticks) / 1000)
    assert document["variants"].keys() == {case.name for case in variants(4)}
    assert all((row["p50_ms"], row["p99_ms"]) == (1.0, 1.0) for row in document["variants"].values())
