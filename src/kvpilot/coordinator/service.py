"""The coordinator's state, joined: what happened goes in, actions come out.

Everything here runs on one event loop; actions are tasks of their own. Passive mode maps and observes the same,
and starts nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from kvpilot.backends.base import Backend
from kvpilot.context.chunks import ChunkHasher
from kvpilot.context.segments import Segmenter
from kvpilot.coordinator.actions import ActionLog, Deferral, Work
from kvpilot.coordinator.asking import Render
from kvpilot.coordinator.awaited import AwaitedTokens
from kvpilot.coordinator.commands import Missing, Resolver, Target, disjoint, evictable, exclusively_held
from kvpilot.coordinator.device import Device, Plugin
from kvpilot.coordinator.device_moves import DeviceMoves
from kvpilot.coordinator.executor import Executor
from kvpilot.coordinator.forecasts import Forecasts
from kvpilot.coordinator.hindsight import Hindsight
from kvpilot.coordinator.mapper import Mapped, Mapper
from kvpilot.coordinator.recorder import Recorder
from kvpilot.coordinator.repeats import Repeats, Reused
from kvpilot.coordinator.segmenting import SegmentQueue
from kvpilot.coordinator.tasks import ActionTasks
from kvpilot.domain import (
    ActionKind,
    ActionRecord,
    Command,
    Event,
    OutcomeStatus,
    PromptKnown,
    RequestFinished,
    RequestStarted,
    SessionState,
    Signal,
    SignalKind,
    Space,
    TargetKind,
    Tier,
    TokenArray,
)
from kvpilot.forecast.forecaster import StoredRhythm
from kvpilot.ingest.residency import Residency
from kvpilot.sessions.book import Session, SessionBook, Thread
from kvpilot.sessions.references import ReferenceTable, Released

log = logging.getLogger(__name__)

SIGNAL_ACTIONS: dict[SignalKind, ActionKind] = {
    SignalKind.END: ActionKind.EVICT,
    SignalKind.SUSPEND: ActionKind.DEMOTE,
    SignalKind.RESUME: ActionKind.PREFETCH,
    SignalKind.TOOL_FINISHED: ActionKind.PREFETCH,
}

ANNOUNCEMENTS: dict[ActionKind, SignalKind] = {
    ActionKind.EVICT: SignalKind.END,
    ActionKind.DEMOTE: SignalKind.SUSPEND,
    ActionKind.PREFETCH: SignalKind.RESUME,
}
"""What a session-wide command says of its session."""

UNSETTLED = "a request of the session is running, or its tokens are still asked for"
WENT_ON = "the session went on before its running request had ended"

TREE_SIGNALS = (SignalKind.END, SignalKind.SUSPEND, SignalKind.RESUME)
"""What is true of a session's children too when it is said of the session."""


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """``mode``: kvpilot acts, passive observes. Times in seconds."""

    mode: str = "kvpilot"
    recheck_s: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0)
    session_idle_s: float = 86400.0
    request_timeout_s: float = 900.0
    block_size: int = 64
    """Tokens in a block of the engine, for ranges given in blocks."""


class StoredThread(NamedTuple):
    """A conversation as a store keeps it: with the context it referenced and what is known of its waits."""

    thread: Thread
    tokens: TokenArray | None
    rhythm: StoredRhythm | None


class CoordinatorService:
    """``on_session`` and ``on_forget`` are told when a session's stored state changes (the store listens).
    ``render`` gives a chat's tokens where replies do not; without it such requests are not mapped. ``plugin``: the
    engine's, if it may have one."""

    def __init__(
        self,
        *,
        backend: Backend,
        residency: Residency,
        segmenter: Segmenter,
        space_of: Callable[[str], Space],
        settings: ServiceSettings,
        render: Render | None = None,
        plugin: Plugin | None = None,
        nudge: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.mode = settings.mode
        self.settings = settings
        self.backend = backend
        self.residency = residency
        self.clock = clock
        self.space_of = space_of
        hasher = ChunkHasher(backend.chunk_size)
        self.references = ReferenceTable(hasher)
        self.book = SessionBook()
        self.forecasts = Forecasts()
        self.hindsight = Hindsight()
        self.mapper = Mapper(self.book, self.references, self.forecasts, space_of, clock)
        self.segments = SegmentQueue(segmenter, self._changed)
        self.resolver = Resolver(self.book, self.references, hasher, self.segments.of, settings.block_size)
        self.actions = ActionLog()
        self.repeats = Repeats(self.actions)
        self.executor = Executor(
            backend,
            residency,
            self.references,
            self.actions,
            settings.recheck_s,
            nudge,
            unmapped=self.mapper.unmapped,
            clock=clock,
        )
        self.device = Device(plugin, residency, self.references, clock)
        self.tasks = ActionTasks()
        self.device_moves = DeviceMoves(
            self.device,
            book=self.book,
            references=self.references,
            forecasts=self.forecasts,
            actions=self.actions,
            tasks=self.tasks,
            chunk_size=backend.chunk_size,
            clock=clock,
        )
        self.awaited = AwaitedTokens(
            render,
            settings.request_timeout_s,
            mapper=self.mapper,
            references=self.references,
            backend=backend,
            tasks=self.tasks,
            take=self._mapped,
            extended=self._known,
        )
        self.recorder: Recorder | None = None
        self.sent_down: dict[str, int] = {}
        """By conversation, at which of its turns somebody asked for a part of it to be demoted: until its next
        request the plan does not bring back what it would."""
        self._followers: list[dict[str, None]] = []
        self.on_session: Callable[[Session], None] = lambda session: None
        self.on_forget: Callable[[Session], None] = lambda session: None

    # ------------------------------------------------------------ what happened

    def handle(self, event: Event) -> list[ActionRecord]:
        """Take in one event; returns the actions it started."""
        self.mapper.stats.events[type(event).__name__] += 1
        self.tasks.changed.set()
        if isinstance(event, RequestStarted):
            started = self.mapper.on_started(event)
            for thread in self.book.surplus(started.session):
                self._forget_thread(thread)
            self.changed(started.session)
            self.hindsight.came(started.thread.owner, event.at)
            self.awaited.started(event)
            return []
        if isinstance(event, PromptKnown):
            self.awaited.told(event)
            return self._mapped(self.mapper.on_prompt(event))
        if isinstance(event, RequestFinished):
            self.awaited.told(event)
            lost, ended = self.mapper.lost(event), self.mapper.running(event.request_id)
            mapped = self._mapped(self.mapper.on_finished(event))
            if ended is not None:
                # It waits now, also where nothing of its tokens was told.
                self.changed(ended.started.session)
                if self.recorder is not None:
                    self.recorder.call(ended, event)
            self.awaited.recover(lost)
            self.tasks.settled.set()
            return mapped
        return self._signalled(event)

    def changed(self, session: Session) -> None:
        """Something of the session is another than before: its state, its requests, what is wished or asked of it."""
        self._tell_followers(session.threads)
        self.on_session(session)

    def follow(self) -> dict[str, None]:
        """Conversations of which something changed are put there from now on, for somebody to take."""
        followed: dict[str, None] = {}
        self._followers.append(followed)
        return followed

    def unfollow(self, followed: dict[str, None]) -> None:
        self._followers = [each for each in self._followers if each is not followed]

    def _tell_followers(self, owners: Iterable[str]) -> None:
        for followed in self._followers:
            followed.update(dict.fromkeys(owners))

    def expire(self) -> None:
        """Take requests whose end was never told for ended."""
        for session in self.mapper.expire(self.clock() - self.settings.request_timeout_s):
            self.changed(session)

    def _changed(self, thread: Thread) -> None:
        if (session := self.book.sessions.get(thread.session)) is not None:
            self.changed(session)

    def _known(self, mapped: Mapped) -> None:
        """The thread holds another context."""
        self.changed(mapped.session)
        # So that the cache layer's events, which name chunks in short, are understood at once.
        space, owner = mapped.thread.space, mapped.thread.owner
        self.residency.learn_context(space, self.references.chunks(owner))

    def _mapped(self, mapped: Mapped | None) -> list[ActionRecord]:
        if mapped is None:
            return []
        thread = mapped.thread
        if thread.owner in self.references:  # else it was forgotten meanwhile, and stays so
            self.segments.put(mapped)
            self._known(mapped)
            self.awaited.ask_reply(mapped)
        dead = list(reversed(mapped.released.chunks))
        dead += self._take_leftover(thread)
        if mapped.output is not None:
            self._keep(mapped.session, thread)
        self._let_device_know(mapped.session, mapped.released)
        return self._evict_dead(mapped.session, mapped.released.space, dead, "supersession")

    def _let_device_know(self, session: Session, released: Released) -> None:
        if self.mode == "kvpilot":
            self.device.gave_up(session.id, released)

    def _keep(self, session: Session, thread: Thread) -> None:
        """A client's wish for the context, which the cache layer knows nothing of."""
        if self.mode == "kvpilot":
            self.device.kept(session.id, thread.space, thread.keep_until - self.clock())

    def _signalled(self, event: Signal) -> list[ActionRecord]:
        session = self.mapper.on_signal(event)
        if session is None:
            return []
        self.changed(session)
        if self.recorder is not None:
            self.recorder.signal(session, event)
        if event.retention is not None:
            for thread in session.threads.values():
                self._keep(session, thread)
        kind = SIGNAL_ACTIONS.get(event.kind)
        if kind is None:
            return []
        target = self.resolver.tree(session)
        if event.kind in TREE_SIGNALS and self.mode == "kvpilot":
            self._announce(kind, target.sessions[1:])
        return self._begin(kind, session.tenant, session.id, f"{event.kind.value} signal", target)

    # ------------------------------------------------------------ commands

    async def command(self, command: Command) -> list[ActionRecord]:
        """Start what somebody asks for; the records tell the plan, by their ids what became of it is read.

        What was asked for before under the same client id is not started again.
        """
        try:
            return await self.repeats.once(command, self._command)
        except Reused as reused:
            session, tenant, source = command.session.id, command.tenant, command.source
            return [self._final(command.kind, tenant, session, source, OutcomeStatus.REJECTED, str(reused))]

    async def _command(self, command: Command) -> list[ActionRecord]:
        self.tasks.changed.set()
        session, tenant, source = command.session.id, command.tenant, command.source
        try:
            target = await self.resolver.resolve(command, self.space_of(command.salt))
        except Missing as missing:
            return [self._final(command.kind, tenant, session, source, OutcomeStatus.MISSING, str(missing))]
        if command.target is TargetKind.SESSION and self.mode == "kvpilot":
            self._announce(command.kind, target.sessions)
        return self._begin(command.kind, tenant, session, source, target)

    def begin_chunks(self, kind: ActionKind, work: Work, tenant: str, source: str) -> ActionRecord:
        """Act on chunks of one context that a client names as its own. Whoever has its hashes speaks for it: an
        evict takes from it what no other context holds, where :meth:`command` spares all that is live."""
        self.tasks.changed.set()
        thread = self.book.thread(work.owner) if work.owner else None
        target = self.resolver.given_up(work) if kind is ActionKind.EVICT else Target(works=[work])
        session = self.book.sessions.get(thread.session) if thread else None
        (record,) = self._begin(kind, tenant, session.id if session else None, source, target)
        return record

    def _announce(self, kind: ActionKind, sessions: Iterable[Session]) -> None:
        """A session-wide command says what the sessions are going to do."""
        now = self.clock()
        for session in sessions:
            if session.in_flight:
                continue
            if kind is ActionKind.PREFETCH:
                session.expected_at = now
                if session.state in (SessionState.SUSPENDED, SessionState.ENDED):
                    session.state, session.since = SessionState.WAITING_HUMAN, now
            else:
                ended = kind is ActionKind.EVICT
                session.state = SessionState.ENDED if ended else SessionState.SUSPENDED
                session.since, session.expected_at = now, None
            self.forecasts.signal(session, ANNOUNCEMENTS[kind], None, now)
            self.changed(session)

    def _begin(
        self, kind: ActionKind, tenant: str, session: str | None, source: str, target: Target
    ) -> list[ActionRecord]:
        if self.mode != "kvpilot":
            if kind is ActionKind.EVICT and target.whole:
                self.tasks.start(self._let_go(target, target.turns), [])
            reason = "passive mode: kvpilot observes only"
            return [self._final(kind, tenant, session, source, OutcomeStatus.REJECTED, reason)]
        if kind is ActionKind.EVICT:
            return [self._begin_evict(tenant, session, source, target)]
        works = [work for work in target.works if work.chunks]
        if kind is ActionKind.PREFETCH:
            records = [self.begin_prefetch(work, tenant, session, source) for work in works]
        else:
            records = self._begin_demotes(works, tenant, session, source, target)
        return records or [self._final(kind, tenant, session, source, OutcomeStatus.DONE, "nothing held")]

    # ------------------------------------------------------------ evict

    def _begin_evict(self, tenant: str, session: str | None, source: str, target: Target) -> ActionRecord:
        if target.whole:
            cut = [Work(thread.space, tuple(self._leftover(thread))) for thread in target.threads]
            target.works += [work for work in cut if work.chunks]
        owners = [thread.owner for thread in target.threads] if target.gives_up else []
        planned = evictable(self.references, target.works, owners)
        asked = len({chunk for work in target.works for chunk in work.chunks})
        unsettled = any(thread.unsettled for thread in target.threads)
        record = self._open(
            ActionKind.EVICT,
            tenant,
            session,
            source,
            planned,
            skipped=asked - planned,
            status=OutcomeStatus.DEFERRED if unsettled else OutcomeStatus.ACCEPTED,
            reason=UNSETTLED if unsettled else "",
            work=Work(Space(""), (), None, _deferral(target)) if unsettled else _first(target.works),
        )
        self.tasks.start(self._evict(record, target, target.turns), [t.owner for t in target.threads])
        return record

    async def _evict(self, record: ActionRecord, target: Target, turns: Sequence[int]) -> None:
        await self.tasks.drained(target.threads)
        if target.went_on(turns):
            self._abandon(record, OutcomeStatus.REJECTED, WENT_ON)
            return
        if target.whole:
            self._announce(ActionKind.EVICT, target.sessions)
        dead: dict[Space, dict[bytes, None]] = {}
        for work in target.works:
            dead.setdefault(work.space, {}).update(dict.fromkeys(work.chunks))
        for thread in target.threads:
            if thread.owner in self.references and target.gives_up:
                # The reply that was still being written when this was asked for is released here, too.
                released = self._give_up(thread, target.cut, dead.get(thread.space, {}))
                dead.setdefault(thread.space, {}).update(dict.fromkeys(reversed(released)))
            if target.whole:
                dead.setdefault(thread.space, {}).update(dict.fromkeys(self._take_leftover(thread)))
                self.device.ended(thread.session[1], thread.space)
        works = [Work(space, tuple(chunks)) for space, chunks in dead.items()] or [_first([])]
        self._begun(record, works[0])
        # Written down before the first is done: from here on nothing else knows of them.
        more = [
            self._open(
                ActionKind.EVICT, record.tenant, record.session, record.source, len(work.chunks), work=work
            )
            for work in works[1:]
        ]
        for action, work in zip((record, *more), works, strict=True):
            await self.executor.evict(action.id, work)

    async def _let_go(self, target: Target, turns: Sequence[int]) -> None:
        """What has ended holds nothing, also where nothing is done about it."""
        await self.tasks.drained(target.threads)
        for thread in () if target.went_on(turns) else target.threads:
            if thread.owner in self.references:
                self.references.drop(thread.owner)
            thread.leftover = []

    def _leftover(self, thread: Thread) -> list[bytes]:
        """What range edits left behind their cut and nobody holds, tail first."""
        return [c for c in reversed(thread.leftover) if c and not self.references.is_live(thread.space, c)]

    def _take_leftover(self, thread: Thread) -> list[bytes]:
        left, thread.leftover = self._leftover(thread), []
        return left

    def _give_up(self, thread: Thread, cut: int | None, asked: dict[bytes, None]) -> tuple[bytes, ...]:
        """Take the thread's reference away, or, for a range edit, back to where the range began."""
        self._changed(thread)
        session = self.book.sessions[thread.session]
        if cut is None:
            released = self.references.drop(thread.owner)
            self._let_device_know(session, released)
            return released.chunks
        before = thread.leftover or self.references.chunks(thread.owner)
        tokens = self.references.tokens(thread.owner)
        if cut < len(tokens):
            self._let_device_know(session, self.references.set(thread.owner, thread.space, tokens[:cut]))
        thread.leftover = [b"" if chunk in asked else chunk for chunk in before]
        return ()

    def _evict_dead(
        self, session: Session, space: Space, dead: Sequence[bytes], source: str
    ) -> list[ActionRecord]:
        if not dead or self.mode != "kvpilot":
            return []
        work = Work(space, tuple(dead))
        record = self._open(ActionKind.EVICT, session.tenant, session.id, source, len(dead), work=work)
        self.tasks.start(self.executor.evict(record.id, work), [])
        return [record]

    # ------------------------------------------------------------ demote and prefetch

    def _begin_demotes(
        self, works: Sequence[Work], tenant: str, session: str | None, source: str, target: Target
    ) -> list[ActionRecord]:
        """Demote now what has settled, and of a whole session the rest when it has, with what it holds then."""
        for work in works:
            if (thread := self.book.thread(work.owner) if work.owner else None) is not None:
                self.sent_down[thread.owner] = thread.turns
                self._changed(thread)
                self.device_moves.send_down(thread, None if target.whole else work.chunks[0])
        late = {t.owner: t for t in target.threads if target.whole and t.unsettled}
        group = frozenset([*(work.owner for work in works if work.owner is not None), *late])
        now = [work for work in disjoint(works) if work.owner not in late]
        records = [self.begin_demote(work, tenant, session, source, group=group) for work in now]
        for thread in late.values():
            work = self.resolver.context(thread)
            planned = len(exclusively_held(self.references, work, group))
            owner = self.book.sessions[thread.session]
            suspended = owner.state is SessionState.SUSPENDED
            deferral = Deferral((owner.key,), (owner.turns,), tuple(group), suspended=suspended)
            record = self._open(
                ActionKind.DEMOTE,
                tenant,
                session,
                source,
                planned,
                status=OutcomeStatus.DEFERRED,
                reason=UNSETTLED,
                work=msgspec.structs.replace(work, deferral=deferral),
            )
            self.tasks.start(self._demote_late(record, thread, owner, deferral), [thread.owner])
            records.append(record)
        return records

    async def _demote_late(
        self,
        record: ActionRecord,
        thread: Thread,
        session: Session,
        deferral: Deferral,
    ) -> None:
        await self.tasks.drained([thread])
        resumed = deferral.suspended and session.state is not SessionState.SUSPENDED
        if session.turns > deferral.turns[0] or resumed:
            self._abandon(record, OutcomeStatus.REJECTED, WENT_ON)
            return
        if session.state is not SessionState.SUSPENDED:
            self._announce(ActionKind.DEMOTE, [session])
        held = self.resolver.context(thread)
        exclusive = exclusively_held(self.references, held, deferral.owners)
        if not exclusive:
            why = "other live contexts use it" if held.chunks else "nothing held"
            self._abandon(record, OutcomeStatus.DONE, why)
            return
        work = Work(held.space, exclusive, thread.owner)
        self._begun(record, work, planned=len(exclusive), skipped=len(held.chunks) - len(exclusive))
        await self.executor.demote(record.id, work)

    def begin_demote(
        self,
        work: Work,
        tenant: str,
        session: str | None,
        source: str,
        limit: int | None = None,
        reason: str = "",
        group: Collection[str] = (),
    ) -> ActionRecord:
        """Demote what only the work's owner references, or only it and the others of ``group`` (owners that are
        demoted together); ``limit`` bounds the chunks (taken from the tail)."""
        own = group or ((work.owner,) if work.owner is not None else ())
        exclusive = exclusively_held(self.references, work, own)
        planned = min(len(exclusive), limit) if limit is not None else len(exclusive)
        skipped = len(work.chunks) - len(exclusive)
        if not exclusive:
            why = "other live contexts use it"
            return self._final(
                ActionKind.DEMOTE, tenant, session, source, OutcomeStatus.DONE, why, skipped=skipped
            )
        work = Work(work.space, exclusive, work.owner)
        thread = self.book.thread(work.owner) if work.owner else None
        unsettled = thread is not None and thread.unsettled
        record = self._open(
            ActionKind.DEMOTE,
            tenant,
            session,
            source,
            planned,
            skipped=skipped,
            status=OutcomeStatus.DEFERRED if unsettled else OutcomeStatus.ACCEPTED,
            reason=UNSETTLED if unsettled else reason,
            work=work,
        )
        self.tasks.start(self._demote(record, work, limit), [work.owner] if work.owner else [])
        return record

    async def _demote(self, record: ActionRecord, work: Work, limit: int | None) -> None:
        thread = self.book.thread(work.owner) if work.owner else None
        if thread is not None:
            await self.tasks.drained([thread])
        self._begun(record, work)
        await self.executor.demote(record.id, work, limit)

    def begin_prefetch(
        self, work: Work, tenant: str, session: str | None, source: str, reason: str = ""
    ) -> ActionRecord:
        """Prefetch the owner's context up to the last chunk of ``work``: a chunk needs all before it."""
        kind = ActionKind.PREFETCH
        if work.owner is None or work.owner not in self.references:
            why = "no context with these chunks is known"
            return self._final(kind, tenant, session, source, OutcomeStatus.MISSING, why)
        chunks = self.references.chunks(work.owner)
        wanted = set(work.chunks)
        last = next((place for place in reversed(range(len(chunks))) if chunks[place] in wanted), None)
        if last is None:
            # What a range cut off earlier was computed behind chunks that the context no longer has.
            why = "the context has given these chunks up"
            return self._final(kind, tenant, session, source, OutcomeStatus.MISSING, why)
        head = Work(work.space, tuple(chunks[: last + 1]), work.owner)
        if self.sent_down.pop(work.owner, None) is not None:
            self._tell_followers([work.owner])
        there = 0
        if not self.residency.stale(self.clock()):
            there = self.residency.count(head.space, head.chunks).get(Tier.HOST, 0)
        planned = len(head.chunks) - there
        if not planned:
            return self._final(
                kind, tenant, session, source, OutcomeStatus.DONE, "already in host memory", there
            )
        record = self._open(kind, tenant, session, source, planned, skipped=there, reason=reason, work=head)
        self.tasks.start(
            self.executor.prefetch(record.id, head, self.references.tokens(work.owner)), [work.owner]
        )
        return record

    # ------------------------------------------------------------ restart

    def restore(self, session: Session, threads: Sequence[StoredThread]) -> None:
        """Know a session again, as a store kept it; before the first event is taken in."""
        for thread, tokens, rhythm in threads:
            if tokens is not None:
                self.references.set(thread.owner, thread.space, tokens)
            if rhythm is not None:
                self.forecasts.restore(thread.owner, rhythm)
        self.book.restore(session, [thread for thread, _, _ in threads])

    def resume(self, pending: Sequence[tuple[ActionRecord, Work | None]]) -> None:
        """Take up again what was acknowledged before a restart, and let go of what ended sessions held."""
        for session in self.book.sessions.values():
            if session.state is SessionState.ENDED:
                for thread in session.threads.values():
                    held = thread.owner in self.references
                    released = self.references.drop(thread.owner) if held else Released(thread.space)
                    self._let_device_know(session, released)
                    dead = [*reversed(released.chunks)]
                    dead += self._take_leftover(thread)
                    self._evict_dead(session, thread.space, dead, "session ended")
        for record, work in pending:
            self.actions.adopt(record)
            begun = record.status is not OutcomeStatus.DEFERRED or record.kind is not ActionKind.EVICT
            if work is None or not (begun or work.deferral):
                self._abandon(record, OutcomeStatus.MISSING, "what it was about was lost with a restart")
            elif work.deferral is not None:
                self._resume_deferred(record, work, work.deferral)
            elif record.kind is ActionKind.EVICT:
                self.tasks.start(self.executor.evict(record.id, work), [])
            elif record.kind is ActionKind.DEMOTE:
                self.tasks.start(self.executor.demote(record.id, work), [work.owner] if work.owner else [])
            elif work.owner is not None and work.owner in self.references:
                tokens = self.references.tokens(work.owner)
                self.tasks.start(self.executor.prefetch(record.id, work, tokens), [work.owner])
            else:
                self._abandon(record, OutcomeStatus.MISSING, "the context is no longer known")

    def _resume_deferred(self, record: ActionRecord, work: Work, deferral: Deferral) -> None:
        """What had not begun begins now: what it waited for ended with the restart, as far as anybody will hear."""
        known = dict(zip(deferral.sessions, deferral.turns, strict=True))
        sessions = [session for key in known if (session := self.book.sessions.get(key)) is not None]
        threads = [t for o in deferral.owners if (t := self.book.thread(o)) is not None]
        if record.kind is ActionKind.EVICT:
            target = Target(sessions, threads, list(deferral.works), deferral.whole, deferral.cut)
            turns = [known[session.key] for session in sessions]
            self.tasks.start(self._evict(record, target, turns), [t.owner for t in threads])
            return
        thread = self.book.thread(work.owner) if work.owner else None
        if thread is None or not sessions:
            self._abandon(record, OutcomeStatus.MISSING, "the context is no longer known")
            return
        self.tasks.start(self._demote_late(record, thread, sessions[0], deferral), [thread.owner])

    def forget(self, session: Session) -> None:
        """Forget a session; what only it referenced is left to the cache layer's own eviction."""
        for thread in session.threads.values():
            self._forget_thread(thread)
        self.book.drop(session)
        self.on_forget(session)

    def _forget_thread(self, thread: Thread) -> None:
        if thread.owner in self.references:
            self.references.drop(thread.owner)
        self.mapper.forget(thread.owner)
        self.segments.forget(thread.owner)
        self.forecasts.forget(thread.owner)
        self.hindsight.forget(thread.owner)
        self.device.forget(thread.owner)
        self.sent_down.pop(thread.owner, None)
        if self.recorder is not None:
            self.recorder.forget(thread.owner)

    # ------------------------------------------------------------ records

    def _open(
        self, kind: ActionKind, tenant: str, session: str | None, source: str, planned: int, **fields: Any
    ) -> ActionRecord:
        return self.actions.open(
            kind, now=self.clock(), session=session, tenant=tenant, source=source, planned=planned, **fields
        )

    def _final(
        self,
        kind: ActionKind,
        tenant: str,
        session: str | None,
        source: str,
        status: OutcomeStatus,
        reason: str,
        skipped: int = 0,
    ) -> ActionRecord:
        return self._open(kind, tenant, session, source, 0, status=status, reason=reason, skipped=skipped)

    def _begun(self, record: ActionRecord, work: Work, **changes: Any) -> None:
        """From here on the action is under way; after a restart it goes on with ``work``."""
        if record.status is OutcomeStatus.DEFERRED:
            changes |= {"status": OutcomeStatus.ACCEPTED, "reason": ""}
        self.actions.update(record.id, work, **changes)

    def _abandon(self, record: ActionRecord, status: OutcomeStatus, reason: str) -> None:
        self.actions.update(record.id, status=status, reason=reason, finished_at=self.clock())

    async def close(self) -> None:
        """Stop what runs; open actions stay open in the store and are taken up after a restart."""
        await self.tasks.close()
        await self.awaited.close()


def _first(works: Sequence[Work]) -> Work:
    return works[0] if works else Work(Space(""), ())


def _deferral(target: Target) -> Deferral:
    return Deferral(
        sessions=tuple(session.key for session in target.sessions),
        turns=tuple(target.turns),
        owners=tuple(thread.owner for thread in target.threads),
        works=tuple(target.works),
        whole=target.whole,
        cut=target.cut,
    )
