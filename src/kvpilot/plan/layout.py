"""Where the runs of :class:`~kvpilot.plan.holdings.Holdings` lie, and which of them could move: kept up as it changes.

By tier, how much is there, of whom, and the runs in the order of what they are worth: those that lie there, and those
that lie below and could be brought. A change is O(1) (and makes a run *stale*); before a look, :meth:`settle` takes in
what has changed, O(stale runs) and one look through a column of bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from kvpilot.domain import Tier
from kvpilot.plan.holdings import NOTHING, Holdings, column_bytes, doubled
from kvpilot.plan.ranks import EVERYBODY, Ranks


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
        self._tenant = np.zeros(64, dtype=np.int64)
        """By run, whose ``used_by`` it is in."""
        self._groups: dict[int, int] = {}
        """By tenant that has a budget, its group in the ranks."""
        self.lying: tuple[Ranks, ...] = tuple(Ranks() for _ in self.tiers)
        """By tier, the runs that lie there."""
        self.missing: tuple[Ranks, ...] = tuple(Ranks() for _ in self.tiers)
        """By tier, the runs to bring: those that lie below with more than is there, but for those that nobody wants
        brought, and those right behind one that is nowhere whole."""
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
        if not len(rows):
            return
        self.stale[rows] = False
        worth = self.holdings.worth[rows]
        group = np.full(len(rows), EVERYBODY)
        for tenant, number in self._groups.items():
            group[self.holdings.tenant[rows] == tenant] = number
        here, above = self.here[:, rows], self.holdings.above[rows]
        declined, holders = self.holdings.declined[rows], self.holdings.holders[rows]
        wanted = ((declined == 0) | (declined < holders)) & ((above == NOTHING) | self._whole[above])
        for tier in range(len(self.tiers)):
            self.lying[tier].put(rows, here[tier], worth, group)
            if tier + 1 < len(self.tiers):
                missing = here[tier + 1 :].max(axis=0) - here[tier]
                self.missing[tier].put(rows, np.where(wanted, missing, 0), worth, group)

    def group(self, tenant: int) -> int:
        """The tenant's group in the ranks, once it is settled."""
        return self._groups.get(tenant, EVERYBODY)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return column_bytes(self)

    # ------------------------------------------------------------ told by the holdings

    def grow(self, runs: int) -> None:
        while self.here.shape[1] < runs:
            for name in ("here", "busy", "stale", "_whole", "_tenant"):
                setattr(self, name, doubled(getattr(self, name)))
        for ranks in (*self.lying, *self.missing):
            ranks.grow(runs)

    def resized(self, run: int) -> None:
        tenant, chunks = int(self.holdings.tenant[run]), int(self.holdings.chunks[run])
        before = int(self._tenant[run])
        while tenant >= self.used_by.shape[1]:
            self.used_by = doubled(self.used_by)
        if tenant != before:
            self.used_by[:, before] -= self.here[:, run]
            self.used_by[:, tenant] += self.here[:, run]
            self._tenant[run] = tenant
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
            self.used_by[tier, self._tenant[run]] += more
            self.stale[run] = True
            self._look_if_whole(run)

    def _look_if_whole(self, run: int) -> None:
        whole = bool(self.here[:, run].max() >= self.holdings.chunks[run])
        if whole != self._whole[run]:
            self._whole[run] = whole
            self.stale[list(self.holdings.next_to(run))] = True
