"""Several tiers: what a request waits for."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.made_up import CHUNK, scenarios
from tests.sim.watched import watched

from kvpilot.domain import Tier
from kvpilot.replay.plan import Hints
from kvpilot.sim.baselines import LeafLru
from kvpilot.sim.clairvoyant import clairvoyant
from kvpilot.sim.hardware import PROFILES, Hardware, Store
from kvpilot.sim.one_tier import Scenario
from kvpilot.sim.policies import CLAIRVOYANT, TIERED
from kvpilot.sim.tiers import TieredOutcome, alone, capacities, run_tiers
from kvpilot.traces import Overlay, Placed, TraceAgent, TraceCall, TraceMessage, TraceSession

SIMPLE = Hardware(
    name="simple",
    bytes_per_token=1,
    base_s=0.0,
    token_s=1.0,
    pair_s=0.0,
    decode_token_s=0.0,
    stores=(
        Store(Tier.HOST, size=2.0, read_bytes_per_s=CHUNK * 10.0, latency_s=0.0),
        Store(Tier.DISK, size=8.0, read_bytes_per_s=CHUNK * 1.0, latency_s=0.0),
    ),
)
"""A token takes a second to compute, a chunk a tenth of one from host memory and one from disk."""
SLOW = msgspec.structs.replace(SIMPLE, token_s=0.01, decode_token_s=1.0)
"""Requests run for so long that many do at once."""


def lru(scenario: Scenario, device_chunks: int, hardware: Hardware = SIMPLE) -> TieredOutcome:
    return run_tiers(scenario, hardware, device_chunks, alone(LeafLru), Hints.LIFECYCLE)


def agents(*calls: tuple[float, str, int]) -> Scenario:
    """Calls as (time, agent, chunks that its prompt adds); replies are too short to fill a chunk."""
    contexts: dict[str, list[TraceCall]] = {}
    for at, agent, chunks in calls:
        before = contexts.setdefault(agent, [])
        added = TraceMessage(f"{agent}{len(before)}", "block", chunks * CHUNK)
        reply = TraceMessage(f"{agent}-reply{len(before)}", "assistant", 1)
        before.append(TraceCall("main", at, at, keep=len(before), add=(added,), reply=reply))
    # Of blocks replies are no part of the context: `keep` counts the blocks alone.
    sessions = (
        TraceSession("made-up", agent, (TraceAgent("main"),), tuple(made), chunk_tokens=CHUNK)
        for agent, made in contexts.items()
    )
    return Scenario(Overlay(tuple(Placed(session, 0.0) for session in sessions), 0.0, 0))


def test_a_context_is_loaded_from_where_it_still_is() -> None:
    # Device 4 chunks, host 8, disk 32: each of the others is 4 chunks and pushes the first one further down.
    returns: dict[str, list[str]] = {"device": [], "host": ["b"], "disk": ["b", "c", "d"]}
    waited = {}
    for place, others in returns.items():
        calls = [
            (0.0, "a", 4),
            *((100.0 * (1 + i), other, 4) for i, other in enumerate(others)),
            (1000.0, "a", 0),
        ]
        waited[place] = float(lru(agents(*calls), device_chunks=4).ttft[-1])
    assert waited == pytest.approx({"device": 0.0, "host": 0.4, "disk": 4.0})


def test_prefill_is_queued_for() -> None:
    outcome = lru(agents((0.0, "a", 2), (1.0, "b", 1)), device_chunks=100)
    assert outcome.ttft.tolist() == [8.0, 8.0 - 1.0 + 4.0]


def test_a_request_waits_for_room_to_the_end_of_others_then_its_turn_comes() -> None:
    # Each reply takes 100 s. Beside the 4 chunks of a there is no room for those of b; c, which came last, would fit.
    slow = msgspec.structs.replace(SIMPLE, decode_token_s=100.0)
    calls = agents((0.0, "a", 4), (1.0, "b", 4), (2.0, "c", 1))
    assert lru(calls, 9, slow).ttft.tolist() == [16.0, 16.0 - 1.0 + 16.0, 32.0 - 2.0 + 4.0]
    assert lru(calls, 7, slow).ttft.tolist() == [16.0, 116.0 - 1.0 + 16.0, 132.0 - 2.0 + 4.0]
    assert lru(calls, 7, slow).waited.tolist() == [0.0, 116.0 - 1.0, 116.0 - 2.0]
    assert clairvoyant(calls, slow, 7).ttft.tolist() == lru(calls, 7, slow).ttft.tolist()


def test_what_requests_share_takes_room_once() -> None:
    # A system prompt of 4 chunks and a message of one: two requests have 6 chunks together.
    calls = (
        TraceCall(
            "main", 0.0, 1.0, 0, (TraceMessage("m", "user", CHUNK),), TraceMessage("r", "assistant", 1)
        ),
    )
    head = TraceAgent("main", hidden_tok=4 * CHUNK, hidden_id="hidden")
    placed = []
    for name in "ab":
        own = msgspec.structs.replace(calls[0], add=(TraceMessage(name, "user", CHUNK),))
        session = TraceSession("made-up", name, (head,), (own,), chunk_tokens=CHUNK)
        placed.append(Placed(session, 1.0 * len(placed)))
    slow = msgspec.structs.replace(SIMPLE, decode_token_s=100.0)
    scenario = Scenario(Overlay(tuple(placed), 0.0, 0))
    assert [float(lru(scenario, room, slow).ttft[1]) for room in (6, 5)] == [23.0, 123.0]


@given(scenario=scenarios(), device=st.integers(1, 20), policy=st.sampled_from([*TIERED, CLAIRVOYANT]))
@settings(max_examples=60, deadline=None)
def test_what_runs_has_room_and_keeps_it_and_nobody_is_passed_over(
    scenario: Scenario, device: int, policy: str
) -> None:
    with watched() as began:
        if policy == CLAIRVOYANT:
            outcome = clairvoyant(scenario, SLOW, device)
        else:
            outcome = TIERED[policy].run(scenario, SLOW, device, Hints.NONE)
    assert np.isfinite(outcome.ttft).all()
    workload = scenario.workload
    first = [call for call in began if call in set(np.unique(workload.agent, return_index=True)[1].tolist())]
    assert first == sorted(first), (
        "of first calls, which wait for no reply, a later one began before an earlier one"
    )


def test_an_agent_does_not_call_before_it_has_its_reply() -> None:
    outcome = lru(agents((0.0, "a", 2), (1.0, "a", 1)), device_chunks=100)
    assert outcome.ttft.tolist() == [8.0, 4.0]


@given(scenario=scenarios(), device=st.integers(1, 20), profile=st.sampled_from([*PROFILES.values(), SIMPLE]))
@settings(max_examples=60)
def test_no_tier_holds_more_than_it_can(scenario: Scenario, device: int, profile: Hardware) -> None:
    outcome = lru(scenario, device, profile)
    for tier, most in capacities(profile, device).items():
        assert outcome.held_peak[tier] <= most
    assert (outcome.ttft > 0).all() or profile is SIMPLE
    assert np.isfinite(outcome.ttft).all()
