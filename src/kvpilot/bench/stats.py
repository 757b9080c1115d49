"""Paired statistics over rounds. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Rounds = Sequence[Mapping[str, float]]
"""Per round: variant → measured value; a variant whose measurement was discarded is missing."""


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """p50, min, max and number of values."""
    return {
        "p50": round(statistics.median(values), 1),
        "min": round(min(values), 1),
        "max": round(max(values), 1),
        "n": len(values),
    }


def paired_ratios(rounds: Rounds, of: str, to: str) -> list[float]:
    """``of`` ÷ ``to`` in every round that has both."""
    return [r[of] / r[to] for r in rounds if of in r and to in r and r[to] > 0]


def paired_summary(rounds: Rounds, of: str, others: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Per other variant: median of the paired ratios, their quartiles, range and number."""
    out: dict[str, dict[str, Any]] = {}
    for other in others:
        ratios = paired_ratios(rounds, of, other)
        if not ratios:
            continue
        quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        out[other] = {
            "median": round(statistics.median(ratios), 4),
            "quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
            "min": round(min(ratios), 4),
            "max": round(max(ratios), 4),
            "n": len(ratios),
        }
    return out


def closed_share(rounds: Rounds, of: str, start: str, goal: str) -> dict[str, float | None]:
    """How far ``of`` goes from ``start`` to ``goal`` (1 = all the way).

    ``paired``: the median over rounds of (start − of) ÷ (start − goal), rounds where goal is not below start
    left out; ``of_medians``: the same from the three medians, over the rounds that have all three. None where
    there is nothing to close.
    """
    whole = [r for r in rounds if of in r and start in r and goal in r]
    shares = [(r[start] - r[of]) / (r[start] - r[goal]) for r in whole if r[start] > r[goal]]
    paired = round(statistics.median(shares), 3) if shares else None
    if not whole:
        return {"paired": paired, "of_medians": None}
    begin, here, end = (statistics.median(r[name] for r in whole) for name in (start, of, goal))
    of_medians = round((begin - here) / (begin - end), 3) if begin > end else None
    return {"paired": paired, "of_medians": of_medians}


def interleaved(variants: Sequence[str], round_number: int) -> list[str]:
    """A B … in even rounds, … B A in odd ones, so that drift hits every variant alike."""
    return list(variants) if round_number % 2 == 0 else list(reversed(variants))


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a share ``q`` of ``values`` lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
