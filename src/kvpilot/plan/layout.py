"""Where the runs of :class:`~kvpilot.plan.holdings.Holdings` lie, and which of them could move: kept up as it changes.

By tier, how much is there, of whom, and the runs in the order of what they are worth: those that lie there, and those
that lie below and could be brought. A change is O(1) (and makes a run *stale*); before a look, :meth:`Layout.settle`
takes in what has changed, O(stale runs) and one look through a column of bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from kvpilot.domain import Tier
from kvpilot.plan.exchange import Ints
from kvpilot.plan.holdings import NOTHING, Holdings, column_bytes, doubled
from kvpilot.plan.ranks import Ranks

EVERYBODY = 0
"""The group of all who have none of their own."""


class Layout:
    """Several layouts of one holdings may stand side by side, each with tiers of its own."""

    def __init__(self, holdings: Holdings, tiers: Sequence[Tier]) -> None:
        """``tiers``: from fast to slow."""
        self.holdings = holdings
        self.tiers = tuple(tiers)
        self.here = np.zeros((len(self.tiers), 64), dtype=np.int64)
        """[tiers, runs] leading chunks of the run that are readable there."""
        self.busy = np.zeros(64, dtype=bool)
        """An action on the run is under way, or was tried a moment ago: it is left alone."""
        self.used = np.zeros(len(self.tiers), dtype=np.int64)
        """[tiers] chunks there."""
        self.used_by = np.zeros((len(self.tiers), 64), dtype=np.int64)
        """[tiers, tenants] chunks there."""
        self.stale = np.zeros(64, dtype=bool)
        self._whole = np.zeros(64, dtype=bool)
        """Some tier has all of the run."""
        self._groups: dict[int, int] = {}
        """By tenant that has a budget, its group in the ranks."""
        self._lying: dict[int, Ranks] = {}
        self._missing: dict[int, Ranks] = {}
        """By tier, as far as somebody has asked for them."""
        holdings.watch(self)
        for run in range(holdings.runs):
            self.stale[run] = True
            self.resized(run)

    def lies(self, run: int, tier: Tier, chunks: int) -> None:
        """So many leading chunks of the run are readable in ``tier``, as the cache layer says."""
        self._put(self.tiers.index(tier), run, min(chunks, int(self.holdings.chunks[run])))

    def mark(self, run: int, busy: bool) -> None:
        """Whether the run is to be left alone."""
        self.busy[run] = busy

    def settle(self, budgeted: Collection[int] = ()) -> None:
        """Take in what has changed. ``budgeted``: tenants of whom the ranks are asked apart."""
        n = self.holdings.runs
        if set(budgeted) != set(self._groups):
            self._groups = {tenant: number for number, tenant in enumerate(sorted(budgeted), EVERYBODY + 1)}
            self.stale[:n] = True
        rows = np.flatnonzero(self.stale[:n])
        if len(rows):
            self.stale[rows] = False
            for tier, ranks in self._lying.items():
                self._put_lying(ranks, tier, rows)
            for tier, ranks in self._missing.items():
                self._put_missing(ranks, tier, rows)

    def lying(self, tier: int) -> Ranks:
        """The runs that lie there, once it is settled. The first to ask pays for all, O(runs)."""
        if tier not in self._lying:
            self._lying[tier] = Ranks(len(self.stale))
            self._put_lying(self._lying[tier], tier, np.arange(self.holdings.runs))
        return self._lying[tier]

    def missing(self, tier: int) -> Ranks:
        """The runs to bring, likewise: those that lie below with more than is there, but for those that nobody wants
        brought, and those right behind one that is nowhere whole."""
        if tier not in self._missing:
            self._missing[tier] = Ranks(len(self.stale))
            self._put_missing(self._missing[tier], tier, np.arange(self.holdings.runs))
        return self._missing[tier]

    def group(self, tenant: int) -> int:
        """The tenant's group in the ranks, once it is settled."""
        return self._groups.get(tenant, EVERYBODY)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return column_bytes(self)

    def _put_lying(self, ranks: Ranks, tier: int, rows: Ints) -> None:
        ranks.put(rows, self.here[tier, rows], self.holdings.worth[rows], self._groups_of(rows))

    def _put_missing(self, ranks: Ranks, tier: int, rows: Ints) -> None:
        above = self.holdings.above[rows]
        declined, holders = self.holdings.declined[rows], self.holdings.holders[rows]
        wanted = ((declined == 0) | (declined < holders)) & ((above == NOTHING) | self._whole[above])
        missing = self.here[tier + 1 :, rows].max(axis=0, initial=0) - self.here[tier, rows]
        ranks.put(rows, np.where(wanted, missing, 0), self.holdings.worth[rows], self._groups_of(rows))

    def _groups_of(self, rows: Ints) -> Ints:
        out = np.full(len(rows), EVERYBODY)
        for tenant, number in self._groups.items():
            out[self.holdings.tenant[rows] == tenant] = number
        return out

    # ------------------------------------------------------------ told by the holdings

    def grow(self, runs: int) -> None:
        while self.here.shape[1] < runs:
            for name in ("here", "busy", "stale", "_whole"):
                setattr(self, name, doubled(getattr(self, name)))
        for ranks in (*self._lying.values(), *self._missing.values()):
            ranks.grow(runs)

    def resized(self, run: int) -> None:
        chunks = int(self.holdings.chunks[run])
        while self.holdings.tenant[run] >= self.used_by.shape[1]:
            self.used_by = doubled(self.used_by)
        if not chunks:
            self.busy[run] = False
        for tier in range(len(self.tiers)):
            if self.here[tier, run] > chunks:
                self._put(tier, run, chunks)
        self._look_if_whole(run)

    def _put(self, tier: int, run: int, chunks: int) -> None:
        more = chunks - int(self.here[tier, run])
        if more:
            self.here[tier, run] = chunks
            self.used[tier] += more
            self.used_by[tier, self.holdings.tenant[run]] += more
            self.stale[run] = True
            self._look_if_whole(run)

    def _look_if_whole(self, run: int) -> None:
        whole = bool(self.here[:, run].max() >= self.holdings.chunks[run])
        if whole != self._whole[run]:
            self._whole[run] = whole
            self.stale[list(self.holdings.next_to(run))] = True
