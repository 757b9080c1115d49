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
from kvpilot.sim.hardware import Hardware
from kvpilot.sim.one_tier import Pin, Scenario, run_contexts
from kvpilot.sim.outcome import Outcome
from kvpilot.sim.planned import run_planned
from kvpilot.sim.policy import ContextPolicy
from kvpilot.sim.tiers import TieredOutcome, alone, run_tiers

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


@dataclass(frozen=True, slots=True)
class TieredEntry:
    """``run(scenario, hardware, chunks of the device, hints)``; as :class:`Entry`."""

    run: Callable[[Scenario, Hardware, int, Hints], TieredOutcome]
    uses_hints: bool


def _each_tier(kind: type[ContextPolicy]) -> TieredEntry:
    """A policy of that kind in each tier, loads when a request needs them."""

    def run(scenario: Scenario, hardware: Hardware, device_chunks: int, hints: Hints) -> TieredOutcome:
        return run_tiers(scenario, hardware, device_chunks, alone(kind), hints)

    return TieredEntry(run, kind.uses_hints)


TIERED: dict[str, TieredEntry] = {
    LRU: _each_tier(LeafLru),
    "evoke": _each_tier(Evoke),
    "continuum": _each_tier(Continuum),
    "references": _each_tier(References),
    "kvflow": _each_tier(StepsToExecution),
    "kvpilot": TieredEntry(run_planned, uses_hints=True),
}
"""Those that know several tiers."""


def choose(names: str | None) -> list[str]:
    """Names given with commas (None: all), the two ends of the gap added. Raises ValueError."""
    if names is None:
        return list(POLICIES)
    asked = {name.strip() for name in names.split(",") if name.strip()}
    unknown = sorted(asked - POLICIES.keys())
    if unknown:
        raise ValueError(f"no policy {unknown[0]!r}: there are {', '.join(POLICIES)}")
    return [name for name in POLICIES if name in asked | {LRU, BELADY}]
