"""Plans again and again, and starts what the plan says is due."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvpilot.coordinator.actions import Work
from kvpilot.coordinator.placing import Decision, Placing, PlannerSettings, Ranking, chunk_bytes
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
FORGET_S = 5.0
"""How often all sessions are looked at, for those to forget."""
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
        self._placing: Placing | None = None
        self._chunk_bytes = 0
        self._measured_at = 0.0
        self._forgot_at = 0.0

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
        self._service.expire()
        self._tried = {owner: at for owner, at in self._tried.items() if now - at < REPEAT_S}
        too_many = len(self._service.book.sessions) > MAX_SESSIONS
        if too_many or not 0.0 <= now - self._forgot_at < FORGET_S:
            self._forget_old(now)
        if self._service.mode != "kvpilot":
            self._look_away()
            return []
        started: list[ActionRecord] = []
        with self._seen(now) as placing:
            if placing is None:
                return []
            due = [d for d in placing.decisions(self._chunk_bytes) if self._is_due(d, now)]
            for decision in due:
                started += self._carry_out(decision, now)
            on_host = [decision for decision in due if decision.tier is Tier.HOST]
            if on_host:
                self._note(on_host, placing.ranking(), now)
        return started

    def decisions(self) -> list[Decision]:
        """What the plan says now; empty while nobody knows what is where, and where nothing is done about it."""
        return self.outlook()[0]

    def outlook(self) -> tuple[list[Decision], Ranking | None]:
        """What is going to be done, and in which order conversations could be demoted; nothing while nobody knows what
        is where, no decisions in passive mode."""
        with self._seen(self._service.clock()) as placing:
            if placing is None:
                return [], None
            acts = self._service.mode == "kvpilot"
            return placing.decisions(self._chunk_bytes) if acts else [], placing.ranking()

    @contextlib.contextmanager
    def _seen(self, now: float) -> Iterator[Placing | None]:
        """What is where, as it is now; None while the view is stale. In passive mode nobody follows what happens: it is
        made anew for whoever asks."""
        if self._service.residency.stale(now):
            self._look_away()
            yield None
            return
        if not self._chunk_bytes or now - self._measured_at > MEASURE_S:
            self._chunk_bytes, self._measured_at = chunk_bytes(self._service), now
        if self._placing is None:
            self._placing = Placing(self._service, self._settings)
        keep = False
        try:
            self._placing.look({owner for owner, at in self._tried.items() if now - at < REPEAT_S})
            yield self._placing
            keep = self._service.mode == "kvpilot"
        finally:
            if not keep:  # Nor after a failure: it may have taken in a part of what happened only.
                self._look_away()

    def _look_away(self) -> None:
        """What happens from now on is not remembered for the plan; the next one looks at everything anew."""
        if self._placing is not None:
            self._placing.close()
            self._placing = None

    def _is_due(self, decision: Decision, now: float) -> bool:
        nobodys = decision.owner is None and not decision.group
        if nobodys and now - self._tried.get(ORPHANS, 0.0) < REPEAT_S:
            return False
        return decision.at <= now + AHEAD_S

    def _note(self, done: Sequence[Decision], ranking: Ranking, now: float) -> None:
        """Remember what was decided, and whom hindsight is to compare."""
        stays = ranking.first({d.owner for d in done if d.kind is ActionKind.DEMOTE and d.owner is not None})
        for decision in done:
            owner = decision.owner
            if owner is None:
                continue
            worth = self._service.forecasts.worth(owner, now)
            self.taken.pop(owner, None)
            decision = replace(decision, work=Work(decision.work.space, ()))  # many chunks, told nobody
            if decision.kind is ActionKind.DEMOTE and stays is not None:
                self._service.hindsight.demoted(owner, decision.chunks, stays[1], now)
                self.taken[owner] = Taken(decision, worth, ranking.place(owner), stays[1], stays[0])
            else:
                self.taken[owner] = Taken(decision, worth, ranking.place(owner))
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
        self._forgot_at = now
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
