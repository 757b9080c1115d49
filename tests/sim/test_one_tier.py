"""What every policy keeps to in one tier, whatever the agents do."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.made_up import overlays, scenarios

from kvpilot.replay.plan import Hints
from kvpilot.sim.baselines import LeafLru
from kvpilot.sim.belady import belady
from kvpilot.sim.events import Event, EventKind
from kvpilot.sim.one_tier import Pin, Scenario, run_contexts
from kvpilot.sim.policies import BELADY, POLICIES
from kvpilot.sim.policy import ContextPolicy
from kvpilot.sim.tree_cache import TreeCache
from kvpilot.traces import Overlay

some_hints = st.sampled_from(list(Hints))
policies = st.sampled_from([name for name in POLICIES if name != BELADY])


@given(policy=policies, scenario=scenarios(), capacity=st.integers(1, 30), hints=some_hints)
@settings(max_examples=100)
def test_a_policy_stays_within_capacity_and_the_optimum(
    policy: str, scenario: Scenario, capacity: int, hints: Hints
) -> None:
    outcome = POLICIES[policy].run(scenario, capacity, hints)
    best = POLICIES[BELADY].run(scenario, capacity, hints)
    assert outcome.held_peak <= capacity
    assert outcome.held_mean <= outcome.held_peak
    assert (outcome.hits <= scenario.reusable).all()
    assert outcome.hits.sum() <= best.hits.sum() <= scenario.reusable.sum()


@given(policy=policies, scenario=scenarios(), hints=some_hints)
@settings(max_examples=100)
def test_where_everything_fits_everything_reusable_hits(
    policy: str, scenario: Scenario, hints: Hints
) -> None:
    outcome = POLICIES[policy].run(scenario, scenario.workload.distinct_chunks + 1, hints)
    assert (outcome.hits == scenario.reusable).all()


@given(scenario=scenarios())
@settings(max_examples=60)
def test_more_capacity_never_lowers_the_optimum(scenario: Scenario) -> None:
    rates = [
        belady(scenario.workload, scenario.calls, scenario.next_uses, capacity).hits.sum()
        for capacity in range(0, 30, 2)
    ]
    assert rates == sorted(rates)


class _Watch:
    """Checks the cache after every event, and that running prompts keep what they found."""

    def __init__(self, scenario: Scenario) -> None:
        self._workload = scenario.workload
        self._running: dict[int, int] = {}

    def __call__(self, cache: TreeCache, event: Event) -> None:
        cache.check()
        tip = self._workload.prompt_tip.tolist()
        if event.kind is EventKind.REQUEST:
            self._running[event.item] = cache.held(tip[event.item])
        elif event.kind is EventKind.END:
            del self._running[event.item]
        for call, held in self._running.items():
            assert cache.held(tip[call]) >= held, "what a running request uses was evicted"


class _Contrary(ContextPolicy):
    """The worst that a policy can do: what is used now is worth least."""

    def scores(self, leaves, now):  # type: ignore[no-untyped-def]
        return -self.cache.last_used[leaves]


@given(laid=overlays(), capacity=st.integers(1, 30), hints=some_hints)
@settings(max_examples=100)
def test_what_a_running_request_uses_stays(laid: Overlay, capacity: int, hints: Hints) -> None:
    scenario = Scenario(laid, Pin.CALL)
    run_contexts(scenario, LeafLru, capacity, hints, observe=_Watch(scenario))
    run_contexts(scenario, _Contrary, capacity, hints, observe=_Watch(scenario))


@given(policy=policies, laid=overlays(), capacity=st.integers(1, 30), hints=some_hints)
@settings(max_examples=100)
def test_names_of_sessions_mean_nothing(policy: str, laid: Overlay, capacity: int, hints: Hints) -> None:
    renamed = msgspec.structs.replace(
        laid,
        placed=tuple(
            msgspec.structs.replace(p, session=msgspec.structs.replace(p.session, id=f"other-{9 - i}"))
            for i, p in enumerate(laid.placed)
        ),
    )
    before, after = (POLICIES[policy].run(Scenario(which), capacity, hints) for which in (laid, renamed))
    assert (before.hits == after.hits).all()
    assert before.written == after.written


@given(policy=policies, laid=overlays(), capacity=st.integers(1, 30), hints=some_hints)
@settings(max_examples=30)
def test_the_same_run_ends_the_same(policy: str, laid: Overlay, capacity: int, hints: Hints) -> None:
    first, second = (POLICIES[policy].run(Scenario(laid), capacity, hints) for _ in range(2))
    assert (first.hits == second.hits).all()
    assert (first.held_mean, first.written) == (second.held_mean, second.written)
