"""Why is KV where it is? State, forecast, worth and decisions of a session or a chunk, in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpilot.coordinator.placing import Decision, Ranking
from kvpilot.coordinator.planner import Planner, Taken
from kvpilot.coordinator.service import CoordinatorService
from kvpilot.forecast.features import kind_of
from kvpilot.sessions.book import Session, Thread

HORIZONS_S = (10.0, 60.0, 600.0)
QUANTILES = (0.1, 0.5, 0.9)
INTERVAL = 0.8
MAX_HOLDERS = 50
"""Conversations told of a chunk that many share; ``holders`` counts all."""


class Explainer:
    """Asks the service and the planner; changes nothing. Plain types, as the control API shows them."""

    def __init__(self, service: CoordinatorService, planner: Planner) -> None:
        self._service = service
        self._planner = planner

    def session(self, session: Session) -> dict[str, Any]:
        """What it waits for since when, when it is expected and why, what its room is worth, what was decided."""
        now = self._service.clock()
        upcoming, ranking = self._planner.outlook()
        threads = session.threads.values()
        return {
            "session": session.id,
            "tenant": session.tenant,
            "state": session.state.value,
            "since": session.since,
            "waiting_for": list(session.waiting_for),
            "expected_at": session.expected_at,
            "mode": self._service.mode,
            "conversations": [self._conversation(thread, now, upcoming, ranking) for thread in threads],
        }

    def chunk(self, chunk: bytes) -> list[dict[str, Any]]:
        """The chunk in each space where it is known: where it lies, who holds it, what that is worth together. Empty
        for one that nobody knows."""
        service, now = self._service, self._service.clock()
        upcoming, ranking = self._planner.outlook()
        spaces = set(service.references.spaces_of(chunk)) | set(service.residency.spaces_of(chunk))
        out = []
        for space in sorted(spaces, key=lambda space: (space.model, space.salt, space.adapter)):
            owners = service.references.owners_of(space, chunk)
            out.append(
                {
                    "chunk": chunk.hex(),
                    "model": space.model,
                    "salt": space.salt,
                    "tiers": sorted(service.residency.tiers(space, chunk)),
                    "position": self._position(chunk, owners),
                    "worth": sum(service.forecasts.worth(owner, now) for owner in owners),
                    "holders": len(owners),
                    "held_by": [
                        self._conversation(thread, now, upcoming, ranking)
                        for owner in owners[:MAX_HOLDERS]
                        if (thread := service.book.thread(owner)) is not None
                    ],
                }
            )
        return out

    def _conversation(
        self, thread: Thread, now: float, upcoming: Sequence[Decision], ranking: Ranking | None
    ) -> dict[str, Any]:
        service, owner = self._service, thread.owner
        held = owner in service.references
        chunks = service.references.chunks(owner) if held else []
        sharing = service.references.holders(thread.space, chunks)
        tiers = service.residency.count(thread.space, chunks)
        return {
            "conversation": owner,
            "session": thread.session[1],
            "tenant": thread.session[0],
            "requests_in_flight": thread.in_flight,
            "kept": thread.keep_until > now,
            "priority": thread.priority,
            "chunks": len(chunks),
            "shared_chunks": sum(count > 1 for count in sharing),
            "resident": {tier.value: count for tier, count in tiers.items()},
            "in_device_pool": self._in_device_pool(thread) if held else None,
            "forecast": self._forecast(owner, now),
            "worth": service.forecasts.worth(owner, now),
            "place": _place(ranking.place(owner) if ranking is not None else None),
            "next": [_coming(decision) for decision in upcoming if decision.owner == owner],
            "last": _told(self._planner.taken.get(owner)),
        }

    def _in_device_pool(self, thread: Thread) -> dict[str, int] | None:
        """Tokens there, and those the session lost to others since its last request; None without the plug-in."""
        device = self._service.device
        if not device.active:
            return None
        lost = device.displaced(thread.session[1], thread.space)
        return {"tokens": device.resident(thread), "lost_to_others": lost}

    def _forecast(self, owner: str, now: float) -> dict[str, Any] | None:
        forecasts = self._service.forecasts
        found, wait = forecasts.of(owner, now), forecasts.wait(owner)
        if found is None or wait is None:
            return None
        kind = kind_of(wait.features)
        low, high = forecasts.intervals.calibrator.interval(
            kind, found.curve, INTERVAL, max(0.0, found.elapsed_s)
        )
        effects = forecasts.forecaster.pauses.model.explain(wait.features)
        return {
            "waits_for": kind,
            "since": wait.since,
            "returns_in_s": {f"p{int(100 * q)}": found.quantile(q) for q in QUANTILES},
            "within": {f"{horizon:g}s": found.within(horizon) for horizon in HORIZONS_S},
            "interval_80_s": [found.ahead_s + low, found.ahead_s + high],
            "features": [
                {"feature": name, "effect": effect}
                for name, effect in sorted(effects.items(), key=lambda item: -abs(item[1]))
            ],
        }

    def _position(self, chunk: bytes, owners: Sequence[str]) -> int | None:
        return self._service.references.chunks(owners[0]).index(chunk) if owners else None


def _place(place: tuple[int, int] | None) -> dict[str, int] | None:
    return None if place is None else {"rank": place[0], "of": place[1]}


def _coming(decision: Decision) -> dict[str, Any]:
    return {
        "action": decision.kind.value,
        "at": decision.at,
        "chunks": decision.chunks,
        "reason": decision.reason,
    }


def _told(taken: Taken | None) -> dict[str, Any] | None:
    if taken is None:
        return None
    return {
        **_coming(taken.decision),
        "worth": taken.worth,
        "place": _place(taken.place),
        "instead_of": taken.runner_up,
        "instead_of_worth": taken.runner_up_worth,
    }
