"""From what the gateway saw to what the sessions' contexts are: events in, references moved."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpilot.context.conversation import (
    Body,
    added_bytes,
    content_hashes,
    head_length,
    named_replies,
    opening_texts,
    read_reply,
    read_request,
)
from kvpilot.context.tokens import PromptParser, parse_tokens
from kvpilot.coordinator.forecasts import Forecasts
from kvpilot.domain import (
    PromptKnown,
    RequestFinished,
    RequestStarted,
    Signal,
    Space,
    TokenArray,
)
from kvpilot.sessions.book import Change, Session, SessionBook, Started, Thread
from kvpilot.sessions.references import ReferenceTable, Released

BYTES_PER_TOKEN = 4
"""About as much JSON as text is a token, where nobody counts."""


@dataclass(slots=True)
class Pending:
    """A request under way."""

    started: Started
    path: str
    body: Body
    hashes: Sequence[bytes]
    at: float
    turn: int
    """Which of its thread's requests it is."""
    added: int = 0
    """About how many tokens it has that its thread did not have before."""
    prompt: TokenArray | None = None
    asked: bool = False
    """Its tokens were asked from the engine, as the reply does not tell them: once is enough."""
    awaited: bool = False
    """They were, and the answer is still to come."""
    ended: RequestFinished | None = None
    """How it ended, while its tokens are still awaited."""


@dataclass(slots=True)
class MapperStats:
    events: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    mapped: int = 0
    mapped_within_1s: int = 0
    without_request: int = 0
    """Prompts and ends whose start was shed or came before a restart."""
    expired: int = 0


@dataclass(frozen=True, slots=True)
class Mapped:
    """A request's prompt is known and its thread's reference has moved. ``reply`` is None until it ended."""

    session: Session
    thread: Thread
    path: str
    """By which API the request came."""
    body: Body
    hashes: Sequence[bytes]
    prompt: TokenArray
    output: TokenArray | None
    reply: bytes
    released: Released
    change: Change
    reply_tokens: int = 0
    """How many tokens the reply had."""


class Mapper:
    """``space_of(salt)`` names the KV space of a request; ``clock`` gives unix seconds."""

    def __init__(
        self,
        book: SessionBook,
        references: ReferenceTable,
        forecasts: Forecasts,
        space_of: Callable[[str], Space],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.book = book
        self.references = references
        self.forecasts = forecasts
        self._space_of = space_of
        self._clock = clock
        self._pending: dict[str, Pending] = {}
        self._late: dict[str, Pending] = {}
        """Ended, but their tokens are still to come."""
        self._prompts = PromptParser()
        self.stats = MapperStats()

    def forget(self, owner: str) -> None:
        """A thread is over."""
        self._prompts.forget(owner)

    def on_started(self, event: RequestStarted) -> Started:
        body = read_request(event.path, event.body)
        hashes, head = content_hashes(body), head_length(body)
        started = self.book.start(
            tenant=event.tenant,
            ref=event.session,
            space=self._space_of(event.salt),
            hashes=hashes,
            head=head,
            request_id=event.request_id,
            now=event.at,
            opening=opening_texts(body),
            said=lambda: named_replies(body),
            whole="messages" in body,
        )
        if event.retention is not None:
            started.thread.retain(event.retention, event.at)
        added = added_bytes(body, started.kept) // BYTES_PER_TOKEN
        self.forecasts.started(started.session, started.thread, added, event.at)
        self.stats.changes[started.change.value] += 1
        self._pending[event.request_id] = Pending(
            started, event.path, body, hashes, event.at, started.thread.turns, added
        )
        if started.change is Change.NEW:
            self._borrow_head(started.thread)
        return started

    def _borrow_head(self, thread: Thread) -> None:
        """Until the prompt's tokens are known, hold the system prompt a relative has: it is about to be read."""
        for relative in self.book.head_relatives(thread):
            if relative.owner not in self.references or relative.space != thread.space:
                continue
            end = max((s.end for s in relative.segments if s.message < thread.head - 1), default=0)
            if end:
                self.references.set(thread.owner, thread.space, self.references.tokens(relative.owner)[:end])
                return

    def on_prompt(self, event: PromptKnown) -> Mapped | None:
        pending = self._pending.get(event.request_id)
        if pending is None:
            self.stats.without_request += 1
            return None
        if event.prompt_ids:
            self._read_prompt(pending, event.prompt_ids)
        if pending.prompt is None or pending.turn < pending.started.thread.mapped_turn:
            return None
        return self._move(pending, pending.prompt, None, b"")

    def ask(self, request_id: str) -> Pending | None:
        """A running request whose tokens are going to be asked from the engine; None when it is no chat, or they
        are known or were asked for already."""
        pending = self._pending.get(request_id)
        if pending is None or pending.asked or pending.prompt is not None or not pending.body.get("messages"):
            return None
        pending.asked = pending.awaited = True
        return pending

    def on_answer(self, request_id: str, prompt: TokenArray | None) -> Mapped | None:
        """What the engine said about a request that was asked for; None when it said nothing to rely on."""
        late = self._late.pop(request_id, None)
        pending = late or self._pending.get(request_id)
        if pending is None:
            return None
        pending.awaited = False
        if late is not None:
            late.started.thread.awaited -= 1
        if prompt is None:
            return None
        pending.prompt = prompt
        if pending.ended is not None:
            return self._map_end(pending, pending.ended)
        if pending.turn < pending.started.thread.mapped_turn:
            return None
        return self._move(pending, prompt, None, b"")

    def running(self, request_id: str) -> Pending | None:
        """The request, while it runs."""
        return self._pending.get(request_id)

    def on_finished(self, event: RequestFinished) -> Mapped | None:
        pending = self._pending.pop(event.request_id, None)
        if pending is None:
            self.stats.without_request += 1
            return None
        session, thread = pending.started.session, pending.started.thread
        complete = event.status < 400 and not event.aborted
        reply = read_reply(event.message)
        self.book.finish(
            session,
            thread,
            tools=[tool.name for tool in reply.tools],
            asked=complete,
            now=event.at,
            text=reply.text,
            name=reply.name,
            agents=reply.agents,
        )
        tokens = event.completion_token_count or len(event.message) // BYTES_PER_TOKEN
        self.forecasts.finished(session, thread, reply.tools, tokens, event.at, broken=not complete)
        if event.prompt_ids:
            self._read_prompt(pending, event.prompt_ids)
        if pending.prompt is None:
            if pending.awaited and event.prompt_token_count:
                pending.ended = event
                self._late[event.request_id] = pending
                thread.awaited += 1
            return None
        return self._map_end(pending, event)

    def lost(self, event: RequestFinished) -> Pending | None:
        """A chat that was broken off before anything was told of its tokens; to be asked before its end is taken
        in."""
        pending = self._pending.get(event.request_id)
        told = event.prompt_ids or event.prompt_token_count
        if pending is None or not event.aborted or told or pending.prompt is not None:
            return None
        return pending if pending.body.get("messages") else None

    def on_recovered(self, pending: Pending, prompt: TokenArray) -> Mapped | None:
        """Such a chat's tokens are known after all."""
        if pending.turn < pending.started.thread.mapped_turn:
            return None
        pending.prompt = prompt
        return self._move(pending, prompt, None, b"")

    def _map_end(self, pending: Pending, event: RequestFinished) -> Mapped | None:
        thread = pending.started.thread
        assert pending.prompt is not None
        if pending.turn < thread.mapped_turn:
            # A later request of the conversation was mapped already: its context is the thread's.
            self.stats.mapped += 1
            return None
        output = parse_tokens(event.output_ids)
        # The last sampled token was never fed back: its KV does not exist.
        output = pending.prompt[:0] if output is None else output[:-1]
        mapped = self._move(
            pending,
            np.concatenate((pending.prompt, output)),
            output,
            event.message,
            event.completion_token_count,
        )
        self.stats.mapped += 1
        if self._clock() - event.at <= 1.0:
            self.stats.mapped_within_1s += 1
        return mapped

    def _read_prompt(self, pending: Pending, ids: bytes) -> None:
        pending.prompt = self._prompts.parse(ids, pending.started.thread.owner)

    def on_signal(self, event: Signal) -> Session | None:
        session = self.book.signal(event.tenant, event.session, event.kind, event.eta_s, event.at)
        if session is not None:
            self.forecasts.signal(session, event.kind, event.eta_s, event.at)
        if session is not None and event.retention is not None:
            for thread in session.threads.values():
                thread.retain(event.retention, event.at)
        return session

    def coming(self) -> int:
        """About how many tokens running requests have that nobody holds a reference to yet."""
        return sum(pending.added for pending in self._pending.values() if pending.prompt is None)

    def expire(self, older_than: float) -> list[Session]:
        """Close requests whose end was never told (shed, or a gateway worker died); returns whose they were."""
        ended = []
        for request_id, pending in list(self._pending.items()):
            if pending.at < older_than:
                del self._pending[request_id]
                self.stats.expired += 1
                started = pending.started
                now = self._clock()
                self.book.finish(started.session, started.thread, tools=(), asked=False, now=now)
                self.forecasts.finished(started.session, started.thread, (), 0, now, broken=True)
                ended.append(started.session)
        return ended

    def unmapped(self, space: Space) -> bool:
        """Whether a request runs whose context nobody holds a reference to yet: its tokens are not known."""
        return any(
            pending.prompt is None
            and pending.started.change is not Change.CONTINUED
            and pending.started.thread.space == space
            for pending in (*self._pending.values(), *self._late.values())
        )

    def _move(
        self,
        pending: Pending,
        tokens: TokenArray,
        output: TokenArray | None,
        reply: bytes,
        reply_tokens: int = 0,
    ) -> Mapped:
        started = pending.started
        thread = started.thread
        thread.mapped_turn = pending.turn
        if self.book.thread(thread.owner) is not thread:
            # Forgotten while this request ran or its tokens were awaited: its context has no live holder any more.
            self.references.set(thread.owner, thread.space, tokens)
            released = self.references.drop(thread.owner)
        else:
            released = self.references.set(thread.owner, thread.space, tokens)
        assert pending.prompt is not None
        return Mapped(
            session=started.session,
            thread=thread,
            path=pending.path,
            body=pending.body,
            hashes=pending.hashes,
            prompt=pending.prompt,
            output=output,
            reply=reply,
            released=released,
            change=started.change,
            reply_tokens=reply_tokens,
        )
