"""Plans again and again, and starts what the plan says is due."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvpilot.coordinator.actions import Work
from kvpilot.coordinator.service import CoordinatorService
from kvpilot.coordinator.view import Reader
from kvpilot.domain import ActionKind, ActionRecord, SessionState
from kvpilot.plan import Decision, PlanSettings, Snapshot, plan
from kvpilot.sessions.book import Thread

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

    def __init__(self, service: CoordinatorService, reader: Reader, settings: PlanSettings) -> None:
        self._service = service
        self._reader = reader
        self._settings = settings
        self._tried: dict[str, float] = {}
        self.taken: dict[str, Taken] = {}

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
        snapshot = self._snapshot(now)
        due = [d for d in plan(snapshot, self._settings) if d.at <= now] if snapshot is not None else []
        for decision in due:
            started += self._carry_out(decision, now)
        if snapshot is not None and due:
            self._note(due, snapshot, now)
        return started

    def decisions(self) -> list[Decision]:
        """What the plan says now, with what it foresees; empty while nobody knows what is where."""
        snapshot = self._snapshot(self._service.clock())
        return [] if snapshot is None else plan(snapshot, self._settings)

    def places(self, now: float) -> dict[str, tuple[int, int]]:
        """Of each conversation that could be demoted its rank among them, least worth first, and how many there
        are; empty while nobody knows what is where."""
        snapshot = self._snapshot(now)
        return {} if snapshot is None else _places(self._ranked(snapshot, now))

    def _snapshot(self, now: float) -> Snapshot | None:
        if self._service.residency.stale(now):
            return None
        recent = {owner for owner, at in self._tried.items() if now - at < REPEAT_S}
        return self._reader.snapshot(now, recent)

    def _ranked(self, snapshot: Snapshot, now: float) -> list[tuple[float, str]]:
        """Worth and name of the conversations that could be demoted, least worth first."""
        return sorted(
            (self._service.forecasts.worth(view.owner, now), view.owner)
            for view in snapshot.threads
            if view.host and not view.in_flight
        )

    def _note(self, done: Sequence[Decision], snapshot: Snapshot, now: float) -> None:
        """Remember what was decided, and whom hindsight is to compare."""
        ranked = self._ranked(snapshot, now)
        places = _places(ranked)
        gone = {d.owner for d in done if d.kind is ActionKind.DEMOTE}
        stays = next(((worth, owner) for worth, owner in ranked if owner not in gone), None)
        for decision in done:
            owner = decision.owner
            if owner is None:
                continue
            worth = self._service.forecasts.worth(owner, now)
            self.taken.pop(owner, None)
            if decision.kind is ActionKind.DEMOTE and stays is not None:
                self._service.hindsight.demoted(owner, decision.chunks, stays[1], now)
                self.taken[owner] = Taken(decision, worth, places.get(owner), stays[1], stays[0])
            else:
                self.taken[owner] = Taken(decision, worth, places.get(owner))
        while len(self.taken) > MAX_SESSIONS:
            del self.taken[next(iter(self.taken))]

    def _carry_out(self, decision: Decision, now: float) -> list[ActionRecord]:
        if decision.owner is None:
            return self._demote_orphans(decision, now)
        thread = self._service.book.thread(decision.owner)
        if thread is None or decision.owner not in self._service.references:
            return []
        self._tried[decision.owner] = now
        tenant, session = thread.session
        if decision.kind is ActionKind.PREFETCH:
            work = self._loadable(thread, decision.chunks)
            return [self._service.begin_prefetch(work, tenant, session, "plan", decision.reason)]
        work = Work(thread.space, tuple(self._service.references.chunks(thread.owner)), thread.owner)
        return [self._service.begin_demote(work, tenant, session, "plan", decision.chunks, decision.reason)]

    def _loadable(self, thread: Thread, limit: int) -> Work:
        """The head of the context in which at most ``limit`` chunks are missing in host memory."""
        chunks = self._service.references.chunks(thread.owner)
        missing = end = 0
        for chunk in chunks:
            missing += not self._reader.in_host(thread.space, chunk)
            if missing > limit:
                break
            end += 1
        return Work(thread.space, tuple(chunks[: max(1, end)]), thread.owner)

    def _demote_orphans(self, decision: Decision, now: float) -> list[ActionRecord]:
        if now - self._tried.get(ORPHANS, 0.0) < REPEAT_S:
            return []
        self._tried[ORPHANS] = now
        left, out = decision.chunks, []
        for space, chunks in self._reader.orphans().items():
            work = Work(space, tuple(chunks[:left]))
            left -= len(work.chunks)
            if work.chunks:
                out.append(self._service.begin_demote(work, "", None, "plan", None, decision.reason))
        return out

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
