"""The placement rules between host memory and disk.

1. *Prefetch* the context of a session whose next request is due (or has been announced) and that is not wholly in
   host memory, soonest first, as long as everything due sooner keeps its room.
2. *Demote* when host memory fills up, before the cache layer's own blind eviction starts: first KV that no live
   session references, then the contexts least likely to return soon, each from its tail. A client's wish to keep
   a context counts like a likely return, within its tenant's part of host memory: a bias, never a lock.

Complexity: O(threads · log threads) per call; counts come ready from the snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpilot.domain import ActionKind, SessionState
from kvpilot.forecast import Forecast


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Shares are of host capacity. LMCache's own eviction starts at 0.8 by default: stay below it."""

    demote_above: float = 0.72
    demote_to: float = 0.60
    prefetch_up_to: float = 0.72
    due_quantile: float = 0.25
    lead_s: float = 1.0
    """Start a prefetch this long before the early estimate of the return, on top of the load itself."""
    load_bytes_per_s: float = 500e6
    """Disk bandwidth assumed for a load until measured."""
    horizon_s: float = 30.0
    """Contexts are ranked for demotion by the chance that they return within this time."""
    kept_chance: float = 0.4
    """The least chance of return that a kept context counts with; below the 0.5 that spares any context."""
    kept_share: float = 0.5
    """Share of host memory within which wishes are heard, in equal parts for the tenants who have any."""
    unsure_wait_s: float = 60.0
    """A context whose early return estimate is further away than this is not kept in host memory by prefetch."""


@dataclass(frozen=True, slots=True)
class ThreadView:
    """One conversation as the planner sees it. Counts are chunks; times unix seconds."""

    owner: str
    session: str
    tenant: str
    state: SessionState
    in_flight: int
    chunks: int
    host: int
    """Chunks in host memory."""
    loadable: int
    """Chunks not in host memory that the disk holds, in the leading run that is readable at all."""
    exclusive_host: int
    """Chunks in host memory that only this thread references."""
    forecast: Forecast | None
    expected_at: float | None
    """What a hint announced."""
    busy: bool = False
    """An action on this thread is under way, or the last prefetch found nothing and nothing changed since."""
    kept: bool = False
    """A client's wish to keep it is in force."""
    priority: int = 0
    """Decides between contexts of equal prospects: the lower goes first."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    now: float
    threads: Sequence[ThreadView]
    host_used_bytes: int
    host_capacity_bytes: int
    chunk_bytes: int
    orphans: int
    """Chunks in host memory that no live thread references."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a thread (``owner`` None = unreferenced chunks). ``chunks`` bounds it."""

    kind: ActionKind
    owner: str | None
    chunks: int
    reason: str
    at: float
    """When (now, or later for what is only foreseen)."""


def due_at(view: ThreadView, now: float, settings: PlanSettings) -> float | None:
    """Early estimate of the next request; None = not foreseeable (suspended, ended)."""
    if view.expected_at is not None:
        return view.expected_at
    if view.forecast is None or view.state in (SessionState.SUSPENDED, SessionState.ENDED):
        return None
    return now + view.forecast.quantile(settings.due_quantile)


def return_chance(view: ThreadView, now: float, settings: PlanSettings) -> float:
    """Probability of a request within the horizon; 1 while one is running, 0 for suspended and ended sessions."""
    if view.in_flight:
        return 1.0
    if view.expected_at is not None:
        return 1.0 if view.expected_at <= now + settings.horizon_s else 0.05
    if view.state in (SessionState.SUSPENDED, SessionState.ENDED) or view.forecast is None:
        return 0.0
    return view.forecast.within(settings.horizon_s)


def plan(snapshot: Snapshot, settings: PlanSettings) -> list[Decision]:
    """Decisions in the order in which to carry them out: room first, then prefetches, soonest due first."""
    if snapshot.host_capacity_bytes <= 0 or snapshot.chunk_bytes <= 0:
        return []
    prefetches = _due_prefetches(snapshot, settings)
    under_way = (
        v.loadable for v in snapshot.threads if v.busy and v.expected_at is not None and not v.in_flight
    )
    wanted = sum(d.chunks for d in prefetches if d.at <= snapshot.now) + sum(under_way)
    return [*_demotions(snapshot, settings, wanted), *prefetches]


def _due_prefetches(snapshot: Snapshot, settings: PlanSettings) -> list[Decision]:
    now = snapshot.now
    room = int(settings.prefetch_up_to * snapshot.host_capacity_bytes / snapshot.chunk_bytes)
    waiting = []
    for view in snapshot.threads:
        if view.in_flight:
            room -= view.chunks
            continue
        due = due_at(view, now, settings)
        if due is not None:
            waiting.append((due, view))
    waiting.sort(key=lambda pair: (pair[0], pair[1].owner))
    out: list[Decision] = []
    for due, view in waiting:
        if due > now + settings.unsure_wait_s and view.expected_at is None:
            break
        fits = min(view.chunks, max(0, room))
        room -= view.chunks
        load = min(view.loadable, max(0, fits - view.host))
        if load <= 0 or view.busy:
            continue
        load_s = load * snapshot.chunk_bytes / settings.load_bytes_per_s
        start = max(now, due - load_s - settings.lead_s)
        reason = "announced" if view.expected_at is not None else f"{view.state.value}, due"
        out.append(Decision(ActionKind.PREFETCH, view.owner, load, reason, start))
    return out


def _demotions(snapshot: Snapshot, settings: PlanSettings, wanted: int) -> list[Decision]:
    now, size = snapshot.now, snapshot.chunk_bytes
    after = snapshot.host_used_bytes + wanted * size
    if after <= settings.demote_above * snapshot.host_capacity_bytes:
        return []
    surplus = int((after - settings.demote_to * snapshot.host_capacity_bytes) / size)
    out: list[Decision] = []
    if snapshot.orphans:
        n = min(surplus, snapshot.orphans)
        out.append(Decision(ActionKind.DEMOTE, None, n, "host memory fills up; referenced by nobody", now))
        surplus -= n
    heard = _heard(snapshot, settings)

    def chance_of(view: ThreadView) -> float:
        chance = return_chance(view, now, settings)
        return max(chance, settings.kept_chance) if view.kept and view.owner in heard else chance

    def priority_of(view: ThreadView) -> int:
        return view.priority if view.owner in heard else min(view.priority, 0)

    ranked = sorted(
        (v for v in snapshot.threads if not v.in_flight and not v.busy and v.exclusive_host),
        key=lambda v: (chance_of(v), priority_of(v), v.owner),
    )
    soonest = {d.owner for d in _due_prefetches(snapshot, settings) if d.at <= now}
    for view in ranked:
        if surplus <= 0:
            break
        chance = chance_of(view)
        if chance >= 0.5 or view.owner in soonest:
            break  # everything left is about to return: moving it would only move the miss
        n = min(surplus, view.exclusive_host)
        reason = f"host memory fills up; {view.state.value}, return within {settings.horizon_s:.0f} s: {chance:.0%}"
        out.append(Decision(ActionKind.DEMOTE, view.owner, n, reason, now))
        surplus -= n
    return out


def _heard(snapshot: Snapshot, settings: PlanSettings) -> set[str]:
    """Owners whose wish to be kept, or to come before others, is heard: per tenant the highest priorities first,
    while its part has room. A wish to go first always is."""
    wishes = [v for v in snapshot.threads if (v.kept or v.priority > 0) and v.host]
    wishes.sort(key=lambda v: (-v.priority, v.owner))
    tenants = {view.tenant for view in wishes}
    room = settings.kept_share * snapshot.host_capacity_bytes / snapshot.chunk_bytes / max(1, len(tenants))
    left = dict.fromkeys(tenants, room)
    heard = set()
    for view in wishes:
        if view.host <= left[view.tenant]:
            left[view.tenant] -= view.host
            heard.add(view.owner)
    return heard
