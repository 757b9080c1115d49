"""kvpilot over several tiers: what is loaded ahead, what is written down, and what always holds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.made_up import CHUNK, overlays, scenarios
from tests.sim.test_tiers import SIMPLE, agents, lru

from kvpilot.domain import Tier
from kvpilot.plan.placement import PlacementSettings
from kvpilot.replay.plan import Hints
from kvpilot.sim.clairvoyant import clairvoyant
from kvpilot.sim.hardware import PROFILES, Hardware
from kvpilot.sim.one_tier import Scenario
from kvpilot.sim.planned import PlannedNode, run_planned
from kvpilot.sim.tiers import capacities
from kvpilot.traces import Overlay

some_hints = st.sampled_from(list(Hints))
machines = st.sampled_from([*PROFILES.values(), SIMPLE])


class _Watched(PlannedNode):
    """Checks the books of all tiers whenever something happened."""

    def after(self, now: float) -> None:
        super().after(now)
        for cache in self._caches.values():
            cache.check()


@given(scenario=scenarios(), device=st.integers(1, 20), profile=machines, hints=some_hints)
@settings(max_examples=60, deadline=None)
def test_no_tier_holds_more_than_it_can_nor_a_hole_nor_loses_what_is_in_use(
    scenario: Scenario, device: int, profile: Hardware, hints: Hints
) -> None:
    node = _Watched(scenario, profile, device, hints, PlacementSettings())
    node.run()
    outcome = node.outcome()
    for tier, most in capacities(profile, device).items():
        assert outcome.held_peak[tier] <= most
    assert (outcome.found <= scenario.workload.depths(scenario.workload.prompt_tip)).all()


@given(laid=overlays(), device=st.integers(1, 20), hints=some_hints)
@settings(max_examples=40, deadline=None)
def test_the_same_run_ends_the_same_whatever_sessions_are_called(
    laid: Overlay, device: int, hints: Hints
) -> None:
    renamed = msgspec.structs.replace(
        laid,
        placed=tuple(
            msgspec.structs.replace(p, session=msgspec.structs.replace(p.session, id=f"other-{9 - i}"))
            for i, p in enumerate(laid.placed)
        ),
    )
    first, second, third = (
        run_planned(Scenario(which), SIMPLE, device, hints) for which in (laid, laid, renamed)
    )
    assert (first.ttft == second.ttft).all() and (first.ttft == third.ttft).all()
    assert first.written == second.written == third.written


def rhythm(calls: int, every: float, agent: str, chunks: int, begin: float) -> list[tuple[float, str, int]]:
    return [(begin + every * i, agent, chunks if i == 0 else 0) for i in range(calls)]


def test_who_returns_in_a_rhythm_is_loaded_before_it_returns() -> None:
    # Two agents of 4 chunks take turns in a device of 5: on demand each waits for its load each time.
    calls = sorted(rhythm(40, 60.0, "a", 4, 0.0) + rhythm(40, 60.0, "b", 4, 30.0))
    scenario = agents(*calls)
    ours = run_planned(scenario, SIMPLE, 5, Hints.LIFECYCLE)
    theirs = lru(scenario, 5)
    assert ours.ttft[40:].mean() < 0.7 * theirs.ttft[40:].mean()


def test_all_of_a_conversation_makes_way_not_only_its_last_turn() -> None:
    # As above, but contexts of many turns: each adds a chunk, and 40 fit into the device.
    first = [(5.0 * i, agent, 1) for i in range(30) for agent in "ab"]
    turns = [(200.0 + 60.0 * i + 30.0 * (agent == "b"), agent, 0) for i in range(30) for agent in "ab"]
    scenario = agents(*first, *turns)
    ours = run_planned(scenario, SIMPLE, 40, Hints.LIFECYCLE)
    assert ours.ttft[80:].mean() < 0.5 * lru(scenario, 40).ttft[80:].mean()


def test_what_waits_for_room_is_loaded_into_the_room_that_is_left() -> None:
    # Replies take 100 s, a device has room for 10. d displaces all of b; when b returns, c runs and leaves room for 4.
    machine = msgspec.structs.replace(
        SIMPLE,
        token_s=0.0,
        decode_token_s=100.0,
        stores=(msgspec.structs.replace(SIMPLE.stores[0], size=4.0),),
    )
    scenario = agents((0.0, "b", 6), (200.0, "d", 10), (400.0, "c", 6), (410.0, "b", 0))
    loads = {
        name: float((outcome.ttft - outcome.waited)[3])
        for name, outcome in {
            "lru": lru(scenario, 10, machine),
            "kvpilot": run_planned(scenario, machine, 10, Hints.NONE),
            "clairvoyant": clairvoyant(scenario, machine, 10),
        }.items()
    }
    assert loads == pytest.approx({"lru": 0.6, "kvpilot": 0.2, "clairvoyant": 0.2})


def test_what_is_over_is_never_written_to_disk() -> None:
    # Each session is over when the next begins; host memory holds two of them.
    scenario = agents(*((100.0 * i, f"s{i}", 4) for i in range(8)))
    assert lru(scenario, 4).written[Tier.DISK] == 32
    assert run_planned(scenario, SIMPLE, 4, Hints.LIFECYCLE).written[Tier.DISK] == 0


def test_what_may_return_is_on_disk_when_host_memory_gives_it_up() -> None:
    # All come back once everybody has called: 28 chunks, a device of 4, host memory of 8 and a disk of 32.
    calls = [(100.0 * i, f"s{i % 7}", 4 if i < 7 else 0) for i in range(14)]
    outcome = run_planned(agents(*calls), SIMPLE, 4, Hints.LIFECYCLE)
    assert outcome.found[7:].tolist() == [4] * 7
    assert (outcome.ttft[7:] < 4 * CHUNK).all()
