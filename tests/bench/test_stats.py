"""Paired statistics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.bench.stats import closed_share, interleaved, paired_ratios, paired_summary, summary
from kvpilot.bench.tiers import VARIANTS, sizes_for

times = st.floats(1, 1e5)


def test_ratios_are_taken_within_a_round_and_only_where_both_were_measured() -> None:
    rounds = [{"a": 10.0, "b": 20.0}, {"a": 30.0}, {"b": 5.0}, {"a": 9.0, "b": 3.0}]
    assert paired_ratios(rounds, "a", "b") == [0.5, 3.0]
    spread = paired_summary(rounds, "a", ["b", "never"])
    assert spread["b"] == {"median": 1.75, "quartiles": [1.125, 2.375], "min": 0.5, "max": 3.0, "n": 2}
    assert "never" not in spread


@given(st.lists(times, min_size=1, max_size=20), st.floats(0.01, 10))
def test_a_constant_factor_is_the_ratio_whatever_the_drift(base: list[float], factor: float) -> None:
    rounds = [{"of": value * factor, "to": value} for value in base]
    assert paired_summary(rounds, "of", ["to"])["to"]["median"] == pytest.approx(factor, rel=1e-2, abs=1e-4)


def test_closed_share() -> None:
    rounds = [{"k": 40.0, "start": 60.0, "goal": 35.0}, {"k": 30.0, "start": 70.0, "goal": 30.0}]
    assert closed_share(rounds, "k", "start", "goal") == {"paired": 0.9, "of_medians": 0.923}
    # Nothing to close: the goal is not better than the start.
    assert closed_share([{"k": 1.0, "start": 1.0, "goal": 2.0}], "k", "start", "goal") == {
        "paired": None,
        "of_medians": None,
    }


@given(st.integers(0, 50))
def test_rounds_are_interleaved_a_b_b_a(number: int) -> None:
    first, second = interleaved(VARIANTS, number), interleaved(VARIANTS, number + 1)
    assert sorted(first) == sorted(VARIANTS) and second == first[::-1]


def test_summary() -> None:
    assert summary([3.0, 1.0, 2.0]) == {"p50": 2.0, "min": 1.0, "max": 3.0, "n": 3}


@given(st.integers(4, 200))
def test_other_tenants_can_fill_host_memory_and_everything_fits_the_disk(own: int) -> None:
    sizes = sizes_for(own * 256)
    per_other = 4096 // sizes.chunk
    # What LMCache keeps free (a fifth) is enough to bring the context in from disk.
    assert 0.2 * sizes.host_chunks > own
    assert sizes.others * per_other > sizes.host_chunks
    # LMCache begins to evict at 80 %: nothing the bench needs may be lost to that.
    assert 0.8 * sizes.disk_chunks > sizes.others * per_other + own
