"""The policies that can be compared, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpilot.replay.plan import Hints
from kvpilot.sim.belady import belady
from kvpilot.sim.flat import Flat, run_flat
from kvpilot.sim.one_tier import Scenario, run_contexts
from kvpilot.sim.outcome import Outcome
from kvpilot.sim.policy import ContextPolicy, LeafLru, References, Run

LRU, BELADY = "lru", "belady"
"""What every comparison has: the ends of the gap."""


@dataclass(frozen=True, slots=True)
class Entry:
    """``run(scenario, capacity in chunks, hints)``; without ``uses_hints`` the result is the same for all hints."""

    run: Callable[[Scenario, int, Hints], Outcome]
    uses_hints: bool = False


def _contexts(make: Callable[[Run], ContextPolicy], uses_hints: bool = True) -> Entry:
    return Entry(lambda scenario, capacity, hints: run_contexts(scenario, make, capacity, hints), uses_hints)


def _flat(policy: Flat) -> Entry:
    return Entry(lambda scenario, capacity, _: run_flat(scenario.workload, scenario.calls, policy, capacity))


def _belady(scenario: Scenario, capacity: int, hints: Hints) -> Outcome:
    return belady(scenario.workload, scenario.calls, scenario.next_uses, capacity)


POLICIES: dict[str, Entry] = {
    LRU: _flat(Flat.LRU),
    "lru-leaf": _contexts(LeafLru, uses_hints=False),
    "references": _contexts(References),
    BELADY: Entry(_belady),
}
"""In the order of tables."""


def choose(names: str | None) -> list[str]:
    """Names given with commas (None: all), the two ends of the gap added. Raises ValueError."""
    if names is None:
        return list(POLICIES)
    asked = {name.strip() for name in names.split(",") if name.strip()}
    unknown = sorted(asked - POLICIES.keys())
    if unknown:
        raise ValueError(f"no policy {unknown[0]!r}: there are {', '.join(POLICIES)}")
    return [name for name in POLICIES if name in asked | {LRU, BELADY}]
