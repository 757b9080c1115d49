"""What the planner makes of what it sees (:mod:`kvpilot.coordinator.picture`): moves as decisions.

Host memory is placed by :mod:`kvpilot.plan.placement`, by the worths of the forecasts. The disk is only observed: the
cache layer copies to it and evicts from it by itself. So whatever leaves host memory is *demoted*: dropped once the
cache layer has confirmed it on disk, whether the plan took it for dead or not.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from kvpilot.coordinator.actions import Work
from kvpilot.coordinator.picture import HOST, Picture
from kvpilot.coordinator.pool_picture import PoolPicture
from kvpilot.coordinator.service import CoordinatorService
from kvpilot.domain import ActionKind, Tier, TierUsage
from kvpilot.plan.exchange import Floats, Ints
from kvpilot.plan.placement import Move, MoveKind, PlacementSettings, TierLimits, plan

UNBOUNDED = 2**62


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Shares are of host capacity. LMCache's own eviction starts at 0.8 by default: stay below it."""

    demote_above: float = 0.72
    demote_to: float = 0.60
    prefetch_up_to: float = 0.72
    load_bytes_per_s: float = 500e6
    """Disk bandwidth assumed for a load until measured."""
    budgets: Mapping[str, float] = field(default_factory=dict)
    """Tenant → share of host memory that its contexts may fill at most."""
    device_up_to: float = 0.9
    """Of the engine's own pool: the rest is left to what running requests add."""
    device_bytes_per_s: float = 500e6
    """At which contexts are brought there beside running requests."""
    placement: PlacementSettings = field(default_factory=PlacementSettings)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a conversation's KV, or (``owner`` None) with what several share or nobody holds.

    ``work``: the chunks it is about; for a prefetch all up to the last that is to be brought. ``chunks``: how many of
    them move. ``group``: all who hold them. ``worth``: of the dearest of them, returns per second.
    """

    kind: ActionKind
    owner: str | None
    work: Work
    chunks: int
    reason: str
    at: float
    worth: float
    group: frozenset[str] = frozenset()
    tier: Tier = Tier.HOST
    """Into which it is brought, or which it leaves."""


class Placing:
    """Follows a service, and says what to do. :meth:`close` it when nobody asks any more."""

    def __init__(self, service: CoordinatorService, settings: PlannerSettings) -> None:
        self._service = service
        self._settings = settings
        self._picture = Picture(service)
        self._pool: PoolPicture | None = None
        self._now = 0.0

    def close(self) -> None:
        self._picture.close()

    # ------------------------------------------------------------ what is asked of it

    def look(self, recent: Collection[str] = ()) -> None:
        """Take in what has happened. ``recent``: conversations acted upon a moment ago, which are left alone."""
        self._now = self._service.clock()
        self._picture.settle(self._now, recent)

    def decisions(self, chunk_bytes: int) -> list[Decision]:
        """In the order in which to carry them out: room first, then prefetches, soonest expected first. Empty while it
        is not known how large host memory or a chunk is (``chunk_bytes`` 0)."""
        host, picture = usage_of(self._service, Tier.HOST), self._picture
        if host.capacity_bytes <= 0 or chunk_bytes <= 0:
            return []
        capacity = host.capacity_bytes // chunk_bytes
        used = host.used_bytes // chunk_bytes
        out: list[Decision] = []
        over = used + picture.arriving > self._settings.demote_above * capacity
        if over:
            surplus = used + picture.arriving - int(self._settings.demote_to * capacity)
            out = self._orphans(surplus)
            used -= sum(decision.chunks for decision in out)
        limits = self._limits(capacity, used, chunk_bytes, over=over)
        moves = plan(picture.layout, limits, self._now, self._settings.placement)
        loads = [move for move in moves if move.kind is MoveKind.LOAD]
        out += [*self._demotions(moves), *self._prefetches(loads)]
        device = self._service.device
        if device.prefetches and device.pool_tokens > 0:
            out += self._on_device(chunk_bytes)
        return out

    def _on_device(self, chunk_bytes: int) -> list[Decision]:
        """The same plan one tier higher: what lies in host memory and returns soon goes into the engine's pool. There
        nothing is dropped to make room, the engine reuses what it needs by itself."""
        service = self._service
        if self._pool is None:
            self._pool = PoolPicture(service, self._picture)
        ends = self._pool.look()
        # What no run has takes room, too: prompts under way, and the contexts' ends, which fill no chunk.
        others = service.mapper.coming() + ends
        pool = TierLimits(
            capacity=max(0, service.device.pool_tokens - others) // service.backend.chunk_size,
            read_chunks_per_s=UNBOUNDED,
            fill_to=self._settings.device_up_to,
        )
        speed = self._settings.device_bytes_per_s / chunk_bytes
        limits = [pool, TierLimits(capacity=UNBOUNDED, read_chunks_per_s=speed, managed=False)]
        placement = self._settings.placement
        moves = plan(self._pool.layout, limits, self._now, replace(placement, least_load=placement.spared))
        loads = [move for move in moves if move.kind is MoveKind.LOAD]
        if not loads:  # Room without anybody to take it is of no use there.
            return []
        return [*self._demotions(moves, Tier.DEVICE), *self._prefetches(loads, Tier.DEVICE)]

    def ranking(self) -> Ranking:
        """The conversations that could be demoted, in the order of what their own room is worth."""
        contexts, worths = self._picture.leaving()
        return Ranking(self._picture, contexts, worths)

    def _limits(self, capacity: int, used: int, chunk_bytes: int, *, over: bool) -> list[TierLimits]:
        # What is in host memory besides the runs (behind holes, or being loaded) takes its part of every share.
        picture = self._picture
        others = max(0, used - int(picture.layout.used[HOST])) + picture.arriving

        def share(of_capacity: float) -> float:
            return max(0.0, of_capacity - others / capacity)

        down = share(self._settings.demote_to)
        host = TierLimits(
            capacity=capacity,
            read_chunks_per_s=UNBOUNDED,
            fill_to=share(self._settings.prefetch_up_to),
            drop_above=down if over else 1.0,
            drop_to=down,
            budgets={
                number: int(self._settings.budgets[tenant] * capacity)
                for tenant, number in picture.tenants.items()
                if tenant in self._settings.budgets
            },
        )
        speed = self._settings.load_bytes_per_s / chunk_bytes
        return [host, TierLimits(capacity=UNBOUNDED, read_chunks_per_s=speed, managed=False)]

    # ------------------------------------------------------------ decisions

    def _orphans(self, surplus: int) -> list[Decision]:
        """What no live context holds goes first."""
        out = []
        for space, chunks in self._picture.orphans.items():
            taken = tuple(itertools.islice(chunks, max(0, surplus)))
            surplus -= len(taken)
            if taken:
                reason = "host memory fills up; referenced by nobody"
                work = Work(space, taken)
                out.append(Decision(ActionKind.DEMOTE, None, work, len(taken), reason, self._now, 0.0))
        return out

    def _demotions(self, moves: list[Move], tier: Tier = Tier.HOST) -> list[Decision]:
        """What leaves the tier: of each conversation in one piece, of what several share by run."""
        picture = self._picture
        gone: dict[int, tuple[int, int, str, float]] = {}
        for move in moves:
            if move.kind is MoveKind.DROP and move.tier is tier:
                first, end, reason, worth = gone.get(
                    move.run, (move.first, move.end, move.reason, move.worth)
                )
                gone[move.run] = (min(first, move.first), max(end, move.end), reason, worth)
        parts: dict[str | int, list[int]] = {}
        for row in gone:
            holders = self._picture.holders(row)
            parts.setdefault(next(iter(holders)) if len(holders) == 1 else row, []).append(row)
        out = []
        for rows in parts.values():
            rows.sort(key=lambda row: int(picture.holdings.end[row]))
            holders = picture.holders(rows[0])
            owner = next(iter(holders)) if len(holders) == 1 else None
            chunks = tuple(c for row in rows for c in picture.chunks(row)[gone[row][0] : gone[row][1]])
            work = Work(picture.space(rows[0]), chunks, owner)
            reason, worth = gone[rows[0]][2], max(gone[row][3] for row in rows)
            out.append(
                Decision(
                    *(ActionKind.DEMOTE, owner, work, len(chunks), reason, self._now, worth),
                    group=frozenset(holders),
                    tier=tier,
                )
            )
        return out

    def _prefetches(self, loads: list[Move], tier: Tier = Tier.HOST) -> list[Decision]:
        """For each run the head of one context up to its end; runs on one context's way are one prefetch."""
        out: dict[str, Decision] = {}
        picture = self._picture
        deepest = sorted(range(len(loads)), key=lambda at: -int(picture.holdings.end[loads[at].run]))
        covered: dict[int, str] = {}
        for at in deepest:
            move = loads[at]
            owner = covered.get(move.run) or self._dearest(move.run)
            if owner is None:
                continue
            for row in picture.holdings.path(move.run):
                covered.setdefault(row, owner)
            before = out.get(owner)
            if before is None:
                end = int(picture.holdings.end[move.run] - picture.holdings.chunks[move.run]) + move.end
                head = tuple(self._service.references.chunks(owner)[:end])
                work = Work(picture.space(move.run), head, owner)
                reason = "into the device pool: " * (tier is Tier.DEVICE) + move.reason
                out[owner] = Decision(
                    *(ActionKind.PREFETCH, owner, work, move.chunks, reason, move.at, move.worth), tier=tier
                )
            else:
                out[owner] = replace(
                    before,
                    chunks=before.chunks + move.chunks,
                    at=min(before.at, move.at),
                    worth=max(before.worth, move.worth),
                )
        return sorted(out.values(), key=lambda decision: (decision.at, -decision.worth, decision.owner or ""))

    def _dearest(self, row: int) -> str | None:
        """Of those who hold the run, whoever's own return is worth most."""
        holders = sorted(self._picture.holders(row))
        return max(holders, key=lambda o: self._service.forecasts.worth(o, self._now), default=None)


class Ranking:
    """Conversations [n] by what their own room is worth, least first."""

    def __init__(self, picture: Picture, contexts: Ints, worths: Floats) -> None:
        self._picture, self._contexts, self._worths = picture, contexts, worths

    def place(self, owner: str) -> tuple[int, int] | None:
        """Its rank (1: goes first) and of how many; None for one that could not go."""
        context = self._picture.context(owner)
        at = np.flatnonzero(self._contexts == (-1 if context is None else context))
        if context is None or not len(at):
            return None
        own = self._worths[at[0]]
        before = (self._worths < own) | ((self._worths == own) & (self._contexts < context))
        return 1 + int(np.count_nonzero(before)), len(self._contexts)

    def first(self, without: Collection[str]) -> tuple[float, str] | None:
        """Worth and name of who would go first but for these."""
        gone = [context for owner in without if (context := self._picture.context(owner)) is not None]
        left = np.flatnonzero(~np.isin(self._contexts, gone))
        if not len(left):
            return None
        at = left[np.lexsort((self._contexts[left], self._worths[left]))[0]]
        return float(self._worths[at]), self._picture.owner(int(self._contexts[at]))


def chunk_bytes(service: CoordinatorService) -> int:
    """Bytes of one chunk, from what a tier holds; 0 while nothing is stored anywhere. O(chunks known)."""
    for tier in (Tier.DISK, Tier.HOST):
        held = sum(len(chunks) for _, chunks in service.residency.resident(tier))
        used = usage_of(service, tier).used_bytes
        if held and used:
            return used // held
    return 0


def usage_of(service: CoordinatorService, tier: Tier) -> TierUsage:
    """What the cache layer says of the tier; zeros where it says nothing."""
    return next((entry for entry in service.residency.usage if entry.tier is tier), TierUsage(tier, 0, 0))
