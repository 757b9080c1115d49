"""Plans again and again, and starts what the plan says is due."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvpilot.coordinator.actions import Work
from kvpilot.coordinator.placing import Decision, Picture, PlannerSettings, chunk_bytes
from kvpilot.coordinator.service import CoordinatorService
from kvpilot.domain import ActionKind, ActionRecord, SessionState, Tier

log = logging.getLogger(__name__)

REPEAT_S = 3.0
"""A context is not planned for again sooner: the directory needs about a second to show what was done."""
ENDED_KEPT_S = 600.0
"""How long an ended session stays visible."""
PAUSE_S = 0.05
"""Least time between two plans, so that a burst of events is planned for once."""
DUTY = 0.1
"""Share of the time that planning may take from everything else, however many sessions there are."""
MAX_SESSIONS = 10_000
"""Beyond it the sessions idle for longest are forgotten before their time."""
AHEAD_S = 1.0
"""A prefetch is handed on so long before the disk gets to it: what waits there would only wait here."""
MEASURE_S = 30.0
"""How often the size of a chunk is taken from what the tiers hold."""
ORPHANS = ""


@dataclass(frozen=True, slots=True)
class Taken:
    """A decision as it was carried out. ``worth`` is what its conversation's room was worth (returns per second),
    ``place`` its rank among those that could have gone, least worth first, and how many there were. ``runner_up`` is
    the conversation that stayed in its place, for demotions."""

    decision: Decision
    worth: float
    place: tuple[int, int] | None = None
    runner_up: str | None = None
    runner_up_worth: float | None = None


class Planner:
    """``taken``: the last decision about each conversation, oldest first."""

    def __init__(self, service: CoordinatorService, settings: PlannerSettings | None = None) -> None:
        self._service = service
        self._settings = settings or PlannerSettings()
        self._tried: dict[str, float] = {}
        self.taken: dict[str, Taken] = {}
        self._chunk_bytes = 0
        self._measured_at = 0.0

    async def run(self, tick_s: float) -> None:
        """Runs for ever: a plan every ``tick_s`` seconds, and soon after anything happened."""
        changed = self._service.tasks.changed
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), tick_s)
            changed.clear()
            began = time.monotonic()
            try:
                self.tick()
            except Exception:
                log.exception("planning failed; going on")
            spent = time.monotonic() - began
            await asyncio.sleep(max(min(PAUSE_S, tick_s), spent * (1 / DUTY - 1)))

    def tick(self) -> list[ActionRecord]:
        """One round; returns the actions started."""
        now = self._service.clock()
        self._service.mapper.expire(now - self._service.settings.request_timeout_s)
        self._forget_old(now)
        if self._service.mode != "kvpilot":
            return []
        started: list[ActionRecord] = []
        picture = self._picture(now)
        due = [d for d in picture.decisions() if self._is_due(d, now)] if picture is not None else []
        for decision in due:
            started += self._carry_out(decision, now)
        on_host = [decision for decision in due if decision.tier is Tier.HOST]
        if picture is not None and on_host:
            self._note(on_host, picture, now)
        return started

    def decisions(self) -> list[Decision]:
        """What the plan says now; empty while nobody knows what is where."""
        picture = self._picture(self._service.clock())
        return [] if picture is None else picture.decisions()

    def outlook(self) -> tuple[list[Decision], dict[str, tuple[int, int]]]:
        """What :meth:`decisions` says, and of each conversation that could be demoted its rank among them, least worth
        first, and how many there are; both empty while nobody knows what is where."""
        picture = self._picture(self._service.clock())
        return ([], {}) if picture is None else (picture.decisions(), _places(picture.ranked()))

    def _picture(self, now: float) -> Picture | None:
        if self._service.residency.stale(now):
            return None
        recent = {owner for owner, at in self._tried.items() if now - at < REPEAT_S}
        if not self._chunk_bytes or now - self._measured_at > MEASURE_S:
            self._chunk_bytes, self._measured_at = chunk_bytes(self._service), now
        return Picture(self._service, now, self._settings, self._chunk_bytes, recent)

    def _is_due(self, decision: Decision, now: float) -> bool:
        nobodys = decision.owner is None and not decision.group
        if nobodys and now - self._tried.get(ORPHANS, 0.0) < REPEAT_S:
            return False
        return decision.at <= now + AHEAD_S

    def _note(self, done: Sequence[Decision], picture: Picture, now: float) -> None:
        """Remember what was decided, and whom hindsight is to compare."""
        ranked = picture.ranked()
        places = _places(ranked)
        gone = {d.owner for d in done if d.kind is ActionKind.DEMOTE}
        stays = next(((worth, owner) for worth, owner in ranked if owner not in gone), None)
        for decision in done:
            owner = decision.owner
            if owner is None:
                continue
            worth = self._service.forecasts.worth(owner, now)
            self.taken.pop(owner, None)
            decision = replace(decision, work=Work(decision.work.space, ()))  # many chunks, told nobody
            if decision.kind is ActionKind.DEMOTE and stays is not None:
                self._service.hindsight.demoted(owner, decision.chunks, stays[1], now)
                self.taken[owner] = Taken(decision, worth, places.get(owner), stays[1], stays[0])
            else:
                self.taken[owner] = Taken(decision, worth, places.get(owner))
        while len(self.taken) > MAX_SESSIONS:
            del self.taken[next(iter(self.taken))]

    def _carry_out(self, decision: Decision, now: float) -> list[ActionRecord]:
        if decision.tier is Tier.DEVICE:
            return self._carry_out_on_device(decision)
        for owner in decision.group or (decision.owner or ORPHANS,):
            self._tried[owner] = now
        thread = self._service.book.thread(decision.owner) if decision.owner is not None else None
        tenant, session = thread.session if thread is not None else ("", None)
        if decision.kind is ActionKind.PREFETCH:
            return [self._service.begin_prefetch(decision.work, tenant, session, "plan", decision.reason)]
        return [
            self._service.begin_demote(
                decision.work, tenant, session, "plan", None, decision.reason, decision.group
            )
        ]

    def _carry_out_on_device(self, decision: Decision) -> list[ActionRecord]:
        """What makes way is only told to the engine: it reuses in its own order."""
        if decision.kind is ActionKind.PREFETCH:
            return [
                self._service.device_moves.begin_prefetch(decision.work, decision.chunks, decision.reason)
            ]
        self._service.device_moves.make_way(decision.group, decision.work.chunks[0])
        return []

    def _forget_old(self, now: float) -> None:
        self._tried = {owner: at for owner, at in self._tried.items() if now - at < REPEAT_S}
        sessions = [s for s in self._service.book.sessions.values() if not s.in_flight]
        for session in sessions:
            idle = now - session.last_seen
            ended = session.state is SessionState.ENDED and idle > ENDED_KEPT_S
            if ended or idle > self._service.settings.session_idle_s:
                self._service.forget(session)
        surplus = len(self._service.book.sessions) - MAX_SESSIONS
        if surplus > 0:
            kept = [s for s in sessions if s.key in self._service.book.sessions]
            for session in sorted(kept, key=lambda s: s.last_seen)[:surplus]:
                self._service.forget(session)


def _places(ranked: Sequence[tuple[float, str]]) -> dict[str, tuple[int, int]]:
    return {owner: (rank, len(ranked)) for rank, (_, owner) in enumerate(ranked, 1)}
