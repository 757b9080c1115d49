"""Which KV should lie in which tier, and the moves that bring it there.

What a context is *worth* is how many returns a second a unit of room held for it brings
(:meth:`kvpilot.forecast.waits.Waits.worths`); a run of chunks is worth what all who hold it are together. So the
worth of predecessors is never below that of what follows them, and one order serves every tier: what is worth most
lies on top. From that follow

* **load** (prefetch): what lies below and is worth more than the least that lies above, by a margin; soonest expected
  first over each link, no more than the link moves within ``ahead_s``, so that what is overtaken is simply not in the
  next plan;
* **drop**: what makes way, tail first: at once where a copy is readable below or it is forecast dead, else only after
* **write**, to the tier below: only of what is forecast to be used again (superseded KV and a scan that nobody comes
  back to are never written), and only where it is worth more than what it displaces there.

A demotion is a write and, once the cache layer confirms it, a drop. Nothing is dropped that a running request uses;
no tier is filled beyond its capacity, no tenant beyond its budget.

A decision costs what has changed since the last one, not what there is: O((contexts changed + wishes) · runs of a
context + runs looked at to move), the sort of the latter included, and a look through a few columns of bits, measured
by ``kvpilot bench plan``. Runs that make way together do so in columns, O(n log n) for n of them, of which only the
moves themselves are made one by one; only from the first on that is to be written below first, each is looked at by
itself, as what is written may displace something. :class:`~kvpilot.plan.layout.Layout` has the rest of what is needed
in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from msgspec import Struct

from kvpilot.domain import Tier
from kvpilot.plan.exchange import Ints, Rows, entering, exchange, first_rows, leaving
from kvpilot.plan.holdings import NOTHING, Bools, Holdings
from kvpilot.plan.layout import Layout


class MoveKind(StrEnum):
    LOAD = "load"
    """Copy into a tier from below."""
    WRITE = "write"
    """Copy into the tier below."""
    DROP = "drop"
    """Give up the copy in a tier."""


class Move(Struct, frozen=True, gc=False):
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
_NONE: Ints = np.empty(0, dtype=np.int64)
_PRIORITY_WORTH = 2.0**-30
"""Of a step of priority: below every worth that means something, so that it decides between equals only."""


def plan(
    layout: Layout,
    limits: Sequence[TierLimits],
    now: float,
    settings: PlacementSettings | None = None,
) -> list[Move]:
    """Moves in the order in which to make them: room first, then loads, soonest expected first.

    ``limits`` [tiers]. The same state gives the same moves, however it came about.
    """
    settings = settings or PlacementSettings()
    recount(layout.holdings, limits, now, settings)
    layout.settle({tenant for limit in limits if limit.managed for tenant in limit.budgets})
    planner = _Planner(layout, limits, now, settings)
    for tier, limit in enumerate(limits):
        if limit.managed:
            planner.tier(tier)
    planner.drop_followers()
    return [*planner.drops, *planner.writes, *planner.loads]


def recount(
    holdings: Holdings, limits: Sequence[TierLimits], now: float, settings: PlacementSettings
) -> None:
    """Count contexts with the forecast's worth, corrected by what was announced and what clients wish. O(contexts of
    which something has changed, wishes and announcements)."""
    rows, heard = holdings.to_count(_heard(holdings, limits, settings))
    out, due = holdings.foreseen[rows], holdings.due[rows]
    announced = np.flatnonzero(due > now - settings.overdue_s)
    out[announced] = 1.0 / np.maximum(due[announced] - now, settings.lead_s)
    priority = holdings.priority[rows]
    kept = heard & holdings.kept[rows]
    out[kept] = np.maximum(out[kept], settings.kept_worth)
    counts = np.where(heard, priority, np.minimum(priority, 0))
    out += _PRIORITY_WORTH * (101 + np.clip(counts, -100, 100))
    holdings.count(rows, out)


def _heard(holdings: Holdings, limits: Sequence[TierLimits], settings: PlacementSettings) -> Ints:
    """The contexts whose wishes (kept, a priority above 0) are heard: per tenant, highest priority first, while its
    part of the tiers that are managed has room. O(wishes), and O(wishes · log wishes) for those who wish too much."""
    wishing = holdings.wishes()
    wishing = wishing[holdings.rests_on[wishing] != NOTHING]
    if not len(wishing):
        return _NONE
    runs = holdings.rests_on[wishing]
    sizes, tenants = holdings.chunks[runs], holdings.tenant[runs]
    wished = np.bincount(tenants, weights=sizes)
    capacity = sum(limit.capacity for limit in limits if limit.managed)
    room = settings.kept_share * capacity / np.count_nonzero(np.bincount(tenants))
    heard: Bools = np.ones(len(wishing), dtype=bool)
    for tenant in np.flatnonzero(wished > room).tolist():
        own = np.flatnonzero(tenants == tenant)
        order = own[np.lexsort((wishing[own], -holdings.priority[wishing[own]]))]
        heard[order[np.cumsum(sizes[order]) > room]] = False
    return np.asarray(wishing[heard])


class _Planner:
    """One plan under way. Of what it decides it keeps the books, so that later moves see earlier ones."""

    def __init__(
        self, layout: Layout, limits: Sequence[TierLimits], now: float, settings: PlacementSettings
    ) -> None:
        holdings = layout.holdings
        n = holdings.runs
        self._layout, self._holdings = layout, holdings
        self._values, self._above, self._end = holdings.worth, holdings.above, holdings.end
        self._limits, self._settings, self._now = limits, settings, now
        self._tiers = layout.tiers
        self._busy = np.flatnonzero(layout.busy[:n])
        # Columns of zeros: memory that is not touched costs nothing.
        self._gone = np.zeros((len(limits), n), dtype=np.int64)
        """[tiers, runs] chunks that the drops so far give up."""
        self._copied: Bools = np.zeros(n, dtype=bool)
        """[runs] whether it is copied: it stays where it is copied from."""
        self._copies: list[int] = []
        self._freed: Counter[tuple[int, int]] = Counter()
        """By tier and tenant, chunks that the drops so far give up."""
        self._used = layout.used.copy()
        self._coming = np.zeros(len(limits), dtype=np.int64)
        """[tiers] chunks that the writes so far bring."""
        self._stays: set[tuple[int, int]] = set()
        """(tier, run) of what is in front of what is written."""
        self._dropped: Bools = np.zeros(n, dtype=bool)
        self._cut: list[int] = []
        """Runs of some chunks of which the last copy is dropped."""
        self._link_free = [now] * len(limits)
        self.drops: list[Move] = []
        self.writes: list[Move] = []
        self.loads: list[Move] = []

    def tier(self, tier: int) -> None:
        """Makes room where a budget or the tier itself is exceeded, then exchanges."""
        limit, settings = self._limits[tier], self._settings
        for tenant, budget in limit.budgets.items():
            excess = self._of_tenant(tier, tenant) - budget
            if excess > 0:
                self._make_room(tier, excess, np.inf, "over the tenant's budget", tenant)
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
        most = self._most_loads(tier)
        if not len(rows) or most <= 0:
            return
        margin = self._settings.margin
        room = max(0, self._room(tier, fill_to))
        dearest = float(self._values[rows].max())
        held = self._least(tier, min(most, int(missing.sum())) - room, dearest / (1.0 + margin))
        found = exchange(self._rows(rows, missing), self._rows(*held), room, margin, most)
        room += int(self._used[tier])
        gone = np.array(found.leave, dtype=np.int64).reshape(-1, 2)
        self._leave(tier, held[0][gone[:, 0]], gone[:, 1], "makes way for what returns sooner")
        room -= int(self._used[tier])
        # There may be less room than was exchanged for: what is written below first makes way later.
        self._load(tier, rows, found.enter, min(room, self._room(tier, 1.0)))

    def drop_followers(self) -> None:
        """What lies behind chunks whose last copy was dropped is of no use to anybody."""
        gone = {run for cut in self._cut for run in self._holdings.behind(cut)}
        for run in sorted(gone):
            if self._still(np.array([run]))[0]:
                continue
            for tier, limit in enumerate(self._limits):
                copy = self._copy(tier, run)
                if limit.managed and copy:
                    elsewhere = self._elsewhere(tier, run)
                    self._drop(tier, run, copy, copy, elsewhere, "without its predecessor")

    # ------------------------------------------------------------ who may move

    def _here(self, tier: int, rows: Ints) -> Ints:
        """[n] leading chunks of the runs ``rows`` [n] in the tier, once the drops so far are made."""
        return np.asarray(self._layout.here[tier, rows] - self._gone[tier, rows])

    def _below(self, tier: int, rows: Ints) -> Ints:
        """[n] leading chunks of ``rows`` in lower tiers, likewise."""
        return self._here_in(slice(tier + 1, None), rows)

    def _here_in(self, tiers: slice, rows: Ints) -> Ints:
        here = self._layout.here[tiers, rows] - self._gone[tiers, rows]
        return np.asarray(here.max(axis=0, initial=0))

    def _copy(self, tier: int, run: int) -> int:
        return int(self._layout.here[tier, run] - self._gone[tier, run])

    def _elsewhere(self, tier: int, run: int) -> int:
        return max((self._copy(at, run) for at in range(len(self._limits)) if at != tier), default=0)

    def _rows(self, rows: Ints, chunks: Ints) -> Rows:
        return Rows(self._values[rows], chunks, self._end[rows])

    def _still(self, rows: Ints) -> Bools:
        """[n] what runs or is acted upon. Besides: what is copied stays where it is copied from."""
        running = self._holdings.running[rows] > 0
        return np.asarray(running | self._layout.busy[rows] | self._copied[rows])

    def _loose(self, tier: int, rows: Ints) -> Ints:
        """[n] chunks of ``rows`` that may leave the tier: not in use, not in front of anything that stays."""
        out = self._here(tier, rows)
        out[self._still(rows)] = 0
        stays = np.concatenate((self._busy, np.array(self._copies, dtype=np.int64)))
        stays = stays[self._here(tier, stays) > 0]  # All in front of what runs does so, too.
        while len(stays):
            out[np.isin(rows, stays)] = 0
            above = self._above[stays]
            stays = np.unique(above[above != NOTHING])
        return out

    def _least(self, tier: int, wanted: int, below: float, tenant: int | None = None) -> tuple[Ints, Ints]:
        """Runs, ascending, and their chunks that may leave the tier, of those worth less than ``below`` the ones worth
        least: at least as many as have ``wanted`` chunks together, or all."""
        group = None if tenant is None else self._layout.group(tenant)
        found, left = [_NONE], wanted
        for rows in self._layout.lying(tier).upwards(group) if wanted > 0 else ():
            cheap = self._values[rows] < below
            rows = rows[cheap]
            loose = self._loose(tier, rows)
            found.append(rows[loose > 0])
            left -= int(loose.sum())
            if left <= 0 or not cheap.all():
                break
        rows = np.sort(np.concatenate(found))
        return rows, self._loose(tier, rows)

    def _missing(self, tier: int, most: int) -> tuple[Ints, Ints]:
        """Runs with chunks that could be loaded into the tier, ascending, and how many: all in front of them is there,
        or can be loaded too. Of those worth most as many as have ``most`` chunks together: a plan has no use for more.
        """
        budgets = self._limits[tier].budgets
        left = {tenant: budget - self._of_tenant(tier, tenant) for tenant, budget in budgets.items()}
        full = [self._layout.group(tenant) for tenant, room in left.items() if room <= 0]
        rows, take = _NONE, _FIRST_LOADS
        for batch in self._layout.missing(tier).downwards(np.array(full, dtype=np.int64)) if most > 0 else ():
            dear = self._values[batch] >= self._settings.least_load
            wanted = dear & ~self._layout.busy[batch] & ~self._dropped[batch]
            rows = np.concatenate((rows, batch[wanted]))
            while take < len(rows):
                best = first_rows(-self._values[rows], self._end[rows], take)
                found = self._loadable(tier, rows[best], left)
                if int(found[1].sum()) >= most:
                    return found
                take *= 4
            if not dear.all():
                break
        return self._loadable(tier, rows, left)

    def _loadable(self, tier: int, rows: Ints, left: Mapping[int, int]) -> tuple[Ints, Ints]:
        """Of the given runs those in front of which all is in the tier or among them, within what is ``left`` of their
        tenants' budgets, and their missing chunks."""
        rows = np.sort(rows)
        if not len(rows):
            return rows, rows
        ahead = self._above[rows]
        size = self._holdings.chunks
        comes: Bools = (ahead == NOTHING) | (self._here(tier, ahead) >= size[ahead])
        at = np.minimum(np.searchsorted(rows, ahead), len(rows) - 1)
        below = self._below(tier, rows)
        # One after the other from the front: whoever follows a run that comes whole comes, too.
        whole = below >= size[rows]
        waits = np.flatnonzero(~comes & (rows[at] == ahead) & whole[at])
        while len(waits):
            on = comes[at[waits]]
            if not on.any():
                break
            comes[waits[on]] = True
            waits = waits[~on]
        rows, missing = rows[comes], (below - self._here(tier, rows))[comes]
        for tenant, room in left.items():
            own = np.flatnonzero(self._holdings.tenant[rows] == tenant)
            offered = self._rows(rows[own], missing[own])
            missing[own] = 0
            entrants, chunks = entering(offered, room)
            missing[own[entrants]] = chunks
        return rows[missing > 0], missing[missing > 0]

    def _room(self, tier: int, fill_to: float) -> int:
        return int(fill_to * self._limits[tier].capacity) - int(self._used[tier] + self._coming[tier])

    def _of_tenant(self, tier: int, tenant: int) -> int:
        """Chunks that the tenant has in the tier, once the drops so far are made."""
        used = self._layout.used_by
        return (int(used[tier, tenant]) if tenant < used.shape[1] else 0) - self._freed[tier, tenant]

    # ------------------------------------------------------------ moves

    def _make_room(
        self, tier: int, wanted: int, below: float, reason: str, tenant: int | None = None
    ) -> None:
        rows, loose = self._least(tier, wanted, below, tenant)
        gone, chunks = leaving(self._rows(rows, loose), wanted, below)
        self._leave(tier, rows[gone], chunks, reason)

    def _leave(self, tier: int, runs: Ints, chunks: Ints, reason: str) -> None:
        """Of ``runs`` [n], each once, the last ``chunks`` [n] make way: dropped, or written below first. What comes
        before the first that is to be written goes together, in columns."""
        ends, below = self._here(tier, runs), self._below(tier, runs)
        alive = (below < ends) & (self._values[runs] >= self._settings.least_write)
        sure = int(alive.argmax()) if alive.any() else len(runs)
        self._drop_all(tier, runs[:sure], chunks[:sure], reason)
        lower = range(tier + 1, len(self._limits))
        for run, gone in zip(runs[sure:].tolist(), chunks[sure:].tolist(), strict=True):
            # Looked at one by one, as something below may have made way for what was written.
            end, first = self._copy(tier, run), max((self._copy(to, run) for to in lower), default=0)
            lives = first < end and self._values[run] >= self._settings.least_write
            if lives and any(self._admit(to, run, first, end) for to in lower):
                self._stays_here(run)
                ahead = int(self._above[run])
                while ahead != NOTHING and (tier, ahead) not in self._stays:
                    self._stays.add((tier, ahead))
                    ahead = int(self._above[ahead])
            elif (tier, run) not in self._stays:
                self._drop(tier, run, gone, end, self._elsewhere(tier, run), reason)

    def _admit(self, tier: int, run: int, first: int, end: int) -> bool:
        """Writes chunks of a run into the tier where there is room for them, or something that is worth less."""
        limit, value, size = self._limits[tier], float(self._values[run]), end - first
        tenant = int(self._holdings.tenant[run])
        budget = limit.budgets.get(tenant)
        if budget is not None and self._of_tenant(tier, tenant) + int(self._coming[tier]) + size > budget:
            return False
        short = size - (limit.capacity - int(self._used[tier] + self._coming[tier]))
        if short > 0:
            if not limit.managed or tier + 1 < len(self._limits):
                return False
            below = value / (1.0 + self._settings.margin)
            rows, loose = self._least(tier, short, below)
            if int(loose.sum()) < short:
                return False
            gone, chunks = leaving(self._rows(rows, loose), short, below)
            self._drop_all(tier, rows[gone], chunks, "makes way for what returns sooner")
        self._coming[tier] += size
        self.writes.append(
            Move(MoveKind.WRITE, run, self._tiers[tier], first, end, value, self._now, "may return")
        )
        return True

    def _drop(self, tier: int, run: int, chunks: int, end: int, elsewhere: int, reason: str) -> None:
        """Gives up the last ``chunks`` of the ``end`` that are there; ``elsewhere``: those in other tiers."""
        left = end - chunks
        self._gone[tier, run] += chunks
        self._used[tier] -= chunks
        self._freed[tier, int(self._holdings.tenant[run])] += chunks
        self._dropped[run] = True
        if elsewhere < end:
            self._cut.append(run)
        value = float(self._values[run])
        self.drops.append(Move(MoveKind.DROP, run, self._tiers[tier], left, end, value, self._now, reason))

    def _drop_all(self, tier: int, runs: Ints, chunks: Ints, reason: str) -> None:
        """Gives up the last ``chunks`` [n] of ``runs`` [n], each once, but for those that stay."""
        if self._stays:
            goes = np.array([(tier, run) not in self._stays for run in runs.tolist()], dtype=bool)
            runs, chunks = runs[goes], chunks[goes]
        ends = self._here(tier, runs)
        elsewhere = np.maximum(self._here_in(slice(tier), runs), self._below(tier, runs))
        self._gone[tier, runs] += chunks
        self._used[tier] -= chunks.sum()
        freed = np.bincount(self._holdings.tenant[runs], weights=chunks)
        for tenant in np.flatnonzero(freed).tolist():
            self._freed[tier, tenant] += int(freed[tenant])
        self._dropped[runs] = True
        self._cut += runs[elsewhere < ends].tolist()
        name, now = self._tiers[tier], self._now
        columns = (column.tolist() for column in (runs, ends - chunks, ends, self._values[runs]))
        for run, left, end, value in zip(*columns, strict=True):
            self.drops.append(Move(MoveKind.DROP, run, name, left, end, value, now, reason))

    def _load(self, tier: int, rows: Ints, enter: Sequence[tuple[int, int]], room: int) -> None:
        """Brings of each of ``enter`` (index in ``rows``, chunks) the first that are missing, as far as there is room;
        soonest expected first over each link."""
        runs = rows[[at for at, _ in enter]]
        sources = range(tier + 1, len(self._limits))
        firsts, worths = self._here(tier, runs).tolist(), self._values[runs].tolist()
        copies = [self._here(source, runs).tolist() for source in sources]
        for at, (_, chunks) in enumerate(enter):
            chunks = min(chunks, room)
            if chunks <= 0:
                break
            room -= chunks
            run, first = int(runs[at]), firsts[at]
            end, done, starts = first + chunks, first, []
            for source, copy in zip(sources, copies, strict=True):
                part = min(end, copy[at]) - done
                if part > 0:
                    starts.append(self._link_free[source])
                    self._link_free[source] += part / self._limits[source].read_chunks_per_s
                    done += part
            self._coming[tier] += chunks
            self._stays_here(run)
            self.loads.append(
                Move(
                    MoveKind.LOAD,
                    run,
                    self._tiers[tier],
                    first,
                    end,
                    worths[at],
                    min(starts),
                    "returns soon",
                )
            )

    def _stays_here(self, run: int) -> None:
        self._copied[run] = True
        self._copies.append(run)
