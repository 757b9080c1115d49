"""``kvpilot eval forecast``: do stated intervals of pauses hold what they state?

Recorded sessions are laid over one another and played to the forecasts that rank KV (``kvpilot.sim.brain``). At the
beginning of each pause its central 50, 80 and 95 % intervals are stated, given that it ends; when it has ended, it lies
in them or not. The first part of the run is warm-up. What is known at the start (the packaged prior) is left out unless
asked for, as it has seen public recordings. Confidence intervals are of a bootstrap over sessions (2.5 to 97.5 %).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvpilot.forecast import Forecaster
from kvpilot.forecast.calibration import NOMINAL, SHORTEST_S, Intervals, Stated
from kvpilot.forecast.hazard import HazardModel
from kvpilot.replay.plan import Hints
from kvpilot.sim.brain import Kvpilot
from kvpilot.sim.one_tier import run_contexts, scenario_of
from kvpilot.sim.policy import Run
from kvpilot.traces import TraceSession

TOLERANCE = 0.03
WARM_UP = 0.2
"""Share of the pauses, the earliest, that are not scored."""
RESAMPLES = 400


class Interval(msgspec.Struct, frozen=True):
    """How many of the pauses lie in the interval stated for ``nominal`` of them. ``width``: median of its upper
    end ÷ its lower one."""

    nominal: float
    coverage: float
    low: float
    high: float
    width: float
    holds: bool


class Calibration(msgspec.Struct, frozen=True):
    sessions: int
    pauses: int
    intervals: list[Interval]


class _Pause(msgspec.Struct, frozen=True):
    session: int
    intervals: tuple[tuple[float, float], ...]
    seconds: float


def calibrate(
    sessions: Sequence[TraceSession], seed: int, hints: Hints, count: int | None = None, prior: bool = False
) -> Calibration | None:
    """One source (None: it has no pauses). Raises TraceError."""
    scenario = scenario_of(sessions, count, seed)
    pauses: list[_Pause] = []

    def note(context: int, seconds: float, stated: Stated) -> None:
        pauses.append(_Pause(int(session_of[context]), stated.intervals, seconds))

    session_of = scenario.view(hints).session
    intervals = Intervals(note=note)
    forecaster = (
        Forecaster(intervals=intervals) if prior else Forecaster(HazardModel(), HazardModel(), intervals)
    )

    def make(run: Run) -> Kvpilot:
        return Kvpilot(run, forecaster)

    run_contexts(scenario, make, scenario.workload.distinct_chunks, hints)
    scored = pauses[int(len(pauses) * WARM_UP) :]
    if not scored:
        return None
    return Calibration(
        sessions=len({pause.session for pause in scored}),
        pauses=len(scored),
        intervals=[_interval(scored, index, seed) for index in range(len(NOMINAL))],
    )


def _interval(pauses: Sequence[_Pause], index: int, seed: int) -> Interval:
    inside: dict[int, list[bool]] = defaultdict(list)
    for pause in pauses:
        low, high = pause.intervals[index]
        inside[pause.session].append(low <= pause.seconds <= high)
    sums = [(sum(found), len(found)) for found in inside.values()]
    rng = random.Random(seed)
    shares = sorted(_share(rng.choices(sums, k=len(sums))) for _ in range(RESAMPLES))
    low, high = shares[int(0.025 * RESAMPLES)], shares[int(0.975 * RESAMPLES) - 1]
    nominal, coverage = NOMINAL[index], _share(sums)
    return Interval(
        nominal=nominal,
        coverage=coverage,
        low=low,
        high=high,
        width=median(
            high / max(low, SHORTEST_S) for low, high in (pause.intervals[index] for pause in pauses)
        ),
        holds=abs(coverage - nominal) <= TOLERANCE or low <= nominal <= high,
    )


def _share(sums: Sequence[tuple[int, int]]) -> float:
    return sum(inside for inside, _ in sums) / max(1, sum(number for _, number in sums))


def report(sources: dict[str, Calibration | None], seed: int, hints: Hints) -> dict[str, Any]:
    """All sources, and whether every interval of each holds."""
    scored = {name: found for name, found in sources.items() if found is not None}
    return {
        "holds": all(interval.holds for found in scored.values() for interval in found.intervals),
        "seed": seed,
        "hints": hints.value,
        "by_source": {name: msgspec.to_builtins(found) for name, found in sources.items()},
    }


def print_table(document: dict[str, Any], console: Console) -> None:
    """The document for people."""
    table = Table(title=f"pauses inside their stated intervals (hints: {document['hints']})")
    for column in ("source", "pauses", *(f"{share:.0%}" for share in NOMINAL)):
        table.add_column(column, justify="left" if column == "source" else "right")
    for source, found in document["by_source"].items():
        if found is None:
            table.add_row(source, "0", *("–" for _ in NOMINAL))
            continue
        cells = (
            f"{i['coverage']:.1%} ({i['low']:.0%}–{i['high']:.0%}){'' if i['holds'] else ' ✗'}"
            for i in found["intervals"]
        )
        table.add_row(source, str(found["pauses"]), *cells)
    console.print(table)
