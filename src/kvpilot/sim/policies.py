"""The policies that can be compared, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpilot.replay.plan import Hints
from kvpilot.sim.baselines import (
    Continuum,
    Evoke,
    LeafLru,
    Marconi,
    MarconiOffload,
    NextCall,
    References,
    StepsToExecution,
    TailLru,
    Ttl,
)
from kvpilot.sim.belady import belady
from kvpilot.sim.brain import Kvpilot
from kvpilot.sim.flat import Flat, run_flat
from kvpilot.sim.one_tier import Pin, Scenario, run_contexts
from kvpilot.sim.outcome import Outcome
from kvpilot.sim.policy import ContextPolicy

LRU, BELADY = "lru", "belady"
"""What every comparison of one tier has: the ends of the gap."""
CLAIRVOYANT = "clairvoyant"
"""The other end of the gap with several tiers."""


@dataclass(frozen=True, slots=True)
class Entry:
    """``run(scenario, capacity in chunks, hints)``; without ``uses_hints`` the result is the same for all hints."""

    run: Callable[[Scenario, int, Hints], Outcome]
    uses_hints: bool = False


def _contexts(make: type[ContextPolicy], *options: float) -> Entry:
    def run(scenario: Scenario, capacity: int, hints: Hints) -> Outcome:
        return run_contexts(scenario, lambda run: make(run, *options), capacity, hints)

    return Entry(run, make.uses_hints)


def _next_call(scenario: Scenario, capacity: int, hints: Hints) -> Outcome:
    begin = scenario.workload.begin
    return run_contexts(scenario, lambda run: NextCall(run, begin), capacity, hints)


def _flat(policy: Flat) -> Entry:
    def run(scenario: Scenario, capacity: int, hints: Hints) -> Outcome:
        return run_flat(scenario.workload, scenario.calls, policy, capacity, scenario.pin is Pin.CALL)

    return Entry(run)


def _belady(scenario: Scenario, capacity: int, hints: Hints) -> Outcome:
    return belady(scenario.workload, scenario.calls, scenario.next_uses, capacity)


POLICIES: dict[str, Entry] = {
    LRU: _flat(Flat.LRU),
    "lfu": _flat(Flat.LFU),
    "arc": _flat(Flat.ARC),
    "s3-fifo": _flat(Flat.S3FIFO),
    "ttl-5m": _contexts(Ttl, 300.0),
    "ttl-1h": _contexts(Ttl, 3600.0),
    "lru-leaf": _contexts(LeafLru),
    "t-lru": _contexts(TailLru),
    "evoke": _contexts(Evoke),
    "marconi": _contexts(Marconi),
    "marconi-offload": _contexts(MarconiOffload),
    "continuum": _contexts(Continuum),
    "references": _contexts(References),
    "kvflow": _contexts(StepsToExecution),
    "next-call": Entry(_next_call, uses_hints=True),
    "kvpilot": _contexts(Kvpilot),
    BELADY: Entry(_belady),
}
"""In the order of tables."""

TIERED: dict[str, type[ContextPolicy]] = {
    LRU: LeafLru,
    "evoke": Evoke,
    "continuum": Continuum,
    "references": References,
    "kvflow": StepsToExecution,
    "kvpilot": Kvpilot,
}
"""Those that know several tiers; each tier has one of its own."""


def choose(names: str | None) -> list[str]:
    """Names given with commas (None: all), the two ends of the gap added. Raises ValueError."""
    if names is None:
        return list(POLICIES)
    asked = {name.strip() for name in names.split(",") if name.strip()}
    unknown = sorted(asked - POLICIES.keys())
    if unknown:
        raise ValueError(f"no policy {unknown[0]!r}: there are {', '.join(POLICIES)}")
    return [name for name in POLICIES if name in asked | {LRU, BELADY}]
