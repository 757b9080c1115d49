"""``kvpilot sim compare --profile``: time to first token under several tiers, along the pressure on device memory.

*gap closed*: (t_lru − t) ÷ (t_lru − t_clairvoyant) of mean times to first token, ``gap_closed_p90`` of their 90th
percentiles; None where there is less than a hundredth of LRU's to win.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from kvpilot.replay.plan import Hints
from kvpilot.sim.clairvoyant import clairvoyant
from kvpilot.sim.compare import Options, print_skipped, table_by_pressure, walk
from kvpilot.sim.hardware import PROFILES, Hardware
from kvpilot.sim.one_tier import Scenario
from kvpilot.sim.policies import CLAIRVOYANT, LRU, TIERED
from kvpilot.sim.tiers import TieredOutcome

LEAST_SHARE = 0.01


class TierRow(msgspec.Struct, frozen=True):
    """One policy at one pressure on the device tier. Times in seconds, bytes by tier (none for the clairvoyant).

    ``waited_mean``: what requests waited for room in the device, part of their time to first token. Where that is most
    of it too many run at once: whose turn it is then hangs on moments, and so do differences of some per cent."""

    source: str
    pressure: float
    capacity_chunks: int
    policy: str
    hints: str
    hit_rate: float
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    waited_mean: float
    gap_closed: float | None
    gap_closed_p90: float | None
    bytes_held: dict[str, dict[str, float]]
    bytes_written: dict[str, int]


def hardware_named(name: str) -> Hardware:
    """Raises ValueError with the names there are."""
    if name not in PROFILES:
        raise ValueError(f"no profile {name!r}: there are {', '.join(PROFILES)}")
    return PROFILES[name]


def compare_tiers(
    paths: Sequence[Path], options: Options, hardware: Hardware, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The document of all sources; of ``options.policies`` those that know tiers. Raises TraceError."""

    def rows_of(source: str, scenario: Scenario, pressure: float, capacity: int) -> tuple[list[TierRow], str]:
        found = list(_rows(source, scenario, hardware, pressure, capacity, options))
        return found, ", ".join(f"{row.policy} {row.ttft_mean:.3f} s" for row in found)

    return {**walk(paths, options, tell, rows_of).document(), "profile": msgspec.to_builtins(hardware)}


def _rows(
    source: str, scenario: Scenario, hardware: Hardware, pressure: float, capacity: int, options: Options
) -> Iterator[TierRow]:
    bound = clairvoyant(scenario, hardware, capacity)
    outcomes: dict[tuple[str, Hints], TieredOutcome] = {}
    for name in options.policies:
        entry = TIERED.get(name)
        if entry is None:
            continue
        for hints in options.hints:
            same = outcomes.get((name, options.hints[0])) if not entry.uses_hints else None
            outcomes[name, hints] = same or entry.run(scenario, hardware, capacity, hints)
    lru = outcomes[LRU, options.hints[0]]
    outcomes |= dict.fromkeys(((CLAIRVOYANT, hints) for hints in options.hints), bound)
    chunk_bytes = scenario.workload.chunk_tokens * hardware.bytes_per_token
    reusable = int(scenario.reusable.sum())
    for (name, hints), outcome in outcomes.items():
        p50, p90, p99 = np.percentile(outcome.ttft, [50, 90, 99]).tolist()
        yield TierRow(
            source=source,
            pressure=pressure,
            capacity_chunks=capacity,
            policy=name,
            hints=hints.value,
            hit_rate=int(outcome.found.sum()) / reusable if reusable else 0.0,
            ttft_mean=float(outcome.ttft.mean()),
            ttft_p50=p50,
            ttft_p90=p90,
            ttft_p99=p99,
            waited_mean=float(outcome.waited.mean()),
            gap_closed=_closed(outcome, lru, bound, np.mean),
            gap_closed_p90=_closed(outcome, lru, bound, lambda times: np.percentile(times, 90)),
            bytes_held={
                tier.value: {"mean": mean * chunk_bytes, "peak": float(outcome.held_peak[tier] * chunk_bytes)}
                for tier, mean in outcome.held_mean.items()
            },
            bytes_written={tier.value: chunks * chunk_bytes for tier, chunks in outcome.written.items()},
        )


def _closed(
    outcome: TieredOutcome, lru: TieredOutcome, bound: TieredOutcome, measure: Callable[[Any], Any]
) -> float | None:
    worst, best = float(measure(lru.ttft)), float(measure(bound.ttft))
    if worst - best < LEAST_SHARE * worst:
        return None
    return (worst - float(measure(outcome.ttft))) / (worst - best)


def print_table(document: dict[str, Any], console: Console) -> None:
    """Mean and 90th percentile of the time to first token, by source and pressure."""
    rows = [msgspec.convert(row, TierRow) for row in document["rows"]]
    pressures = sorted({row.pressure for row in rows})
    name = document["profile"]["name"]
    title = f"TTFT mean / p90 in s (gap closed) by pressure, {name}, seed {document['seed']}"
    table = table_by_pressure(title, pressures)
    cells = {(row.source, row.policy, row.hints, row.pressure): row for row in rows}
    for source, policy, hints in dict.fromkeys((row.source, row.policy, row.hints) for row in rows):
        shown = [cells.get((source, policy, hints, pressure)) for pressure in pressures]
        table.add_row(source, policy, hints, *map(_cell, shown))
    console.print(table)
    print_skipped(document, console)


def _cell(row: TierRow | None) -> str:
    if row is None:
        return "–"
    gap = "–" if row.gap_closed is None else f"{row.gap_closed:.0%}"
    return f"{row.ttft_mean:.3f} / {row.ttft_p90:.3f} ({gap})"
