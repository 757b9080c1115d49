"""A picture that was changed step by step is the one that would be made anew: worths, ranks and plans."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpilot.domain import Tier
from kvpilot.plan.holdings import NOTHING, Holdings
from kvpilot.plan.layout import Layout
from kvpilot.plan.placement import Move, MoveKind, TierLimits, plan

TIERS = (Tier.HOST, Tier.DISK)
contexts = st.integers(0, 7)
numbers = st.integers(0, 10_000)


def anew(old: Layout) -> Layout:
    """The same picture, made in one go."""
    known = old.holdings
    holdings = Holdings()
    layout = Layout(holdings, TIERS)
    for run in range(known.runs):
        assert holdings.add(NOTHING, 0, int(known.tenant[run])) == run
    # Predecessors first, also of runs that have no chunks.
    for run in sorted(range(known.runs), key=lambda run: len(list(known.path(run)))):
        holdings.move(run, int(known.above[run]))
        holdings.resize(run, int(known.chunks[run]))
        holdings.expect_arrivals(run, float(known._arrivals[run]))
        layout.mark(run, bool(old.busy[run]))
        for tier in (0, 1):
            layout.lies(run, TIERS[tier], int(old.here[tier, run]))
    for context in range(known.contexts):
        run = int(known.rests_on[context])
        holdings.rest(context, run)
        holdings.wish(context, bool(known.kept[context]), int(known.priority[context]))
        holdings.announce(context, float(known.due[context]))
        holdings.decline(context, bool(known.declines[context]))
        for _ in range(int(known.begun[context])):
            holdings.begin(context)
    holdings.foresee(np.arange(known.contexts), known.foreseen[: known.contexts])
    return layout


class KeepingUp(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.holdings = Holdings()
        self.layout = Layout(self.holdings, TIERS)
        self.there: list[int] = []
        self.now = 1000.0

    def run_of(self, number: int) -> int:
        return self.there[number % len(self.there)]

    # ------------------------------------------------------------ what happens

    @rule(number=numbers, chunks=st.integers(1, 9), tenant=st.integers(0, 2))
    def add(self, number: int, chunks: int, tenant: int) -> None:
        above = [NOTHING, *self.there][number % (len(self.there) + 1)]
        self.there.append(self.holdings.add(above, chunks, tenant))

    @precondition(lambda self: self.there)
    @rule(number=numbers, at=st.integers(0, 9))
    def cut_in_two(self, number: int, at: int) -> None:
        run = self.run_of(number)
        size = int(self.holdings.chunks[run])
        at = min(at, size)
        upper = self.holdings.add(int(self.holdings.above[run]), at, int(self.holdings.tenant[run]))
        self.holdings.move(run, upper)
        self.holdings.resize(run, size - at)
        self.there.append(upper)

    @precondition(lambda self: self.there)
    @rule(number=numbers)
    def join(self, number: int) -> None:
        upper = self.run_of(number)
        behind = list(self.holdings.next_to(upper))
        if len(behind) == 1 and not self.holdings._resting[upper]:
            size = int(self.holdings.chunks[behind[0]] + self.holdings.chunks[upper])
            self.holdings.move(behind[0], int(self.holdings.above[upper]))
            self.holdings.resize(behind[0], size)
            self.remove(number)

    @precondition(lambda self: self.there)
    @rule(number=numbers)
    def remove(self, number: int) -> None:
        run = self.run_of(number)
        if not self.holdings.next_to(run) and not self.holdings._resting[run]:
            self.holdings.remove(run)
            self.there.remove(run)

    @precondition(lambda self: self.there)
    @rule(number=numbers, chunks=st.integers(0, 9))
    def resize(self, number: int, chunks: int) -> None:
        run = self.run_of(number)
        if not self.holdings.next_to(run):
            self.holdings.resize(run, chunks)

    @precondition(lambda self: self.there)
    @rule(number=numbers, tier=st.sampled_from(TIERS), chunks=st.integers(0, 9), busy=st.booleans())
    def lies(self, number: int, tier: Tier, chunks: int, busy: bool) -> None:
        self.layout.lies(self.run_of(number), tier, chunks)
        self.layout.mark(self.run_of(number), busy)

    @precondition(lambda self: self.there)
    @rule(number=numbers, rate=st.floats(0.0, 0.1))
    def begin_with(self, number: int, rate: float) -> None:
        self.holdings.expect_arrivals(self.run_of(number), rate)

    @precondition(lambda self: self.there)
    @rule(context=contexts, number=numbers)
    def rest(self, context: int, number: int) -> None:
        self.holdings.rest(context, self.run_of(number))

    @rule(context=contexts)
    def release(self, context: int) -> None:
        self.holdings.release(context)

    @rule(context=contexts, worth=st.floats(0.0, 300.0) | st.floats(1e-12, 1e-3))
    def foresee(self, context: int, worth: float) -> None:
        self.holdings.foresee(np.array([context]), np.array([worth]))

    @rule(
        context=contexts,
        kept=st.booleans(),
        priority=st.integers(-100, 100),
        due=st.floats(900.0, 1200.0) | st.just(np.nan),
        declines=st.booleans(),
    )
    def say(self, context: int, kept: bool, priority: int, due: float, declines: bool) -> None:
        self.holdings.wish(context, kept, priority)
        self.holdings.announce(context, due)
        self.holdings.decline(context, declines)

    @rule(context=contexts)
    def begin(self, context: int) -> None:
        self.holdings.begin(context)

    @rule(context=contexts)
    def finish(self, context: int) -> None:
        if self.holdings.begun[context]:
            self.holdings.finish(context)

    @rule(context=contexts, number=numbers, chunks=st.integers(1, 9), worth=st.floats(1e-4, 10.0))
    def converse(self, context: int, number: int, chunks: int, worth: float) -> None:
        """What happens most: a context goes on, and lies on disk."""
        self.add(number, chunks, 0)
        self.holdings.rest(context, self.there[-1])
        self.foresee(context, worth)
        for run in self.holdings.path(self.there[-1]):
            self.layout.lies(run, Tier.DISK, 9)

    @rule(
        seconds=st.floats(0.0, 60.0),
        spare=st.integers(-5, 10),
        budget=st.none() | st.integers(0, 30),
        managed=st.booleans(),
    )
    def carry_out(self, seconds: float, spare: int, budget: int | None, managed: bool) -> None:
        self.now += seconds
        for move in self.same_plan(spare, budget, managed):
            self.layout.lies(move.run, move.tier, move.first if move.kind is MoveKind.DROP else move.end)

    def same_plan(self, spare: int, budget: int | None, managed: bool) -> list[Move]:
        limits = [
            TierLimits(
                capacity=max(1, int(self.layout.used[tier]) + spare),
                read_chunks_per_s=20.0,
                managed=managed or tier == 0,
                drop_above=0.9,
                drop_to=0.7,
                budgets={} if budget is None else {0: budget},
            )
            for tier in (0, 1)
        ]
        fresh = anew(self.layout)
        moves = plan(self.layout, limits, self.now)
        assert plan(fresh, limits, self.now) == moves
        n = self.holdings.runs
        for kept_up, new in ((self.layout._lying, fresh._lying), (self.layout._missing, fresh._missing)):
            for tier in kept_up.keys() & new.keys():
                assert (kept_up[tier]._bucket[:n] == new[tier]._bucket[:n]).all()
                assert (kept_up[tier]._counts.sum(axis=0) == new[tier]._counts.sum(axis=0)).all()
        return moves

    # ------------------------------------------------------------ what is always so

    @invariant()
    def plans_are_those_of_a_picture_made_anew(self) -> None:
        self.same_plan(3, None, False)

    @invariant()
    def sums_are_those_of_everything_added_up(self) -> None:
        holdings, n = self.holdings, self.holdings.runs
        worth, holders = holdings._arrivals[:n].copy(), np.zeros(n, dtype=np.int64)
        for context in range(holdings.contexts):
            for run in holdings.path(int(holdings.rests_on[context])):
                worth[run] += holdings._counted[context]
                holders[run] += 1
        for run in range(n):
            for ahead in list(holdings.path(run))[1:]:
                worth[ahead] += holdings._arrivals[run]
        assert (holdings.worth[:n] == worth).all()
        assert (holdings.holders[:n] == holders).all()
        here = self.layout.here[:, :n]
        assert (self.layout.used == here.sum(axis=1)).all()
        for tenant in range(3):
            own = here[:, holdings.tenant[:n] == tenant].sum(axis=1)
            assert (self.layout.used_by[:, tenant] == own).all()


TestKeepingUp = KeepingUp.TestCase
TestKeepingUp.settings = settings(max_examples=30, stateful_step_count=40)
