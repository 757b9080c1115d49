"""What the planner sees, and what it makes of it: the coordinator's state as holdings, moves as decisions.

Host memory is placed by :mod:`kvpilot.plan.placement`, by the worths of the forecasts. The disk is only observed: the
cache layer copies to it and evicts from it by itself. So whatever leaves host memory is *demoted*: dropped once the
cache layer has confirmed it on disk, whether the plan took it for dead or not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from kvpilot.coordinator.actions import Work
from kvpilot.coordinator.service import CoordinatorService
from kvpilot.domain import ActionKind, Space, Tier, TierUsage
from kvpilot.plan.holdings import Holdings
from kvpilot.plan.layout import Layout
from kvpilot.plan.placement import Move, MoveKind, PlacementSettings, TierLimits, plan
from kvpilot.sessions.book import Session, Thread

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


class Picture:
    """The coordinator's state at one moment. O(chunks of all live contexts), each shared one once."""

    def __init__(
        self,
        service: CoordinatorService,
        now: float,
        settings: PlannerSettings,
        chunk_bytes: int,
        recent: Collection[str] = (),
    ) -> None:
        """``chunk_bytes``: of one chunk, 0 = not known yet; ``recent``: conversations acted upon a moment ago, which
        are left alone."""
        self._chunk_bytes = chunk_bytes
        self._service, self._now, self._settings = service, now, settings
        self._holdings = Holdings()
        self._layout = Layout(self._holdings, (Tier.HOST, Tier.DISK))
        self._runs, self._tips = service.references.runs()
        self._holders: dict[int, set[str]] = {}
        self._arriving = 0
        """Chunks that are being brought into host memory."""
        self._tenants: dict[str, int] = {}
        self._device = service.device.prefetches and service.device.pool_tokens > 0
        self._threads: list[Thread] = []
        self._fill_runs()
        self._in_host = {
            owner: any(self._layout.here[0, row] for row in self._holdings.path(tip))
            for owner, tip in self._tips.items()
        }
        for session, thread in service.book.threads():
            if thread.owner in self._tips:
                self._add(session, thread, thread.owner in recent)
                self._threads.append(thread)
        worths = service.forecasts.worths(now)
        self._holdings.foresee(np.arange(len(worths)), worths)

    # ------------------------------------------------------------ what is asked of it

    def decisions(self) -> list[Decision]:
        """In the order in which to carry them out: room first, then prefetches, soonest expected first. Empty while it
        is not known how large host memory or a chunk is."""
        host, size = usage_of(self._service, Tier.HOST), self._chunk_bytes
        if host.capacity_bytes <= 0 or size <= 0:
            return []
        capacity = host.capacity_bytes // size
        used = host.used_bytes // size
        out: list[Decision] = []
        over = used + self._arriving > self._settings.demote_above * capacity
        if over:
            surplus = used + self._arriving - int(self._settings.demote_to * capacity)
            out = self._orphans(surplus)
            used -= sum(decision.chunks for decision in out)
        limits = self._limits(capacity, used, size, over=over)
        moves = plan(self._layout, limits, self._now, self._settings.placement)
        loads = [move for move in moves if move.kind is MoveKind.LOAD]
        out += [*self._demotions(moves), *self._prefetches(loads)]
        return out + self._on_device(size) if self._device else out

    def _on_device(self, chunk_bytes: int) -> list[Decision]:
        """The same plan one tier higher: what lies in host memory and returns soon goes into the engine's pool. There
        nothing is dropped to make room, the engine reuses what it needs by itself."""
        service = self._service
        device = Layout(self._holdings, (Tier.DEVICE, Tier.HOST))
        for row in range(self._holdings.runs):
            device.lies(row, Tier.HOST, int(self._layout.here[0, row]))
            device.mark(row, bool(self._holdings.running[row]))
        # What no run has takes room, too: prompts under way, and the contexts' ends, which fill no chunk.
        others = service.mapper.coming()
        for thread in self._threads:
            rows = list(self._holdings.path(self._tips[thread.owner]))[::-1]
            left, end = divmod(service.device.resident(thread), service.backend.chunk_size)
            others += end
            for row in rows:
                device.lies(row, Tier.DEVICE, max(int(device.here[0, row]), left))
                left = max(0, left - len(self._runs[row].chunks))
            if service.tasks.busy(thread.owner) or service.device.resting(thread):
                for row in rows:
                    device.mark(row, True)
        pool = TierLimits(
            capacity=max(0, service.device.pool_tokens - others) // service.backend.chunk_size,
            read_chunks_per_s=UNBOUNDED,
            fill_to=self._settings.device_up_to,
        )
        speed = self._settings.device_bytes_per_s / chunk_bytes
        limits = [pool, TierLimits(capacity=UNBOUNDED, read_chunks_per_s=speed, managed=False)]
        placement = self._settings.placement
        moves = plan(device, limits, self._now, replace(placement, least_load=placement.spared))
        loads = [move for move in moves if move.kind is MoveKind.LOAD]
        if not loads:  # Room without anybody to take it is of no use there.
            return []
        return [*self._demotions(moves, Tier.DEVICE), *self._prefetches(loads, Tier.DEVICE)]

    def ranked(self) -> list[tuple[float, str]]:
        """Worth and name of the conversations that could be demoted, least worth first."""
        return sorted(
            (self._service.forecasts.worth(owner, self._now), owner)
            for owner, there in self._in_host.items()
            if there and not self._holdings.running[self._tips[owner]]
        )

    # ------------------------------------------------------------ holdings

    def _fill_runs(self) -> None:
        residency = self._service.residency
        sure = residency.absence_is_certain(Tier.DISK)
        for run in self._runs:
            row = self._holdings.add(run.above, len(run.chunks))
            host = residency.prefix(run.space, run.chunks, Tier.HOST)
            self._layout.lies(row, Tier.HOST, host)
            # A chunk that is only above counts as one below too: what is behind it can be loaded all the same.
            rest = run.chunks[host:]
            below = host + residency.prefix(run.space, rest) if sure and rest else len(run.chunks)
            self._layout.lies(row, Tier.DISK, below)

    def _add(self, session: Session, thread: Thread, recent: bool) -> None:
        service, holdings, tip = self._service, self._holdings, self._tips[thread.owner]
        context = service.forecasts.number(thread.owner)
        holdings.rest(context, tip)
        holdings.wish(context, thread.keep_until > self._now, thread.priority)
        if session.expected_at is not None and service.forecasts.of(thread.owner, self._now) is None:
            holdings.announce(context, session.expected_at)
        if thread.in_flight:
            holdings.begin(context)
        holdings.decline(context, service.sent_down.get(thread.owner) == thread.turns)
        tenant = self._tenants.setdefault(session.tenant, len(self._tenants))
        busy = recent or service.tasks.busy(thread.owner)
        for row in holdings.path(tip):
            self._holders.setdefault(row, set()).add(thread.owner)
            holdings.belongs(row, tenant)
            if busy and not self._layout.busy[row]:
                self._layout.mark(row, True)
                if session.expected_at is not None and not thread.in_flight:
                    self._arriving += int(self._layout.here[1, row] - self._layout.here[0, row])

    def _limits(self, capacity: int, used: int, chunk_bytes: int, *, over: bool) -> list[TierLimits]:
        # What is in host memory besides the runs (behind holes, or being loaded) takes its part of every share.
        others = max(0, used - int(self._layout.used[0])) + self._arriving

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
                for tenant, number in self._tenants.items()
                if tenant in self._settings.budgets
            },
        )
        speed = self._settings.load_bytes_per_s / chunk_bytes
        return [host, TierLimits(capacity=UNBOUNDED, read_chunks_per_s=speed, managed=False)]

    # ------------------------------------------------------------ decisions

    def _orphans(self, surplus: int) -> list[Decision]:
        """What no live context holds goes first."""
        out = []
        for space, chunks in orphans(self._service).items():
            taken = tuple(chunks[: max(0, surplus)])
            surplus -= len(taken)
            if taken:
                reason = "host memory fills up; referenced by nobody"
                work = Work(space, taken)
                out.append(Decision(ActionKind.DEMOTE, None, work, len(taken), reason, self._now, 0.0))
        return out

    def _demotions(self, moves: list[Move], tier: Tier = Tier.HOST) -> list[Decision]:
        """What leaves the tier: of each conversation in one piece, of what several share by run."""
        gone: dict[int, tuple[int, int, str, float]] = {}
        for move in moves:
            if move.kind is MoveKind.DROP and move.tier is tier:
                first, end, reason, worth = gone.get(
                    move.run, (move.first, move.end, move.reason, move.worth)
                )
                gone[move.run] = (min(first, move.first), max(end, move.end), reason, worth)
        parts: dict[str | int, list[int]] = {}
        for row in gone:
            holders = self._holders.get(row, set())
            parts.setdefault(next(iter(holders)) if len(holders) == 1 else row, []).append(row)
        out = []
        for rows in parts.values():
            rows.sort()  # predecessors have the smaller numbers
            holders = self._holders.get(rows[0], set())
            owner = next(iter(holders)) if len(holders) == 1 else None
            chunks = tuple(c for row in rows for c in self._runs[row].chunks[gone[row][0] : gone[row][1]])
            work = Work(self._runs[rows[0]].space, chunks, owner)
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
        deepest = sorted(range(len(loads)), key=lambda at: -int(self._holdings.end[loads[at].run]))
        covered: dict[int, str] = {}
        for at in deepest:
            move = loads[at]
            owner = covered.get(move.run) or self._dearest(move.run)
            if owner is None:
                continue
            for row in self._holdings.path(move.run):
                covered.setdefault(row, owner)
            before = out.get(owner)
            if before is None:
                ahead = sum(len(self._runs[row].chunks) for row in self._holdings.path(move.run))
                end = ahead - len(self._runs[move.run].chunks) + move.end
                head = tuple(self._service.references.chunks(owner)[:end])
                work = Work(self._runs[move.run].space, head, owner)
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
        holders = sorted(self._holders.get(row, ()))
        return max(holders, key=lambda o: self._service.forecasts.worth(o, self._now), default=None)


def orphans(service: CoordinatorService) -> dict[Space, list[bytes]]:
    """Chunks in host memory that no live context holds, per space."""
    out: dict[Space, list[bytes]] = {}
    for space, chunks in service.residency.resident(Tier.HOST):
        unheld = list(service.references.unreferenced(space, chunks))
        if unheld:
            out[space] = unheld
    return out


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
