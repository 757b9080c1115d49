"""What every plan keeps to, whatever contexts share, wherever their KV lies."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.domain import Tier
from kvpilot.plan.holdings import NOTHING, Holdings
from kvpilot.plan.layout import Layout
from kvpilot.plan.placement import Move, MoveKind, PlacementSettings, TierLimits, plan

HOST, DISK = 0, 1
NOW = 1000.0


@dataclass
class World:
    layout: Layout
    limits: list[TierLimits]

    @property
    def holdings(self) -> Holdings:
        return self.layout.holdings

    def plan(self) -> list[Move]:
        return plan(self.layout, self.limits, NOW)

    def expect(self, *worth: float) -> None:
        self.holdings.foresee(np.arange(len(worth)), np.array(worth))

    def carry_out(self, moves: list[Move]) -> None:
        """As a cache layer would: one after the other, each only if it is possible."""
        here = self.layout.here
        for move in moves:
            tier = self.layout.tiers.index(move.tier)
            if move.kind is MoveKind.DROP:
                assert here[tier, move.run] == move.end, "a chunk is dropped in front of others"
                self.layout.lies(move.run, move.tier, move.first)
                continue
            assert here[:, move.run].max() >= move.end, "what is nowhere cannot be copied"
            assert here[tier, move.run] == move.first
            self.layout.lies(move.run, move.tier, move.end)
            assert self.layout.used[tier] <= self.limits[tier].capacity

    def tenant_has(self, tier: int, tenant: int) -> int:
        n = self.holdings.runs
        return int(self.layout.here[tier, :n][self.holdings.tenant[:n] == tenant].sum())


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A few contexts that share runs; what lies in a tier has its predecessors there, and nothing is too full."""
    holdings = Holdings()
    layout = Layout(holdings, (Tier.HOST, Tier.DISK))
    count = draw(st.integers(1, 12))
    whole: list[list[bool]] = []
    for run in range(count):
        above = draw(st.integers(-1, run - 1))
        tenant = int(holdings.tenant[above]) if above != NOTHING else draw(st.integers(0, 1))
        holdings.add(above, draw(st.integers(1, 9)), tenant)
        size = int(holdings.chunks[run])
        whole.append([])
        for tier in (HOST, DISK):
            possible = above == NOTHING or whole[above][tier]
            lies = draw(st.sampled_from((0, 0, size, size, size // 2))) if possible else 0
            layout.lies(run, layout.tiers[tier], lies)
            whole[run].append(lies == size)
    contexts = draw(st.integers(0, 8))
    for context in range(contexts):
        run = draw(st.integers(0, count - 1))
        holdings.rest(context, run)
        holdings.foresee(np.array([context]), np.array([draw(st.floats(1e-9, 4.0))]))
        if draw(st.booleans()) and draw(st.booleans()):
            holdings.begin(context)
        holdings.wish(context, draw(st.booleans()), draw(st.sampled_from((-100, 0, 0, 7))))
        holdings.announce(context, draw(st.sampled_from((np.nan, np.nan, NOW + 4, NOW - 500))))
        if draw(st.integers(0, 4)) == 0:
            layout.mark(run, True)
    spare = draw(st.integers(0, 10)), draw(st.integers(0, 10))
    budgets = {0: draw(st.integers(0, 30))} if draw(st.booleans()) else {}
    limits = [
        TierLimits(
            capacity=int(layout.used[tier]) + spare[tier],
            read_chunks_per_s=draw(st.sampled_from((2.0, 100.0))),
            drop_above=draw(st.sampled_from((0.7, 1.0))),
            drop_to=0.6,
            budgets=budgets,
        )
        for tier in (HOST, DISK)
    ]
    return World(layout, limits)


def readable(layout: Layout) -> bool:
    """Whether each chunk that lies anywhere has all its predecessors somewhere."""
    holdings = layout.holdings
    lies = layout.here.max(axis=0)
    whole = lies >= holdings.chunks
    return all(
        whole[ahead]
        for run in range(holdings.runs)
        if lies[run]
        for ahead in holdings.path(run)
        if ahead != run
    )


@given(worlds())
@settings(max_examples=60)
def test_what_is_running_stays_and_nothing_is_exceeded(world: World) -> None:
    holdings, here = world.holdings, world.layout.here
    before = here[:, : holdings.runs].copy()
    over = {t: world.tenant_has(tier, 0) for tier in (HOST, DISK) for t in (tier,)}
    world.carry_out(world.plan())
    after = here[:, : holdings.runs]
    in_use = holdings.running[: holdings.runs] > 0
    assert (after[:, in_use] >= before[:, in_use]).all()
    for tier in (HOST, DISK):
        budget = world.limits[tier].budgets.get(0)
        if budget is not None:
            assert world.tenant_has(tier, 0) <= max(budget, over[tier])


@given(worlds())
@settings(max_examples=60)
def test_no_chunk_is_kept_without_its_predecessor(world: World) -> None:
    for _ in range(3):
        world.carry_out(world.plan())
        assert readable(world.layout) or world.layout.busy.any()


@given(worlds())
@settings(max_examples=60)
def test_nothing_makes_way_for_what_is_worth_less(world: World) -> None:
    moves = world.plan()
    loads = [move for move in moves if move.kind is MoveKind.LOAD]
    gone = [move for move in moves if move.reason == "makes way for what returns sooner"]
    written = [move for move in moves if move.kind is MoveKind.WRITE]
    for given_up in gone:
        assert any(given_up.worth < brought.worth for brought in loads + written)
    assert all(a.at <= b.at + 1e-9 for a, b in itertools.pairwise(loads))


@given(worlds())
@settings(max_examples=60)
def test_plans_come_to_rest(world: World) -> None:
    world.layout.busy[:] = False
    for _ in range(100):
        moves = world.plan()
        if not moves:
            return
        world.carry_out(moves)
    raise AssertionError("the same KV is moved again and again")


@given(worlds(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_the_same_state_gives_the_same_plan_whatever_contexts_are_called(
    world: World, random: object
) -> None:
    first = world.plan()
    assert world.plan() == first
    holdings, n = world.holdings, world.holdings.contexts
    # Wishes are heard by priority and then by number, so contexts with equal ones are not equal.
    for context in range(n):
        holdings.wish(context, False, min(0, int(holdings.priority[context])))
    first = world.plan()
    new = list(range(n))
    random.shuffle(new)  # type: ignore[attr-defined]
    columns = (holdings.rests_on, holdings.priority, holdings.due, holdings.foreseen, holdings.begun)
    known = [tuple(column[c] for column in columns) for c in range(n)]
    for context in range(n):
        holdings.release(context)
    for context, (run, priority, due, foreseen, begun) in zip(new, known, strict=True):
        holdings.rest(context, int(run))
        holdings.wish(context, False, int(priority))
        holdings.announce(context, float(due))
        holdings.foresee(np.array([context]), np.array([foreseen]))
        for _ in range(int(begun)):
            holdings.begin(context)
    assert world.plan() == first


def contexts(*sizes: int, host: int = 0, capacity: int = 100, **limits: float) -> World:
    """Contexts that share nothing, each wholly on disk, the first ``host`` of them in host memory too."""
    layout = Layout(Holdings(), (Tier.HOST, Tier.DISK))
    for context, size in enumerate(sizes):
        run = layout.holdings.add(NOTHING, size)
        layout.holdings.rest(context, run)
        layout.lies(run, Tier.DISK, size)
        if context < host:
            layout.lies(run, Tier.HOST, size)
    return World(
        layout,
        [TierLimits(capacity, 1000.0, **limits), TierLimits(10_000, 100.0)],  # type: ignore[arg-type]
    )


def said(moves: list[Move]) -> list[tuple[str, int, str, int]]:
    return [(move.kind.value, move.run, move.tier.value, move.chunks) for move in moves]


def test_who_returns_soonest_is_loaded_first_as_the_link_allows() -> None:
    world = contexts(30, 40, 10)
    world.expect(0.1, 1.0, 1e-4)
    moves = world.plan()
    assert said(moves) == [("load", 1, "host", 40), ("load", 0, "host", 30)]
    # 100 chunks a second: the second begins when the first has come.
    assert [round(move.at - NOW, 6) for move in moves] == [0.0, 0.4]


def test_a_load_displaces_only_what_is_worth_less_from_its_tail() -> None:
    world = contexts(60, 40, 50, host=2)
    world.expect(0.5, 0.01, 0.1)
    assert said(world.plan()) == [("drop", 1, "host", 40), ("load", 2, "host", 40)]
    world.expect(0.5, 0.09, 0.1)
    assert world.plan() == []


def test_an_announced_return_is_loaded_when_it_is_near() -> None:
    world = contexts(100, 60, host=1)
    world.expect(0.05, 0.0)
    world.holdings.announce(1, NOW + 100)
    assert world.plan() == []
    world.holdings.announce(1, NOW + 10)
    assert ("load", 1, "host", 60) in said(world.plan())
    world.holdings.announce(1, NOW - 100)
    assert world.plan() == []


def test_room_is_made_from_the_unreferenced_first_and_what_returns_soon_is_spared() -> None:
    world = contexts(30, 30, 30, host=3, drop_above=0.8, drop_to=0.5)
    world.expect(1.0, 0.001, 0.002)
    world.holdings.release(0)
    assert said(world.plan()) == [("drop", 0, "host", 30), ("drop", 1, "host", 10)]
    world.expect(0.0, 1.0, 1.0)
    assert said(world.plan()) == [("drop", 0, "host", 30)]


def test_what_is_forecast_dead_is_never_written_down() -> None:
    world = contexts(85, 5, 10, host=3, drop_above=0.8, drop_to=0.1)
    for run in range(3):
        world.layout.lies(run, Tier.DISK, 0)
    world.expect(0.001, 1e-7, 0.01)
    world.holdings.release(2)
    assert said(world.plan()) == [("drop", 2, "host", 10), ("drop", 1, "host", 5), ("write", 0, "disk", 85)]
    world.carry_out(world.plan())
    # Once it is readable below it makes way above.
    assert said(world.plan()) == [("drop", 0, "host", 75)]


def test_very_many_make_way_at_once_in_the_order_of_what_they_are_worth() -> None:
    """Also when some in the midst of them are to be written first."""
    many = 1200
    world = contexts(*[2] * many, host=many, capacity=2 * many, drop_above=0.9, drop_to=0.5)
    worth = 1e-3 + 1e-6 * np.random.default_rng(1).permutation(many)
    world.expect(*worth)
    unwritten = [int(np.argsort(worth)[at]) for at in (300, 301, 500)]
    for run in unwritten:
        world.layout.lies(run, Tier.DISK, 0)
    first = [int(run) for run in np.argsort(worth)[: many // 2]]
    assert said(world.plan()) == [
        *[("drop", run, "host", 2) for run in first if run not in unwritten],
        *[("write", run, "disk", 2) for run in unwritten],
    ]
    world.carry_out(world.plan())
    assert world.layout.used[HOST] == many + 2 * len(unwritten)


def test_a_scan_of_what_nobody_comes_back_to_flushes_nothing() -> None:
    world = contexts(50, 50, *[50] * 8, host=2)
    world.expect(0.02, 0.02, *[0.015] * 8)
    assert world.plan() == []


def test_shared_chunks_count_for_all_who_hold_them() -> None:
    layout = Layout(Holdings(), (Tier.HOST, Tier.DISK))
    holdings = layout.holdings
    system, alone = holdings.add(NOTHING, 20), holdings.add(NOTHING, 20)
    for run in (system, alone):
        layout.lies(run, Tier.HOST, 20)
        layout.lies(run, Tier.DISK, 20)
    for context in range(3):
        holdings.rest(context, system)
    holdings.rest(3, alone)
    world = World(layout, [TierLimits(50, 1.0, True, 1.0, 0.5, 0.4), TierLimits(99, 1.0)])
    world.expect(0.001, 0.001, 0.001, 0.002)
    assert said(world.plan()) == [("drop", alone, "host", 20)]


def test_a_beginning_that_new_conversations_have_stays_when_nobody_holds_it() -> None:
    world = contexts(30, 30, 30, host=3, drop_above=0.8, drop_to=0.6)
    world.expect(0.0, 0.001, 0.002)
    world.holdings.release(0)
    world.holdings.expect_arrivals(0, 0.01)
    assert said(world.plan()) == [("drop", 1, "host", 30)]


def test_wishes_are_heard_up_to_a_tenants_part_and_are_no_lock() -> None:
    world = contexts(30, 30, 30, host=3, drop_above=0.8, drop_to=0.4)
    world.expect(0.001, 0.002, 0.003)
    world.holdings.wish(0, kept=True)
    assert said(world.plan()) == [("drop", 1, "host", 30), ("drop", 2, "host", 20)]
    world.limits[HOST] = TierLimits(100, 1000.0, drop_above=0.5, drop_to=0.2)
    assert ("drop", 0, "host", 10) in said(world.plan())
    # Two wishes of 30 chunks: half of 100 has room for one, that of the higher priority.
    world.limits[HOST] = TierLimits(100, 1000.0, drop_above=0.8, drop_to=0.6)
    world.limits[DISK] = TierLimits(10_000, 100.0, managed=False)
    world.holdings.wish(1, kept=True, priority=5)
    assert said(world.plan()) == [("drop", 0, "host", 30)]


def test_priority_decides_between_equal_prospects() -> None:
    world = contexts(30, 30, 30, host=3, drop_above=0.8, drop_to=0.6)
    world.holdings.wish(1, priority=-100)
    assert said(world.plan()) == [("drop", 1, "host", 30)]


def test_a_tenant_over_its_budget_makes_way_and_loads_no_more() -> None:
    world = contexts(30, 30, 30, host=2)
    world.expect(0.1, 0.2, 0.3)
    world.limits[HOST] = TierLimits(1000, 1000.0, budgets={0: 50})
    assert said(world.plan()) == [("drop", 0, "host", 10)]


def test_what_one_conversation_does_not_want_brought_is_brought_for_others() -> None:
    layout = Layout(Holdings(), (Tier.HOST, Tier.DISK))
    holdings = layout.holdings
    system = holdings.add(NOTHING, 20)
    own, others = holdings.add(system, 20), holdings.add(system, 20)
    for context, run in enumerate((own, others)):
        holdings.rest(context, run)
    for run in (system, own, others):
        layout.lies(run, Tier.DISK, 20)
    world = World(layout, [TierLimits(100, 1.0, fill_to=0.9), TierLimits(999, 1000.0)])
    world.expect(1.0, 1.0)
    holdings.decline(0, True)
    assert said(world.plan()) == [("load", system, "host", 20), ("load", others, "host", 20)]
    holdings.decline(1, True)
    assert world.plan() == []
    holdings.release(1)
    holdings.decline(0, False)
    assert said(world.plan()) == [("load", system, "host", 20), ("load", own, "host", 20)]


def test_what_lies_behind_a_hole_is_not_brought() -> None:
    layout = Layout(Holdings(), (Tier.HOST, Tier.DISK))
    system = layout.holdings.add(NOTHING, 20)
    own = layout.holdings.add(system, 20)
    layout.holdings.rest(0, own)
    layout.lies(own, Tier.DISK, 20)
    layout.lies(system, Tier.DISK, 19)
    world = World(layout, [TierLimits(100, 1.0), TierLimits(999, 1000.0)])
    world.expect(1.0)
    assert said(world.plan()) == [("load", system, "host", 19)]
    layout.lies(system, Tier.DISK, 20)
    assert said(world.plan()) == [("load", system, "host", 20), ("load", own, "host", 20)]


def test_default_settings_agree_with_each_other() -> None:
    s = PlacementSettings()
    assert s.least_write < s.least_load < s.kept_worth < s.spared
