"""Read-only pictures of the coordinator's state: for the planner, and for people."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvpilot.coordinator.service import CoordinatorService
from kvpilot.domain import Space, Tier, TierUsage
from kvpilot.plan import Decision, Snapshot, ThreadView
from kvpilot.sessions.book import Session, Thread

CROWDED = 0.5
"""Share of host memory in use from which on it is worth counting what could be demoted."""


class Reader:
    """Asks the service; changes nothing."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service

    # ------------------------------------------------------------ for the planner

    def snapshot(self, now: float, recent: Collection[str]) -> Snapshot:
        """The planner's input; ``recent``: threads acted upon a moment ago. O(chunks of all live contexts)."""
        service = self._service
        host = self._usage(Tier.HOST)
        crowded = host.used_bytes > CROWDED * host.capacity_bytes
        return Snapshot(
            now=now,
            threads=[
                self._thread(session, thread, now, thread.owner in recent, count_exclusive=crowded)
                for session, thread in service.book.threads()
                if thread.owner in service.references
            ],
            host_used_bytes=host.used_bytes,
            host_capacity_bytes=host.capacity_bytes,
            chunk_bytes=self._chunk_bytes(),
            orphans=sum(map(len, self.orphans().values())) if crowded else 0,
        )

    def orphans(self) -> dict[Space, list[bytes]]:
        """Chunks in host memory that no live context holds, per space."""
        out: dict[Space, list[bytes]] = {}
        for space, chunks in self._service.residency.resident(Tier.HOST):
            unheld = list(self._service.references.unreferenced(space, chunks))
            if unheld:
                out[space] = unheld
        return out

    def in_host(self, space: Space, chunk: bytes) -> bool:
        return Tier.HOST in self._service.residency.tiers(space, chunk)

    def _usage(self, tier: Tier) -> TierUsage:
        for entry in self._service.residency.usage:
            if entry.tier is tier:
                return entry
        return TierUsage(tier, 0, 0)

    def _chunk_bytes(self) -> int:
        """Bytes of one chunk, from what a tier holds; 0 while nothing is stored anywhere."""
        for tier in (Tier.DISK, Tier.HOST):
            held = sum(len(chunks) for _, chunks in self._service.residency.resident(tier))
            used = self._usage(tier).used_bytes
            if held and used:
                return used // held
        return 0

    def _thread(
        self, session: Session, thread: Thread, now: float, recent: bool, *, count_exclusive: bool
    ) -> ThreadView:
        service, space = self._service, thread.space
        chunks = service.references.chunks(thread.owner)
        tiers = [service.residency.tiers(space, chunk) for chunk in chunks]
        host = [Tier.HOST in found for found in tiers]
        exclusive = 0
        if count_exclusive and any(host):
            holders = service.references.holders(space, chunks)
            exclusive = sum(there for n, there in zip(holders, host, strict=True) if n == 1)
        return ThreadView(
            owner=thread.owner,
            session=session.id,
            tenant=session.tenant,
            state=session.state,
            in_flight=thread.in_flight,
            chunks=len(chunks),
            host=sum(host),
            loadable=self._loadable(tiers),
            exclusive_host=exclusive,
            # Asked only where something could be moved: most of many sessions have nothing anywhere.
            forecast=service.forecasts.of(thread.owner, now) if any(tiers) else None,
            expected_at=session.expected_at,
            busy=recent or service.tasks.busy(thread.owner),
            kept=thread.keep_until > now,
            priority=thread.priority,
        )

    def _loadable(self, tiers: Sequence[frozenset[Tier]]) -> int:
        """Chunks not in host memory, up to the first that is certainly nowhere: nothing behind it can be used."""
        sure = self._service.residency.absence_is_certain(Tier.DISK)
        count = 0
        for found in tiers:
            if not found and sure:
                break
            count += Tier.HOST not in found
        return count

    # ------------------------------------------------------------ for people

    def summary(self, session: Session) -> dict[str, Any]:
        """A session in one line."""
        references = self._service.references
        owners = [t.owner for t in session.threads.values() if t.owner in references]
        return {
            "id": session.id,
            "tenant": session.tenant,
            "state": session.state.value,
            "since": session.since,
            "last_seen": session.last_seen,
            "identified_by": "client" if session.explicit else "content",
            "parent": session.parent[1] if session.parent else None,
            "children": sorted(key[1] for key in session.children),
            "turns": session.turns,
            "requests_in_flight": session.in_flight,
            "waiting_for": list(session.waiting_for),
            "expected_at": session.expected_at,
            "tokens": sum(references.length(owner) for owner in owners),
            "chunks": sum(len(references.chunks(owner)) for owner in owners),
            "resident": self._resident(owners),
        }

    def _resident(self, owners: Sequence[str]) -> dict[str, int]:
        """Tokens in the device pool (leading run), chunks per tier of the cache layer."""
        references, residency = self._service.references, self._service.residency
        out = {"device_tokens": 0, Tier.HOST.value: 0, Tier.DISK.value: 0}
        for owner in owners:
            space = references.space(owner)
            counts = residency.count(space, references.chunks(owner))
            out[Tier.HOST.value] += counts.get(Tier.HOST, 0)
            out[Tier.DISK.value] += counts.get(Tier.DISK, 0)
            out["device_tokens"] += residency.device_prefix(space, references.tokens(owner))
        return out

    def detail(self, session: Session, decisions: Callable[[], Sequence[Decision]]) -> dict[str, Any]:
        """Everything about a session: segments, where each chunk is, what will happen next."""
        service = self._service
        contexts = [
            self._context(thread) for thread in session.threads.values() if thread.owner in service.references
        ]
        upcoming = decisions() if service.mode == "kvpilot" else ()
        return {
            **self.summary(session),
            "segments": contexts[0]["segments"] if len(contexts) == 1 else [],
            "contexts": contexts,
            "returns_in_s": self._returns(session),
            "next": [
                {"action": d.kind.value, "at": d.at, "chunks": d.chunks, "reason": d.reason}
                for d in upcoming
                if d.owner in session.threads
            ],
        }

    def _context(self, thread: Thread) -> dict[str, Any]:
        references, space = self._service.references, thread.space
        chunks = references.chunks(thread.owner)
        holders = references.holders(space, chunks)
        return {
            "model": space.model,
            "salt": space.salt,
            "tokens": references.length(thread.owner),
            "keep_until": thread.keep_until or None,
            "priority": thread.priority,
            "segments_method": thread.segments_method,
            "segments": [
                {"kind": s.kind.value, "start": s.start, "end": s.end, "message": s.message, "name": s.name}
                for s in thread.segments
            ],
            "chunks": [
                {
                    "hash": chunk.hex(),
                    "tiers": sorted(self._service.residency.tiers(space, chunk)),
                    "holders": count,
                }
                for chunk, count in zip(chunks, holders, strict=True)
            ],
        }

    def _returns(self, session: Session) -> dict[str, float] | None:
        """Forecast of the session's next request, in seconds from now."""
        forecast = self._service.forecasts.soonest(session, self._service.clock())
        if forecast is None:
            return None
        return {f"p{int(100 * q)}": round(forecast.quantile(q), 3) for q in (0.1, 0.5, 0.9)}
