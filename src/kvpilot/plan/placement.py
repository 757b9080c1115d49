"""Which KV should lie in which tier, and the moves that bring it there.

What a context is *worth* is how many returns a second a unit of room held for it brings
(:meth:`kvpilot.forecast.waits.Waits.worths`); a run of chunks is worth what all who hold it are together. So the
worth of predecessors is never below that of what follows them, and one order serves every tier: what is worth most
lies on top. From that follow

* **load** (prefetch): what lies below and is worth more than the least that lies above, by a margin; soonest expected
  first over each link, no more than the link moves within ``ahead_s``, so that what is overtaken is simply not in the
  next plan (:func:`overtaken` names loads under way that are not worth their room any more);
* **drop**: what makes way, tail first: at once where a copy is readable below or it is forecast dead, else only after
* **write**, to the tier below: only of what is forecast to be used again (superseded KV and a scan that nobody comes
  back to are never written), and only where it is worth more than what it displaces there.

A demotion is a write and, once the cache layer confirms it, a drop. Nothing is dropped that a running request uses;
no tier is filled beyond its capacity, no tenant beyond its budget. O(runs · depth + moves · log moves) with arrays,
measured by ``kvpilot bench plan``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from kvpilot.domain import Tier
from kvpilot.plan.exchange import Floats, Ints, Rows, entering, exchange, first_rows, leaving
from kvpilot.plan.holdings import NOTHING, Bools, Holdings


class MoveKind(StrEnum):
    LOAD = "load"
    """Copy into a tier from below."""
    WRITE = "write"
    """Copy into the tier below."""
    DROP = "drop"
    """Give up the copy in a tier."""


@dataclass(frozen=True, slots=True)
class Move:
    """Chunks [``first``, ``end``) of a run, into ``tier`` (load, write) or out of it (drop)."""

    kind: MoveKind
    run: int
    tier: Tier
    first: int
    end: int
    worth: float
    at: float
    """When the link gets to it, unix seconds."""
    reason: str

    @property
    def chunks(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class TierLimits:
    """One tier, in chunks. Shares are of ``capacity``."""

    capacity: int
    read_chunks_per_s: float
    """Of the link that what lies here is read over."""
    managed: bool = True
    """Whether moves into and out of it are ours to make; else it is only observed."""
    fill_to: float = 1.0
    """Loads fill it so far. Below the share at which the cache layer's own eviction begins."""
    drop_above: float = 1.0
    """From here on room is made …"""
    drop_to: float = 1.0
    """… so far."""
    budgets: Mapping[int, int] = field(default_factory=dict)
    """By tenant, the most chunks it may have here; who is not named may have all."""


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """Worths are returns per second."""

    margin: float = 0.2
    """How much more a load must be worth than what it displaces."""
    ahead_s: float = 2.0
    """Loads are started for what a link moves in this time."""
    least_load: float = 1 / 600
    """What is worth less is not loaded, even into free room."""
    least_write: float = 1e-5
    """What is worth less is forecast dead: it is dropped without a copy."""
    spared: float = 0.5 / 30
    """What is worth more is not dropped for room alone: moving it would only move the miss."""
    kept_worth: float = 0.4 / 30
    """The least worth of a context that a client wants kept, while that wish is heard."""
    kept_share: float = 0.5
    """Share of a tier within which such wishes are heard, in equal parts for the tenants who have any."""
    lead_s: float = 1.0
    """How exactly an announced return is taken: one due in d seconds is worth 1 ÷ max(d, ``lead_s``)."""
    overdue_s: float = 60.0
    """An announcement that is over for so long is not believed any more."""


_FIRST_LOADS = 256
"""Runs looked at first for what to load: more than a link moves in the time that is planned for."""
_PRIORITY_WORTH = 2.0**-30
"""Of a step of priority: below every worth that means something, so that it decides between equals only."""


def plan(
    holdings: Holdings,
    worth: Floats,
    limits: Sequence[TierLimits],
    now: float,
    settings: PlacementSettings | None = None,
) -> list[Move]:
    """Moves in the order in which to make them: room first, then loads, soonest expected first.

    ``worth`` [contexts or fewer] by context; ``limits`` [tiers]. The same state gives the same moves.
    """
    settings = settings or PlacementSettings()
    values = holdings.joined(context_worths(holdings, worth, limits, now, settings))
    planner = _Planner(holdings, values, limits, now, settings)
    for tier, limit in enumerate(limits):
        if limit.managed:
            planner.tier(tier)
    planner.drop_followers()
    return [*planner.drops, *planner.writes, *planner.loads]


def context_worths(
    holdings: Holdings, worth: Floats, limits: Sequence[TierLimits], now: float, settings: PlacementSettings
) -> Floats:
    """By context [contexts]: the forecast's worth, corrected by what was announced and what clients wish."""
    n = holdings.contexts
    out = np.zeros(n)
    out[: min(n, len(worth))] = worth[:n]
    announced = np.flatnonzero(holdings.due[:n] > now - settings.overdue_s)
    out[announced] = 1.0 / np.maximum(holdings.due[announced] - now, settings.lead_s)
    heard = _heard(holdings, limits, settings)
    kept = heard[holdings.kept[heard]]
    out[kept] = np.maximum(out[kept], settings.kept_worth)
    out += 101 * _PRIORITY_WORTH
    low = np.flatnonzero(holdings.priority[:n] < 0)
    out[low] += _PRIORITY_WORTH * np.maximum(holdings.priority[low], -100)
    high = heard[holdings.priority[heard] > 0]
    out[high] += _PRIORITY_WORTH * np.minimum(holdings.priority[high], 100)
    return out


def overtaken(holdings: Holdings, values: Floats, tier: int, limit: TierLimits, margin: float) -> list[int]:
    """Busy runs whose load into a tier should be given up: nobody holds them, or the room they need is taken by what
    is worth more. ``values``: worth by run [runs]."""
    n = holdings.runs
    here = holdings.here[tier, :n]
    loading = np.flatnonzero(holdings.busy[:n] & (here < holdings.chunks[:n]))
    if not len(loading):
        return []
    full = int(here.sum()) >= int(limit.fill_to * limit.capacity)
    loose = (here > 0) & ~holdings.busy[:n] & (holdings.running[:n] == 0)
    least = float(values[loose].min(initial=np.inf)) if full else 0.0
    return [int(run) for run in loading if values[run] == 0.0 or values[run] * (1.0 + margin) < least]


def _heard(holdings: Holdings, limits: Sequence[TierLimits], settings: PlacementSettings) -> Ints:
    """The contexts whose wishes (kept, a priority above 0) are heard: per tenant, highest priority first, while its
    part of the tiers that are managed has room. O(contexts), and O(wishes · log wishes) for those who wish too much."""
    n = holdings.contexts
    rests = holdings.rests_on[:n]
    wishing = np.flatnonzero((holdings.kept[:n] | (holdings.priority[:n] > 0)) & (rests != NOTHING))
    if not len(wishing):
        return wishing
    runs = rests[wishing]
    sizes, tenants = holdings.chunks[runs], holdings.tenant[runs]
    wished = np.bincount(tenants, weights=sizes)
    capacity = sum(limit.capacity for limit in limits if limit.managed)
    room = settings.kept_share * capacity / np.count_nonzero(np.bincount(tenants))
    too_much = wished[tenants] > room
    heard = [wishing[~too_much]]
    for tenant in np.unique(tenants[too_much]).tolist():
        own = np.flatnonzero(tenants == tenant)
        order = own[np.lexsort((wishing[own], -holdings.priority[wishing[own]]))]
        heard.append(wishing[order[np.cumsum(sizes[order]) <= room]])
    return np.concatenate(heard)


class _Planner:
    """One plan under way. Of what it decides it keeps the books, so that later moves see earlier ones."""

    def __init__(
        self,
        holdings: Holdings,
        values: Floats,
        limits: Sequence[TierLimits],
        now: float,
        settings: PlacementSettings,
    ) -> None:
        n = holdings.runs
        self._holdings = holdings
        self._values, self._limits, self._settings, self._now = values, limits, settings, now
        self._tiers = holdings.tiers
        self._above, self._depth, self._chunks = holdings.above[:n], holdings.depth[:n], holdings.chunks[:n]
        self._tenant = holdings.tenant[:n]
        # Besides what runs: what is copied stays where it is copied from.
        self._still = (holdings.running[:n] > 0) | holdings.busy[:n]
        self._busy = holdings.busy[:n]
        self._here = holdings.here[:, :n].copy()
        """[tiers, runs] once the drops so far are made."""
        self._used = self._here.sum(axis=1)
        self._coming = np.zeros(len(limits), dtype=np.int64)
        """[tiers] chunks that the writes so far bring."""
        self._written: dict[tuple[int, int], int] = {}
        """(tier, run) → chunks that leave it once they are written below."""
        self._stays: set[tuple[int, int]] = set()
        """(tier, run) of what is in front of these."""
        self._dropped: Bools = np.zeros(n, dtype=bool)
        self._cut: Bools = np.zeros(n, dtype=bool)
        """[runs] whether the last copy of some of its chunks is dropped."""
        self._link_free = [now] * len(limits)
        self.drops: list[Move] = []
        self.writes: list[Move] = []
        self.loads: list[Move] = []

    def tier(self, tier: int) -> None:
        """Makes room where a budget or the tier itself is exceeded, then exchanges."""
        limit, settings = self._limits[tier], self._settings
        for tenant, budget in limit.budgets.items():
            excess = int(self._here[tier][self._tenant == tenant].sum()) - budget
            if excess > 0:
                self._make_room(tier, excess, np.inf, "over the tenant's budget", self._tenant == tenant)
        surplus = int(self._used[tier]) - int(limit.drop_to * limit.capacity)
        if self._used[tier] > limit.drop_above * limit.capacity:
            self._make_room(tier, surplus, settings.spared, "the tier fills up")
        if tier + 1 == len(self._limits):
            return
        rows, missing = self._missing(tier, self._most_loads(tier))
        soon = self._values[rows] >= settings.spared
        self._exchange(tier, rows[soon], missing[soon], limit.fill_to)
        # What may be dropped for room again is not loaded into room that is kept free.
        self._exchange(tier, rows[~soon], missing[~soon], min(limit.fill_to, limit.drop_to))

    def _most_loads(self, tier: int) -> int:
        """Chunks that the links below still move within the time that loads are started for."""
        speed = max(below.read_chunks_per_s for below in self._limits[tier + 1 :])
        return int(speed * self._settings.ahead_s) - sum(move.chunks for move in self.loads)

    def _exchange(self, tier: int, rows: Ints, missing: Ints, fill_to: float) -> None:
        if not len(rows):
            return
        most = self._most_loads(tier)
        wanting = Rows(self._values[rows], missing, self._depth[rows])
        held = Rows(self._values, self._loose(tier), self._depth)
        room = max(0, self._room(tier, fill_to)) + int(self._used[tier])
        found = exchange(wanting, held, room - int(self._used[tier]), self._settings.margin, most)
        for run, chunks in found.leave:
            self._leave(tier, run, chunks, "makes way for what returns sooner")
        room -= int(self._used[tier])
        room = min(room, self._room(tier, 1.0))
        for row, chunks in found.enter:
            # There may be less room than was exchanged for: what is written below first makes way later.
            chunks = min(chunks, room)
            if chunks <= 0:
                break
            room -= chunks
            self._load(tier, int(rows[row]), chunks)

    def drop_followers(self) -> None:
        """What lies behind chunks whose last copy was dropped is of no use to anybody."""
        if not self._cut.any():
            return
        gone = np.zeros_like(self._cut)
        for rows in reversed(self._holdings.levels()):
            above = self._above[rows]
            gone[rows] = gone[above] | self._cut[above]
        for run in np.flatnonzero(gone & ~self._still).tolist():
            for tier, limit in enumerate(self._limits):
                copy = int(self._here[tier, run])
                if limit.managed and copy:
                    self._drop(tier, run, copy, "without its predecessor")

    # ------------------------------------------------------------ who may move

    def _loose(self, tier: int) -> Ints:
        """[runs] chunks that may leave the tier: not in use, not in front of anything that stays."""
        out: Ints = self._here[tier].copy()
        stuck = np.flatnonzero(self._still & (out > 0))
        while len(stuck):
            out[stuck] = 0
            above = self._above[stuck]
            stuck = np.unique(above[above != NOTHING])
        for (at, run), chunks in self._written.items():
            if at == tier:
                out[run] -= min(chunks, int(out[run]))
        return out

    def _missing(self, tier: int, most: int) -> tuple[Ints, Ints]:
        """Runs with chunks that could be loaded into the tier, ascending, and how many: all in front of them is there,
        or can be loaded too. Of those worth most as many as have ``most`` chunks together: a plan has no use for more.
        """
        here = self._here[tier]
        below = self._here[tier + 1 :].max(axis=0, initial=0)
        wanted = (below > here) & (self._values >= self._settings.least_load) & ~self._busy & ~self._dropped
        rows = np.flatnonzero(wanted)
        take = _FIRST_LOADS
        while True:
            best = rows
            if take < len(rows):
                best = rows[first_rows(-self._values[rows], self._depth[rows], take)]
            found, missing = self._loadable(tier, best, below)
            if len(best) == len(rows) or int(missing.sum()) >= most:
                return found, missing
            take *= 4

    def _loadable(self, tier: int, rows: Ints, below: Ints) -> tuple[Ints, Ints]:
        """Of the given runs those in front of which all is in the tier or among them, within their tenants' budgets,
        and their missing chunks. ``below`` [runs]: chunks there are in lower tiers."""
        here = self._here[tier]
        rows = np.sort(rows)
        ahead = self._above[rows]
        comes: Bools = (ahead == NOTHING) | (here[ahead] >= self._chunks[ahead])
        at = np.searchsorted(rows, ahead)
        among = (ahead != NOTHING) & (rows[np.minimum(at, len(rows) - 1)] == ahead) if len(rows) else comes
        depths = self._depth[rows]
        for depth in np.flatnonzero(np.bincount(depths))[1:].tolist():
            level = np.flatnonzero((depths == depth) & among)
            front = at[level]
            comes[level] |= comes[front] & (below[rows[front]] >= self._chunks[rows[front]])
        rows = rows[comes]
        missing = below[rows] - here[rows]
        for tenant, budget in self._limits[tier].budgets.items():
            own = np.flatnonzero(self._tenant[rows] == tenant)
            left = budget - int(here[self._tenant == tenant].sum())
            offered = Rows(self._values[rows[own]], missing[own], self._depth[rows[own]])
            missing[own] = 0
            for row, chunks in entering(offered, left):
                missing[own[row]] = chunks
        return rows[missing > 0], missing[missing > 0]

    def _room(self, tier: int, fill_to: float) -> int:
        return int(fill_to * self._limits[tier].capacity) - int(self._used[tier] + self._coming[tier])

    # ------------------------------------------------------------ moves

    def _make_room(
        self, tier: int, wanted: int, below: float, reason: str, among: Bools | None = None
    ) -> None:
        loose = self._loose(tier)
        if among is not None:
            loose = np.where(among, loose, 0)
        for run, chunks in leaving(Rows(self._values, loose, self._depth), wanted, below):
            self._leave(tier, run, chunks, reason)

    def _leave(self, tier: int, run: int, chunks: int, reason: str) -> None:
        """The last ``chunks`` of the run make way: dropped, or written below first."""
        end = int(self._here[tier, run])
        below = int(self._here[tier + 1 :, run].max(initial=0))
        alive = below < end and self._values[run] >= self._settings.least_write
        if alive and any(self._admit(to, run, below, end) for to in range(tier + 1, len(self._limits))):
            self._written[tier, run] = chunks
            self._still[run] = True
            ahead = int(self._above[run])
            while ahead != NOTHING and (tier, ahead) not in self._stays:
                self._stays.add((tier, ahead))
                ahead = int(self._above[ahead])
        elif (tier, run) not in self._stays:
            self._drop(tier, run, chunks, reason)

    def _admit(self, tier: int, run: int, first: int, end: int) -> bool:
        """Writes chunks of a run into the tier where there is room for them, or something that is worth less."""
        limit, value, size = self._limits[tier], float(self._values[run]), end - first
        budget = limit.budgets.get(int(self._tenant[run]))
        if budget is not None:
            own = self._tenant == self._tenant[run]
            if int(self._here[tier][own].sum()) + int(self._coming[tier]) + size > budget:
                return False
        short = size - (limit.capacity - int(self._used[tier] + self._coming[tier]))
        if short > 0:
            if not limit.managed or tier + 1 < len(self._limits):
                return False
            victims = Rows(self._values, self._loose(tier), self._depth)
            givers = leaving(victims, short, value / (1.0 + self._settings.margin))
            if sum(chunks for _, chunks in givers) < short:
                return False
            for giver, chunks in givers:
                self._drop(tier, giver, chunks, "makes way for what returns sooner")
        self._coming[tier] += size
        self.writes.append(
            Move(MoveKind.WRITE, run, self._tiers[tier], first, end, value, self._now, "may return")
        )
        return True

    def _drop(self, tier: int, run: int, chunks: int, reason: str) -> None:
        end = int(self._here[tier, run])
        self._here[tier, run] = end - chunks
        self._used[tier] -= chunks
        self._dropped[run] = True
        self._cut[run] |= int(self._here[:, run].max()) < end
        value = float(self._values[run])
        self.drops.append(
            Move(MoveKind.DROP, run, self._tiers[tier], end - chunks, end, value, self._now, reason)
        )

    def _load(self, tier: int, run: int, chunks: int) -> None:
        first, worth = int(self._here[tier, run]), float(self._values[run])
        end, done = first + chunks, first
        starts = []
        for source in range(tier + 1, len(self._limits)):
            part = min(end, int(self._here[source, run])) - done
            if part > 0:
                starts.append(self._link_free[source])
                self._link_free[source] += part / self._limits[source].read_chunks_per_s
                done += part
        self._coming[tier] += chunks
        self._still[run] = True
        self.loads.append(
            Move(MoveKind.LOAD, run, self._tiers[tier], first, end, worth, min(starts), "returns soon")
        )
