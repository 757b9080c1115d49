"""Read-only pictures of the coordinator's state, for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvpilot.coordinator.placing import Decision
from kvpilot.coordinator.service import CoordinatorService
from kvpilot.domain import Tier
from kvpilot.sessions.book import Session, Thread


class Reader:
    """Asks the service; changes nothing."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service

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
