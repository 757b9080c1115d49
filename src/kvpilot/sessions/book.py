"""The session tree: who is talking, in which conversations, and what each of them is doing now.

Pure state: no clock, no I/O. A *session* is a label (given by the client, or made here when the content had to
tell); a *thread* is one growing conversation inside it. Most sessions have one thread; a client that sends side
calls (titles, sub-tasks with another system prompt) under one id gets several, so that a side call never counts
as a compaction of the main conversation.

How a request finds its thread (``SessionBook.start``): with an id, inside that session, a thread whose last
messages are a prefix of the new ones is *continued*; otherwise an idle thread with the same head (tools and
system messages) has had its context *broken* (compacted, cleared, rewound); otherwise it is a new thread. Without an id
the same by content over the tenant: a continuation needs the whole known prompt as prefix, a break needs that
a reply this thread received is part of the new prompt (or, as text, of its first messages: a summary); sharing only
the head is a new session. See ``by_content``.

A new session without an id that starts while another one's reply has called agents is that one's child: the one
whose call is nearest in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import blake3

from kvpilot.context.messages import common_prefix
from kvpilot.domain import SessionRef, SessionState, SignalKind, Space
from kvpilot.sessions.by_content import ContentIndex
from kvpilot.sessions.kinship import Kinship
from kvpilot.sessions.labels import Labels
from kvpilot.sessions.thread import Change, Point, SessionKey, Thread

__all__ = ["MAX_THREADS", "Change", "Session", "SessionBook", "SessionKey", "Started", "Thread"]

MAX_THREADS = 64
"""Conversations under one session id that are kept apart."""


@dataclass(slots=True)
class Session:
    key: SessionKey
    explicit: bool
    parent: SessionKey | None = None
    parent_guessed: bool = False
    """Nobody named the parent: good enough to foresee by, not to end a session with another."""
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
    """Where a request belongs. ``kept``: how many leading hashes of its prompt its thread's last prompt had, too."""

    session: Session
    thread: Thread
    change: Change
    kept: int


def _points(tenant: str, salt: str, hashes: Sequence[bytes]) -> list[Point]:
    return [(tenant, salt, item) for item in hashes]


def _head(hashes: Sequence[bytes], head: int) -> bytes:
    return hashes[head - 1] if 0 < head <= len(hashes) else b""


class SessionBook:
    """All sessions of one engine. Not thread-safe: it lives on the coordinator's event loop."""

    def __init__(self) -> None:
        self.sessions: dict[SessionKey, Session] = {}
        self._owners: dict[str, Thread] = {}
        self._content = ContentIndex()
        self._kinship = Kinship()
        self._labels = Labels()
        self._serial = 0

    # ------------------------------------------------------------ look-ups

    def get(self, tenant: str, session_id: str) -> Session | None:
        key = (tenant, session_id)
        return self.sessions.get(key) or self.sessions.get(self._labels.session(key) or key)

    def find(self, session_id: str) -> list[Session]:
        """Sessions of any tenant with this id."""
        return [s for s in self.sessions.values() if s.id == session_id]

    def thread(self, owner: str) -> Thread | None:
        return self._owners.get(owner)

    def threads(self) -> Iterator[tuple[Session, Thread]]:
        for session in self.sessions.values():
            for thread in session.threads.values():
                yield session, thread

    def tree(self, session: Session, *, named: bool = False) -> list[Session]:
        """The session and all its descendants, parents first; with ``named`` only those whose parent was named."""
        out, queue, seen = [], [session.key], {session.key}
        while queue:
            found = self.sessions.get(queue.pop(0))
            if found is None or (named and found.parent_guessed and found is not session):
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
        opening: Sequence[str] = (),
        said: Callable[[], Sequence[bytes]] = tuple,
        whole: bool = True,
    ) -> Started:
        """A request begins; see the module's text for the rules.

        ``opening``: texts of the first messages behind the head; ``said``: names of the replies among all, the
        latest first (as ``finish`` is told them). ``whole``: the hashes name the whole prompt, so
        that equal ones are equal prompts.
        """
        points = _points(tenant, space.salt, hashes)
        thread: Thread | None
        if ref.id is not None and not self._is_label((tenant, ref.id), ref.parent, points, head):
            session = self._session((tenant, ref.id), explicit=True, now=now)
            self._link(session, ref.parent, now)
            if not session.turns and session.parent is None:
                self._adopt(session, self._kinship.born(session.key, space, _head(hashes, head), now))
            thread, change = self._thread_in(session, space, hashes, head, points)
        else:
            thread, change = self._content.find(space, points, head, opening, said, whole=whole, now=now)
            if thread is None:
                session = self._session(
                    (tenant, self._content_id(tenant, request_id)), explicit=False, now=now
                )
                self._adopt(session, self._kinship.born(session.key, space, _head(hashes, head), now))
            else:
                session = self.sessions[thread.session]
        if ref.id is not None and session.id != ref.id:
            self._labels.alias((tenant, ref.id), session.key)
        if thread is not None and thread.awaits_tools and change is Change.CONTINUED:
            self._disown_strangers(session, thread)
        if thread is None:
            self._serial += 1
            owner = f"{session.tenant}/{session.id}#{self._serial}"
            thread = Thread(owner=owner, session=session.key, space=space)
            session.threads[owner] = self._owners[owner] = thread
        session.state, session.since, session.waiting_for = SessionState.RUNNING, now, ()
        session.expected_at = None
        session.last_seen = thread.last_seen = now
        session.turns += 1
        thread.turns += 1
        thread.in_flight += 1
        thread.answered = thread.awaits_tools = False
        kept = self._remember(thread, list(hashes), head, points)
        return Started(session=session, thread=thread, change=change, kept=kept)

    def finish(
        self,
        session: Session,
        thread: Thread,
        *,
        tools: Sequence[str],
        asked: bool,
        now: float,
        text: str = "",
        name: bytes | None = None,
        agents: int = 0,
    ) -> None:
        """A request ended. ``tools``: names of the tool calls in the reply, ``agents`` of which start agents;
        ``text``: what it says, ``name``: what it is known by; ``asked``: the reply is complete."""
        thread.in_flight = max(0, thread.in_flight - 1)
        thread.answered, thread.awaits_tools = asked, bool(tools) and asked
        if agents:
            own = _head(thread.hashes, thread.head)
            for child in self._kinship.called(session.key, thread.space, own, thread.last_seen, agents, now):
                if child in self.sessions:
                    self._adopt(self.sessions[child], session.key)
        session.last_seen = thread.last_seen = now
        if thread.owner in self._owners:
            self._content.told(thread, "" if tools or not asked else text, name)
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
            self._forget(thread)
        for child in session.children:
            if child in self.sessions:
                self.sessions[child].parent = None
        if session.parent in self.sessions:
            self.sessions[session.parent].children.discard(session.key)
        self.sessions.pop(session.key, None)

    def surplus(self, session: Session) -> list[Thread]:
        """Forget the session's longest idle threads beyond ``MAX_THREADS``, and return them: an id that is used
        for everything names no session."""
        idle = [t for t in session.threads.values() if not t.unsettled]
        surplus = sorted(idle, key=lambda t: t.last_seen)[: max(0, len(session.threads) - MAX_THREADS)]
        for thread in surplus:
            self._forget(thread)
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
            points = _points(session.tenant, thread.space.salt, hashes)
            self._remember(thread, hashes, head, points, kept=len(hashes))
        if session.parent is not None and session.parent in self.sessions:
            self.sessions[session.parent].children.add(session.key)
        for other in self.sessions.values():
            if other.parent == session.key:
                session.children.add(other.key)

    def head_relatives(self, thread: Thread) -> list[Thread]:
        """Other threads that begin with the same tools and system messages, whoever's they are, the latest first."""
        if not thread.head:
            return []
        point = (thread.session[0], thread.space.salt, thread.hashes[thread.head - 1])
        return [other for other in self._content.alike(point) if other is not thread]

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
        named_before = session.parent is not None and not session.parent_guessed
        if parent is None or parent == session.id or named_before:
            return
        key = (session.tenant, parent)
        if any(key == s.key for s in self.tree(session)):
            return  # a cycle in what clients say; the first link wins
        if session.parent in self.sessions:
            self.sessions[session.parent].children.discard(session.key)
        session.parent, session.parent_guessed = key, False
        named = self._session(key, explicit=True, now=now)
        if not named.turns:
            named.state = SessionState.WAITING_HUMAN  # known by name only: nothing of it runs
        named.children.add(session.key)

    def _thread_in(
        self,
        session: Session,
        space: Space,
        hashes: Sequence[bytes],
        head: int,
        points: Sequence[Point],
    ) -> tuple[Thread | None, Change]:
        shared = {
            t.owner: common_prefix(t.hashes, hashes) for t in session.threads.values() if t.space == space
        }
        same_space = [session.threads[owner] for owner in shared]
        grown = [t for t in same_space if t.hashes and shared[t.owner] == len(t.hashes)]
        if grown:
            return max(grown, key=lambda t: len(t.hashes)), Change.CONTINUED
        alike = [t for t in same_space if t.head == head]
        # A message in common besides the head shows a broken context; the head alone, only where there is no
        # other conversation it could be: siblings under one id that wait for their tools have the same head.
        akin = [t for t in alike if not t.in_flight and shared[t.owner] > max(head, 1)]
        if not akin and head:
            alike = [t for t in alike if shared[t.owner] >= head]
            akin = [t for t in alike if len(alike) == 1 and not t.in_flight and not t.awaits_tools]
            if akin and self._content.left_at(points, space):
                akin = []  # it goes on from where a conversation was before that was taken for broken
        if akin:
            return max(akin, key=lambda t: (shared[t.owner], t.last_seen)), Change.BROKEN
        return None, Change.NEW

    def _is_label(self, key: SessionKey, parent: str | None, points: Sequence[Point], head: int) -> bool:
        """Whether an id names a single request, so that content must tell whose it is."""
        if key in self.sessions or self._labels.session(key) is not None:
            self._labels.came_again(key[0])
            return key not in self.sessions and self._labels.rotate(key[0])
        if parent not in (None, key[1]):
            return False  # a branch of another session, by its own words
        thread = self._content.tip(points, head)
        if thread is not None and self.sessions[thread.session].turns == 1:
            self._labels.went_on_under_another(key[0], thread.owner)
        return self._labels.rotate(key[0])

    def _forget(self, thread: Thread) -> None:
        self._content.forget(thread)
        self._owners.pop(thread.owner, None)

    def _adopt(self, child: Session, parent: SessionKey | None) -> None:
        """Make ``parent`` the parent that a session was found to have, whose own it does not name."""
        if parent is None or child.parent is not None or parent not in self.sessions:
            return
        if all(parent != session.key for session in self.tree(child)):
            child.parent, child.parent_guessed = parent, True
            self.sessions[parent].children.add(child.key)

    def _disown_strangers(self, session: Session, thread: Thread) -> None:
        """An agent that was called has ended when its caller goes on. Who began like the caller itself and is still
        at work then was only another session that happened to begin at that moment."""
        own = _head(thread.hashes, thread.head)
        for key in list(session.children):
            child = self.sessions.get(key)
            if child is None or not child.parent_guessed:
                continue
            at_work = child.in_flight or child.state is SessionState.WAITING_TOOL
            if at_work and any(_head(t.hashes, t.head) == own for t in child.threads.values()):
                child.parent, child.parent_guessed = None, False
                session.children.discard(key)

    def _remember(
        self,
        thread: Thread,
        hashes: list[bytes],
        head: int,
        points: Sequence[Point],
        kept: int | None = None,
    ) -> int:
        kept = common_prefix(thread.hashes, hashes) if kept is None else kept
        self._content.moved(thread, points, kept)
        thread.hashes, thread.head = hashes, head
        if head and points:
            self._content.begins_with(thread, points[head - 1])
        return kept

    @staticmethod
    def _set_state(session: Session, state: SessionState, now: float) -> None:
        if session.state is not state:
            session.state, session.since = state, now
