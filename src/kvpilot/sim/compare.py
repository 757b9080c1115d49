"""``kvpilot sim compare``: policies side by side on recorded agents, along pressure.

Words are used as follows. *hit rate*: tokens of prompts found in the tier ÷ those an infinite cache would find;
``hit_rate_all``: ÷ all tokens of prompts. *pressure*: working set ÷ capacity. *gap closed*: (h − h_lru) ÷ (h_belady −
h_lru); None where there is less than a hundredth to win. Capacities below twice the largest single context are
skipped, and listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from kvpilot.replay.plan import Hints
from kvpilot.sim.one_tier import DEFAULT_PIN, Pin, Scenario, scenario_of
from kvpilot.sim.outcome import Outcome
from kvpilot.sim.policies import BELADY, LRU, POLICIES
from kvpilot.sim.working_set import capacity_for
from kvpilot.traces import read_trace, trace_name

LEAST_GAP = 0.01
TIER = "memory"


class Options(msgspec.Struct, frozen=True):
    """What is compared. ``sessions`` None: all of a trace, which is also taken where it has fewer."""

    policies: Sequence[str]
    pressures: Sequence[float]
    hints: Sequence[Hints] = (Hints.NONE, Hints.LIFECYCLE)
    sessions: int | None = 120
    seed: int = 1
    window_s: float | None = None
    bytes_per_token: int = 131_072
    pin: Pin = DEFAULT_PIN


class Row(msgspec.Struct, frozen=True):
    """One policy at one pressure. ``capacity_chunks`` of ``chunk_tokens`` tokens."""

    source: str
    pressure: float
    capacity_chunks: int
    policy: str
    hints: str
    hit_rate: float
    hit_rate_all: float
    gap_closed: float | None
    bytes_held: dict[str, dict[str, float]]
    bytes_written: dict[str, int]


def compare(paths: Sequence[Path], options: Options, tell: Callable[[str], None]) -> dict[str, Any]:
    """The document of all sources. ``tell`` gets lines of progress. Raises TraceError."""

    def rows_of(source: str, scenario: Scenario, pressure: float, capacity: int) -> tuple[list[Row], str]:
        found = list(_rows(source, scenario, pressure, capacity, options))
        return found, _in_a_line(found)

    walked = walk(paths, options, tell, rows_of)
    return {**walked.document(), "pin": options.pin.value, "medians": _medians(walked.rows)}


_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Walked(Generic[_R]):
    """The rows of all sources and pressures, what they are about, and which there were not."""

    seed: int
    rows: list[_R]
    sources: list[dict[str, Any]]
    skipped: list[dict[str, Any]]

    def document(self) -> dict[str, Any]:
        return {
            "rows": [msgspec.to_builtins(row) for row in self.rows],
            "sources": self.sources,
            "skipped": self.skipped,
            "seed": self.seed,
        }


def walk(
    paths: Sequence[Path],
    options: Options,
    tell: Callable[[str], None],
    rows_of: Callable[[str, Scenario, float, int], tuple[list[_R], str]],
) -> Walked[_R]:
    """``rows_of(source, scenario, pressure, capacity in chunks)``, its rows and a line about them, of each source at
    each pressure where the largest context fits twice. Raises TraceError."""
    walked: Walked[_R] = Walked(options.seed, [], [], [])
    for path in paths:
        source = trace_name(path)
        tell(f"{source}: reading")
        scenario = scenario_of(
            list(read_trace(path)), options.sessions, options.seed, options.window_s, options.pin
        )
        walked.sources.append(source_facts(source, scenario))
        tell(
            f"{source}: {len(scenario.workload.sessions)} sessions, {scenario.workload.calls} calls, "
            f"working set {scenario.working_set:.0f} chunks"
        )
        least = 2 * scenario.workload.largest_context
        for pressure in options.pressures:
            capacity = capacity_for(scenario.working_set, pressure)
            if capacity < least:
                walked.skipped.append(
                    {"source": source, "pressure": pressure, "capacity_chunks": capacity, "least": least}
                )
                tell(f"{source}: pressure {pressure:g} skipped: the largest context would not fit twice")
                continue
            rows, line = rows_of(source, scenario, pressure, capacity)
            walked.rows.extend(rows)
            tell(f"{source}: pressure {pressure:g}: {line}")
    return walked


def source_facts(source: str, scenario: Scenario) -> dict[str, Any]:
    """What the rows of a source are about."""
    workload = scenario.workload
    return {
        "source": source,
        "sessions": len(workload.sessions),
        "calls": workload.calls,
        "window_s": scenario.laid.window_s,
        "gaps_cut": scenario.laid.gaps_cut,
        "chunk_tokens": workload.chunk_tokens,
        "distinct_chunks": workload.distinct_chunks,
        "largest_context_chunks": workload.largest_context,
        "working_set_chunks": scenario.working_set,
        "reusable_share": _share(scenario, scenario.reusable.sum()),
    }


def _rows(source: str, scenario: Scenario, pressure: float, capacity: int, options: Options) -> Iterator[Row]:
    outcomes: dict[tuple[str, Hints], Outcome] = {}
    for name in options.policies:
        entry = POLICIES[name]
        for hints in options.hints:
            same = outcomes.get((name, options.hints[0])) if not entry.uses_hints else None
            outcomes[name, hints] = same or entry.run(scenario, capacity, hints)
    low, high = (_hit_rate(scenario, outcomes[end, options.hints[0]]) for end in (LRU, BELADY))
    chunk_bytes = scenario.workload.chunk_tokens * options.bytes_per_token
    for (name, hints), outcome in outcomes.items():
        rate = _hit_rate(scenario, outcome)
        held = {"mean": outcome.held_mean * chunk_bytes, "peak": float(outcome.held_peak * chunk_bytes)}
        yield Row(
            source=source,
            pressure=pressure,
            capacity_chunks=capacity,
            policy=name,
            hints=hints.value,
            hit_rate=rate,
            hit_rate_all=_share(scenario, outcome.hits.sum()),
            gap_closed=(rate - low) / (high - low) if high - low >= LEAST_GAP else None,
            bytes_held={TIER: held},
            bytes_written={TIER: outcome.written * chunk_bytes},
        )


def _hit_rate(scenario: Scenario, outcome: Outcome) -> float:
    reusable = int(scenario.reusable.sum())
    return int(outcome.hits.sum()) / reusable if reusable else 0.0


def _share(scenario: Scenario, chunks: float) -> float:
    """Chunks as a share of all tokens of prompts."""
    tokens = int(scenario.workload.prompt_tokens.sum())
    return float(chunks) * scenario.workload.chunk_tokens / tokens if tokens else 0.0


def _medians(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By policy and hints, the median of the gap closed where there is a gap, and the worst against LRU."""
    out = []
    lru = {(row.source, row.pressure): row.hit_rate for row in rows if row.policy == LRU}
    for policy, hints in dict.fromkeys((row.policy, row.hints) for row in rows):
        own = [row for row in rows if (row.policy, row.hints) == (policy, hints)]
        gaps = [row.gap_closed for row in own if row.gap_closed is not None]
        out.append(
            {
                "policy": policy,
                "hints": hints,
                "gap_closed": median(gaps) if gaps else None,
                "rows": len(gaps),
                "worst_against_lru": min(row.hit_rate - lru[row.source, row.pressure] for row in own),
            }
        )
    return out


def _in_a_line(rows: Sequence[Row]) -> str:
    return ", ".join(f"{policy} {rate:.3f}" for policy, rate in {r.policy: r.hit_rate for r in rows}.items())


def print_table(document: dict[str, Any], console: Console) -> None:
    """Hit rates, with the share of the gap closed in brackets, by source and pressure; medians at the end."""
    rows = [msgspec.convert(row, Row) for row in document["rows"]]
    pressures = sorted({row.pressure for row in rows})
    table = table_by_pressure(f"hit rate (gap closed) by pressure, seed {document['seed']}", pressures)
    cells = {(row.source, row.policy, row.hints, row.pressure): row for row in rows}
    last = None
    for source, policy, hints in dict.fromkeys((row.source, row.policy, row.hints) for row in rows):
        if not POLICIES[policy].uses_hints and (source, policy) == last:
            continue
        if last is not None and source != last[0]:
            table.add_section()
        shown = hints if POLICIES[policy].uses_hints else ""
        table.add_row(
            source, policy, shown, *(_cell(cells.get((source, policy, hints, p))) for p in pressures)
        )
        last = (source, policy)
    console.print(table)
    medians = Table(title="over all rows")
    for column in ("policy", "hints", "median gap closed", "rows with a gap", "worst against lru"):
        medians.add_column(column, justify="left" if column in ("policy", "hints") else "right")
    for line in document["medians"]:
        gap = line["gap_closed"]
        medians.add_row(
            line["policy"],
            line["hints"],
            "–" if gap is None else f"{gap:.0%}",
            str(line["rows"]),
            f"{100 * line['worst_against_lru']:+.1f} points",
        )
    console.print(medians)
    print_skipped(document, console)


def table_by_pressure(title: str, pressures: Sequence[float]) -> Table:
    """An empty table of policies, a column for each pressure."""
    table = Table(title=title)
    for column in ("source", "policy", "hints"):
        table.add_column(column)
    for pressure in pressures:
        table.add_column(f"{pressure:g}", justify="right", no_wrap=True)
    return table


def print_skipped(document: dict[str, Any], console: Console) -> None:
    """The capacities that were too small."""
    for skip in document["skipped"]:
        console.print(
            f"skipped: {skip['source']} at pressure {skip['pressure']:g}: {skip['capacity_chunks']} chunks, "
            f"twice the largest context is {skip['least']}"
        )


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    gap = "–" if row.gap_closed is None else f"{row.gap_closed:.0%}"
    return f"{row.hit_rate:.3f} ({gap})"


def numbers(text: str, option: str, zero: bool = False) -> list[float]:
    """Numbers above 0 (``zero``: or 0) with commas between them. Raises ValueError with a line that says what to do."""
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or not all(math.isfinite(v) and (v > 0 or (zero and v == 0)) for v in values):
        which = "0 or more" if zero else "above 0"
        raise ValueError(f"{option} {text}: give numbers {which} with commas between them")
    return values
