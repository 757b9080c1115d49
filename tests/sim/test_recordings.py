"""The simulator on real recordings: what is known of them comes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpilot.replay.plan import Hints
from kvpilot.sim.one_tier import Pin, Scenario
from kvpilot.sim.outcome import Outcome
from kvpilot.sim.policies import BELADY, LRU, POLICIES
from kvpilot.traces import overlay, read_trace

pytestmark = pytest.mark.traces


@pytest.fixture(scope="module")
def scenario(traces_dir: Path) -> Scenario:
    """Agents with no people in the loop, all sessions, in a tier below the engine."""
    sessions = list(read_trace(traces_dir / "sessions" / "agentcgroup.jsonl.gz"))
    return Scenario(overlay(sessions, len(sessions), seed=1), Pin.LOOKUP)


def _rate(scenario: Scenario, outcome: Outcome) -> float:
    return float(outcome.hits.sum() / scenario.reusable.sum())


@pytest.mark.parametrize("pressure", [1.0, 2.0])
def test_knowing_when_each_agent_comes_back_is_nearly_all_of_the_gap(
    scenario: Scenario, pressure: float
) -> None:
    capacity = int(scenario.working_set / pressure)
    lru, known, best = (
        _rate(scenario, POLICIES[name].run(scenario, capacity, Hints.LIFECYCLE))
        for name in (LRU, "next-call", BELADY)
    )
    assert lru + 0.05 < known <= best
    assert known - lru > 0.95 * (best - lru)


def test_conversations_are_found_without_ids(scenario: Scenario) -> None:
    found, true = (scenario.view(hints) for hints in (Hints.NONE, Hints.LIFECYCLE))
    pairs = set(zip(found.context.tolist(), true.context.tolist(), strict=True))
    assert len(pairs) == found.contexts == true.contexts


@pytest.mark.parametrize("hints", list(Hints))
def test_kvpilot_closes_half_of_the_gap_where_no_people_are_waited_for(
    scenario: Scenario, hints: Hints
) -> None:
    capacity = int(scenario.working_set)
    lru, own, best = (
        _rate(scenario, POLICIES[name].run(scenario, capacity, hints)) for name in (LRU, "kvpilot", BELADY)
    )
    assert own - lru > 0.5 * (best - lru)
