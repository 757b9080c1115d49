"""The session tree: who is talking, in which conversations, and what each of them is doing now.

Pure state: no clock, no I/O. A *session* is a label (given by the client, or made here when the content had to
tell); a *thread* is one growing conversation inside it. Most sessions have one thread; a client that sends side
calls (titles, sub-tasks with another system prompt) under one id gets several, so that a side call never counts
as a compaction of the main conversation.

How a request finds its thread (``SessionBook.start``): with an id, inside that session, a thread whose last
messages are a prefix of the new ones is *continued*; otherwise an idle thread with the same head (tools and
system messages) has had its context *broken* (compacted, cleared, rewound); otherwise it is a new thread. Without an id
the same by content over the tenant: a continuation needs the whole known prompt as prefix, a break needs that
a reply this thread received is part of the new prompt; sharing only the head is a new session.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import blake3

from kvpilot.context.messages import common_prefix
from kvpilot.domain import Retention, Segment, SessionRef, SessionState, SignalKind, Space

MAX_THREADS = 64
"""Conversations under one session id that are kept apart."""
MAX_INDEXED_POINTS = 64
"""Per thread: how many of its earlier prompts stay recognisable by content."""


SessionKey = tuple[str, str]
"""(tenant, session id): equal ids of two tenants are two sessions."""


Point = tuple[str, str, bytes]
"""(tenant, salt, hash): a place in a conversation. Hashes are chained, so one names everything before it."""


class Change(StrEnum):
    """How a request's context relates to what its thread had before."""

    NEW = "new"
    CONTINUED = "continued"
    BROKEN = "broken"


@dataclass(slots=True)
class Thread:
    """One growing conversation. ``owner`` names its reference in the reference table."""

    owner: str
    session: SessionKey
    space: Space
    hashes: list[bytes] = field(default_factory=list)
    """Chained content hashes of the last prompt: tools first, then one per message."""
    head: int = 0
    """How many leading entries of ``hashes`` are tools and system messages; 0 when there are neither."""
    in_flight: int = 0
    turns: int = 0
    last_seen: float = 0.0
    prompt_ends: list[int] = field(default_factory=list)
    """Lengths of ``hashes`` at earlier requests, oldest first."""
    indexed: list[Point] = field(default_factory=list)
    segments: tuple[Segment, ...] = ()
    segments_method: str = ""
    leftover: list[bytes] = field(default_factory=list)
    """The context's chunks as they were before range edits cut it, head first, those edited away empty. What lies
    behind the cut is unusable as a prefix now and goes when the next prompt shows the new context, or with it."""
    keep_until: float = 0.0
    priority: int = 0
    """What a client last wished for this context: a bias where room is made, gone after a restart."""

    def retain(self, wish: Retention, now: float) -> None:
        """Take a wish to be kept; it replaces an earlier one."""
        self.keep_until, self.priority = now + wish.ttl_s, wish.priority


@dataclass(slots=True)
class Session:
    key: SessionKey
    explicit: bool
    parent: SessionKey | None = None
    children: set[SessionKey] = field(default_factory=set)
    threads: dict[str, Thread] = field(default_factory=dict)
    state: SessionState = SessionState.RUNNING
    since: float = 0.0
    waiting_for: tuple[str, ...] = ()
    """Names of the tools whose results are awaited."""
    expected_at: float | None = None
    """When a hint says the next request comes."""
    created: float = 0.0
    last_seen: float = 0.0
    turns: int = 0

    @property
    def id(self) -> str:
        return self.key[1]

    @property
    def tenant(self) -> str:
        return self.key[0]

    @property
    def in_flight(self) -> int:
        return sum(thread.in_flight for thread in self.threads.values())


@dataclass(slots=True, frozen=True)
class Started:
    """Where a request belongs, and the pause it ended (None where it ended none)."""

    session: Session
    thread: Thread
    change: Change
    pause: Pause | None


@dataclass(slots=True, frozen=True)
class Pause:
    """A completed pause of a session: what it waited for, and how long (seconds)."""

    state: SessionState
    tools: tuple[str, ...]
    seconds: float


def _points(tenant: str, salt: str, hashes: Sequence[bytes]) -> list[Point]:
    return [(tenant, salt, item) for item in hashes]


class SessionBook:
    """All sessions of one engine. Not thread-safe: it lives on the coordinator's event loop."""

    def __init__(self) -> None:
        self.sessions: dict[SessionKey, Session] = {}
        self._owners: dict[str, Thread] = {}
        self._prompts: dict[Point, Thread] = {}
        self._replies: dict[Point, Thread] = {}
        self._heads: dict[Point, Thread] = {}
        self._serial = 0

    # ------------------------------------------------------------ look-ups

    def get(self, tenant: str, session_id: str) -> Session | None:
        return self.sessions.get((tenant, session_id))

    def find(self, session_id: str) -> list[Session]:
        """Sessions of any tenant with this id."""
        return [s for s in self.sessions.values() if s.id == session_id]

    def thread(self, owner: str) -> Thread | None:
        return self._owners.get(owner)

    def threads(self) -> Iterator[tuple[Session, Thread]]:
        for session in self.sessions.values():
            for thread in session.threads.values():
                yield session, thread

    def tree(self, session: Session) -> list[Session]:
        """The session and all its descendants, parents first."""
        out, queue, seen = [], [session.key], {session.key}
        while queue:
            found = self.sessions.get(queue.pop(0))
            if found is None:
                continue
            out.append(found)
            for child in found.children - seen:
                seen.add(child)
                queue.append(child)
        return out

    # ------------------------------------------------------------ requests

    def start(
        self,
        *,
        tenant: str,
        ref: SessionRef,
        space: Space,
        hashes: Sequence[bytes],
        head: int,
        request_id: str,
        now: float,
    ) -> Started:
        """A request begins; see the module's text for the rules."""
        points = _points(tenant, space.salt, hashes)
        thread: Thread | None
        if ref.id is not None:
            session = self._session((tenant, ref.id), explicit=True, now=now)
            self._link(session, ref.parent, now)
            thread, change = self._thread_in(session, space, hashes, head)
        else:
            thread, change = self._thread_by_content(hashes, head, points, space)
            if thread is None:
                session = self._session(
                    (tenant, self._content_id(tenant, request_id)), explicit=False, now=now
                )
            else:
                session = self.sessions[thread.session]
        if thread is None:
            self._serial += 1
            owner = f"{session.tenant}/{session.id}#{self._serial}"
            thread = Thread(owner=owner, session=session.key, space=space)
            session.threads[owner] = self._owners[owner] = thread
        pause = self._end_pause(session, now)
        session.state, session.since, session.waiting_for = SessionState.RUNNING, now, ()
        session.expected_at = None
        session.last_seen = thread.last_seen = now
        session.turns += 1
        thread.turns += 1
        thread.in_flight += 1
        self._remember(thread, list(hashes), head, points)
        return Started(session=session, thread=thread, change=change, pause=pause)

    def finish(
        self, session: Session, thread: Thread, *, tools: Sequence[str], asked: bool, now: float
    ) -> None:
        """A request ended. ``tools``: names of the tool calls in the reply; ``asked``: the reply is complete."""
        thread.in_flight = max(0, thread.in_flight - 1)
        session.last_seen = thread.last_seen = now
        if session.in_flight or session.state is not SessionState.RUNNING:
            return
        session.since = now
        session.waiting_for = tuple(tools)
        session.state = SessionState.WAITING_TOOL if tools and asked else SessionState.WAITING_HUMAN

    def signal(
        self, tenant: str, ref: SessionRef, kind: SignalKind, eta_s: float | None, now: float
    ) -> Session | None:
        """Apply a life-cycle hint. Returns the session, or None when a signal names one that is not known."""
        if ref.id is None:
            return None
        session = self.get(tenant, ref.id)
        if session is None:
            return None
        self._link(session, ref.parent, now)
        session.last_seen = now
        if eta_s is not None:
            session.expected_at = now + max(0.0, eta_s)
        if kind in (SignalKind.TOOL_FINISHED, SignalKind.RESUME):
            session.expected_at = now if eta_s is None else session.expected_at
            if session.state in (SessionState.SUSPENDED, SessionState.WAITING_HUMAN, SessionState.ENDED):
                self._set_state(session, SessionState.WAITING_TOOL, now)
        elif kind is SignalKind.WAITING_HUMAN:
            self._set_state(session, SessionState.WAITING_HUMAN, now)
        elif kind is SignalKind.SUSPEND:
            self._set_state(session, SessionState.SUSPENDED, now)
        elif kind is SignalKind.END:
            self._set_state(session, SessionState.ENDED, now)
            session.waiting_for, session.expected_at = (), None
        return session

    def drop(self, session: Session) -> None:
        """Forget a session and its threads (its children live on, without a parent)."""
        for thread in session.threads.values():
            self._unindex(thread)
            self._owners.pop(thread.owner, None)
        for child in session.children:
            if child in self.sessions:
                self.sessions[child].parent = None
        if session.parent in self.sessions:
            self.sessions[session.parent].children.discard(session.key)
        self.sessions.pop(session.key, None)

    def surplus(self, session: Session) -> list[Thread]:
        """Forget the session's longest idle threads beyond ``MAX_THREADS``, and return them: an id that is used
        for everything names no session."""
        idle = [t for t in session.threads.values() if not t.in_flight]
        surplus = sorted(idle, key=lambda t: t.last_seen)[: max(0, len(session.threads) - MAX_THREADS)]
        for thread in surplus:
            self._unindex(thread)
            self._owners.pop(thread.owner, None)
            del session.threads[thread.owner]
        return surplus

    def restore(self, session: Session, threads: Iterable[Thread]) -> None:
        """Put back a session loaded from the store."""
        self.sessions[session.key] = session
        for thread in threads:
            session.threads[thread.owner] = self._owners[thread.owner] = thread
            self._serial = max(self._serial, int(thread.owner.rpartition("#")[2]))
            hashes, head = thread.hashes, thread.head
            thread.hashes = []
            self._remember(thread, hashes, head, _points(session.tenant, thread.space.salt, hashes))
        if session.parent is not None and session.parent in self.sessions:
            self.sessions[session.parent].children.add(session.key)
        for other in self.sessions.values():
            if other.parent == session.key:
                session.children.add(other.key)

    def head_relative(self, tenant: str, salt: str, hashes: Sequence[bytes], head: int) -> Thread | None:
        """A thread that begins with the same tools and system messages, whoever's it is; None if unknown."""
        if not head:
            return None
        return self._heads.get((tenant, salt, hashes[head - 1]))

    # ------------------------------------------------------------ inside

    @staticmethod
    def _content_id(tenant: str, request_id: str) -> str:
        return "c-" + blake3.blake3(f"{tenant}\0{request_id}".encode()).hexdigest()[:16]

    def _session(self, key: SessionKey, *, explicit: bool, now: float) -> Session:
        session = self.sessions.get(key)
        if session is None:
            session = Session(key=key, explicit=explicit, created=now, since=now, last_seen=now)
            self.sessions[key] = session
        return session

    def _link(self, session: Session, parent: str | None, now: float) -> None:
        if parent is None or parent == session.id or session.parent is not None:
            return
        key = (session.tenant, parent)
        if any(key == s.key for s in self.tree(session)):
            return  # a cycle in what clients say; the first link wins
        session.parent = key
        named = self._session(key, explicit=True, now=now)
        if not named.turns:
            named.state = SessionState.WAITING_HUMAN  # known by name only: nothing of it runs
        named.children.add(session.key)

    @staticmethod
    def _thread_in(
        session: Session, space: Space, hashes: Sequence[bytes], head: int
    ) -> tuple[Thread | None, Change]:
        same_space = [t for t in session.threads.values() if t.space == space]
        grown = [
            t
            for t in same_space
            if t.hashes and common_prefix(t.hashes, hashes) == len(t.hashes) <= len(hashes)
        ]
        if grown:
            return max(grown, key=lambda t: len(t.hashes)), Change.CONTINUED
        # Without a head to compare, sharing at least the first message tells a broken context from a side call.
        least = head if head else 2
        idle = [
            t
            for t in same_space
            if not t.in_flight and t.head == head and common_prefix(t.hashes, hashes) >= least
        ]
        if idle:
            return max(idle, key=lambda t: (common_prefix(t.hashes, hashes), t.last_seen)), Change.BROKEN
        return None, Change.NEW

    def _thread_by_content(
        self, hashes: Sequence[bytes], head: int, points: Sequence[Point], space: Space
    ) -> tuple[Thread | None, Change]:
        for n in range(len(points), head, -1):
            thread = self._prompts.get(points[n - 1])
            if thread is not None and thread.space == space and len(thread.hashes) == n:
                if n == len(points) and thread.in_flight:
                    break  # the very same prompt twice at once: two conversations, not one
                return thread, Change.CONTINUED
        for n in range(len(points), head + 1, -1):
            thread = self._replies.get(points[n - 1])
            if thread is not None and thread.space == space and not thread.in_flight:
                return thread, Change.BROKEN
        return None, Change.NEW

    def _remember(self, thread: Thread, hashes: list[bytes], head: int, points: Sequence[Point]) -> None:
        kept = common_prefix(thread.hashes, hashes)
        thread.prompt_ends = [end for end in thread.prompt_ends if end <= kept][-MAX_INDEXED_POINTS:]
        # The entry behind an earlier prompt is the reply that prompt received.
        for end in thread.prompt_ends:
            if end < len(points):
                self._replies[points[end]] = thread
                thread.indexed.append(points[end])
        thread.hashes, thread.head = hashes, head
        if points:
            self._prompts[points[-1]] = thread
            thread.indexed.append(points[-1])
            if head:
                self._heads[points[head - 1]] = thread
                thread.indexed.append(points[head - 1])
        thread.prompt_ends.append(len(hashes))
        if len(thread.indexed) > 4 * MAX_INDEXED_POINTS:
            stale, thread.indexed = (
                thread.indexed[: -2 * MAX_INDEXED_POINTS],
                thread.indexed[-2 * MAX_INDEXED_POINTS :],
            )
            self._remove_points(thread, set(stale) - set(thread.indexed))

    def _unindex(self, thread: Thread) -> None:
        self._remove_points(thread, set(thread.indexed))
        thread.indexed = []

    def _remove_points(self, thread: Thread, points: Iterable[Point]) -> None:
        for point in points:
            for index in (self._prompts, self._replies, self._heads):
                if index.get(point) is thread:
                    del index[point]

    @staticmethod
    def _set_state(session: Session, state: SessionState, now: float) -> None:
        if session.state is not state:
            session.state, session.since = state, now

    @staticmethod
    def _end_pause(session: Session, now: float) -> Pause | None:
        if session.state in (SessionState.RUNNING, SessionState.ENDED) or not session.turns:
            return None
        return Pause(session.state, session.waiting_for, max(0.0, now - session.since))
