"""Which session needs which block: sessions, their contexts, and what each is worth right now. Pure.

A block is named by the engine's chained hash of everything up to its end, so equal hashes at a position mean equal
prefixes, and a session's claim is a claim on content, wherever it lies and however often it comes and goes. Times
are seconds of any one clock, an argument everywhere. No call fails on what a client says.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from kvpilot.context.messages import common_prefix
from kvpilot.engine.returns import Returns
from kvpilot.forecast.bins import bins_of

SessionKey = tuple[str, str]
"""Salt and id: a tenant's salt is part of the name, so no tenant reaches another's sessions."""
Hash = bytes

MAX_CONTEXTS = 4096
MAX_THREADS = 8
"""Conversations that go on side by side under one session id; of more, the one unheard of longest is forgotten."""
IDLE_S = 6 * 3600.0
"""A context unheard of for so long is nobody's any more."""
GOES_ON = 0.8
"""A request goes on with the conversation of which it repeats this share of the prompt (thoughts and the like may
be gone from its end); less is another conversation under the same id."""
PROTECTED_SHARE = 0.5
"""Share of the pool within which wishes to retain are heard, in equal parts for the salts that have any."""
RANKING_S = 1.0
"""For so long contexts keep their ranks, unless somebody tells about one; those that are new rank highest."""


class Level(IntEnum):
    """Contexts of a lower level lose their blocks first; within one, those who return least likely soon."""

    DEMOTED = 0
    LIVE = 1
    PROTECTED = 2


@dataclass(slots=True, eq=False)
class Context:
    """One conversation as the engine's cache sees it."""

    number: int
    """A small number, given to another one later."""
    session: Session | None
    """None: only a wish to retain certain blocks."""
    hashes: list[Hash] = field(default_factory=list)
    """What it claims, from its head on."""
    tokens: array[int] = field(default_factory=lambda: array("I"))
    prompt_blocks: int = 0
    running: int = 0
    used_at: float = 0.0
    waits_since: float | None = None
    """When its last request ended; None while one runs."""
    expected_at: float = 0.0
    due_until: float = 0.0
    """Until then its next request may come any moment."""
    expires_at: float = 0.0
    """Of a wish."""
    taken: int = 0
    """Of its blocks, those that others were given since its last request."""
    origin: Any = None
    """Whatever the engine needs to make a request for this context again."""


@dataclass(slots=True, eq=False)
class Session:
    key: SessionKey
    parent: SessionKey | None = None
    contexts: list[Context] = field(default_factory=list)
    """The one heard of last comes last."""
    retained_until: float = 0.0
    retained_at: float = 0.0
    demoted: bool = False


@dataclass(slots=True, eq=False)
class Ranking:
    """All contexts, worst first, and the place of each by its number. Those that came since, whose next request did,
    or that somebody wishes to retain since, have no place yet: they rank above all others."""

    ascending: list[int]
    place: dict[int, int]
    made_at: float

    def of(self, number: int) -> int:
        return self.place.get(number, len(self.ascending))

    def best(self, numbers: int | set[int]) -> int:
        """Which of some contexts ranks highest."""
        if isinstance(numbers, int):
            return numbers
        return max(numbers, key=lambda number: (self.of(number), number))


class Book:
    """Sessions and their claims. ``block_tokens``: tokens of one hash; ``pool_blocks``: size of the device pool,
    ``below_blocks``: of the largest tier below it that is given out by these claims, too.

    Beginning and finishing a request cost what is new in it; a ranking costs O(contexts · log contexts).
    """

    def __init__(self, block_tokens: int, pool_blocks: int, below_blocks: int = 0) -> None:
        self.block_tokens = block_tokens
        self.pool_blocks = pool_blocks
        self._max_claims = 8 * max(pool_blocks, below_blocks)
        self._claims = 0
        self.claimed: dict[Hash, int | set[int]] = {}
        """Block → the contexts that need it: one number, or several. To look at; changed here alone."""
        self._sessions: dict[SessionKey, Session] = {}
        self._contexts: dict[int, Context] = {}
        self._free_numbers: list[int] = []
        self._returns = Returns()
        self._ranking: Ranking | None = None
        self.wishes = 0
        """Wishes for certain blocks there are."""
        self.taken = 0
        """Blocks that contexts needed and others were given, of all."""
        self.on_lost: Callable[[int, int], None] = lambda number, length: None
        """Called with a context's number after it gave up claims on what ends more than ``length`` tokens from its
        head."""

    # ------------------------------------------------------------ what happens

    def begin(
        self,
        key: SessionKey,
        hashes: Sequence[Hash],
        now: float,
        *,
        parent: str | None = None,
        supersedes: bool = False,
    ) -> Context:
        """A request of a session with a prompt of these whole blocks. What its conversation held before and the
        prompt has no more is given up; with ``supersedes`` the session's other idle conversations are, too."""
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(key)
        if parent and (key[0], parent) != key:
            session.parent = (key[0], parent)
        session.demoted = False
        context = self._going_on(session, hashes) or self._new_context(session)
        context.expected_at = context.due_until = 0.0
        context.taken = 0
        if supersedes:
            for other in [c for c in session.contexts if c is not context and not c.running]:
                self._forget(other)
        self._sessions[key] = session
        if context.waits_since is not None:
            self._returns.observe(session.parent is not None, now - context.waits_since, now)
            context.waits_since = None
        context.running += 1
        self._lose_place(context)
        context.prompt_blocks = len(hashes)
        context.used_at = now
        if session.contexts[-1] is not context:
            session.contexts.remove(context)
            session.contexts.append(context)
        self._set_claims(context, hashes)
        self._make_room(context)
        return context

    def finish(
        self,
        context: Context,
        hashes: Sequence[Hash],
        tokens: Sequence[int],
        now: float,
        *,
        last: bool = False,
    ) -> None:
        """A request of this context ended, with these whole blocks and tokens; ``last``: its session is over."""
        context.running = max(0, context.running - 1)
        context.used_at = now
        if self._contexts.get(context.number) is not context:
            return  # Its session was evicted meanwhile.
        self._set_claims(context, hashes)
        _append(context.tokens, tokens[len(context.tokens) :])
        if last and context.session is not None:
            self.end(context.session.key)
        elif not context.running:
            context.waits_since = now

    def learn(self, key: SessionKey, hashes: Sequence[Hash], tokens: Sequence[int], now: float) -> Context:
        """Somebody says that the session holds this idle context of whole blocks; it comes last of its contexts."""
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(key)
        context = self._going_on(session, hashes) or self._new_context(session)
        self._sessions[key] = session  # where making room had forgotten it
        if context.waits_since is None:
            context.waits_since = now
        context.prompt_blocks = len(hashes)
        context.used_at = now
        session.contexts.remove(context)
        session.contexts.append(context)
        self._set_claims(context, hashes)
        _append(context.tokens, tokens[len(context.tokens) :])
        self._make_room(context)
        self._ranking = None
        return context

    def expect(self, context: Context, at: float) -> None:
        """Somebody says when the conversation's next request comes."""
        context.expected_at = at
        self._awaited(context)

    def due(self, context: Context, until: float) -> None:
        """Somebody says that the conversation's next request comes any moment, up to then."""
        context.due_until = until
        self._awaited(context)

    def _awaited(self, context: Context) -> None:
        if context.session is not None:
            context.session.demoted = False
        self._ranking = None

    def end(self, key: SessionKey, *, tree: bool = False) -> list[Hash]:
        """The session is over (and its descendants); returns the claims that were given up, without repeats."""
        lost: dict[Hash, None] = {}
        for session in self.sessions(key, tree=tree):
            for context in list(session.contexts):
                lost.update(dict.fromkeys(context.hashes))
                self._forget(context)
            self._sessions.pop(session.key, None)
        return list(lost)

    def give_up(self, key: SessionKey, hashes: Iterable[Hash]) -> None:
        """The session no longer needs these blocks; what lies behind them in its contexts is of no use then."""
        session = self._sessions.get(key)
        gone = set(hashes)
        for context in list(session.contexts) if session else []:
            cut = next((i for i, value in enumerate(context.hashes) if value in gone), None)
            if cut is not None:
                self._set_claims(context, context.hashes[:cut], keep_tokens=True)
                self._ranking = None

    def claim_again(self, context: Context, hashes: Sequence[Hash]) -> None:
        """A context claims these blocks of its tokens (again)."""
        self._set_claims(context, hashes, keep_tokens=True)
        self._ranking = None

    def demote(self, key: SessionKey) -> None:
        """Nobody expects the session soon: until its next request its blocks go before other sessions'."""
        if (session := self._sessions.get(key)) is not None:
            session.demoted = True
            session.retained_until = 0.0
            for context in session.contexts:
                context.expected_at = context.due_until = 0.0
            self._ranking = None

    def retain(self, key: SessionKey, until: float, now: float) -> bool:
        """Whatever the session holds until then is reused last, within the budget. False: it is not known."""
        session = self._sessions.get(key)
        if session is None:
            return False
        session.retained_until, session.retained_at, session.demoted = until, now, False
        for context in session.contexts:
            self._lose_place(context)  # Until the next ranking: a wish may come with every request.
        return True

    def retain_blocks(self, salt: str, hashes: Sequence[Hash], until: float, now: float) -> None:
        """The same for certain blocks, whoever needs them."""
        context = self._add(Context(0, None, used_at=now, expires_at=until, origin=salt))
        self.wishes += 1
        self._set_claims(context, hashes)
        self._ranking = None
        self._make_room(context)

    def release(self, key: SessionKey) -> None:
        if (session := self._sessions.get(key)) is not None:
            session.retained_until = 0.0
            self._ranking = None

    def release_blocks(self, hashes: Iterable[Hash]) -> int:
        """Wishes for any of these blocks end; returns how many did."""
        gone = set(hashes)
        wishes = [c for c in self._contexts.values() if c.session is None and not gone.isdisjoint(c.hashes)]
        for wish in wishes:
            self._forget(wish)
        return len(wishes)

    def gave(self, number: int, blocks: int) -> None:
        """So many blocks that a context needs are given to whoever asks for room."""
        self.taken += blocks
        if (context := self._contexts.get(number)) is not None:
            context.taken += blocks

    def displaced(self, most: int) -> list[tuple[SessionKey, int]]:
        """Sessions that lost blocks to others since their last request, and how many; those that lost most."""
        found = [
            (session.key, taken)
            for session in self._sessions.values()
            if (taken := sum(context.taken for context in session.contexts))
        ]
        return sorted(found, key=lambda entry: -entry[1])[:most]

    def tick(self, now: float) -> None:
        """Time passed: wishes end, contexts nobody was heard of from are forgotten."""
        for context in list(self._contexts.values()):
            idle = context.session is not None and not context.running and now - context.used_at > IDLE_S
            if idle or (context.session is None and context.expires_at <= now):
                self._forget(context)
        for session in [s for s in self._sessions.values() if not s.contexts and s.retained_until <= now]:
            del self._sessions[session.key]

    # ------------------------------------------------------------ what is known

    def __len__(self) -> int:
        """Sessions known."""
        return len(self._sessions)

    @property
    def claims(self) -> int:
        return self._claims

    def holds_from_the_head(self, number: int) -> bool:
        """Whether a context claims all that lies before what it claims, as a conversation does, and a wish need not."""
        context = self._contexts.get(number)
        return context is not None and context.session is not None

    def needed(self, value: Hash, context: Context, *, last: bool) -> bool:
        """Whether somebody will ask for what a request of this context made: unless the session ends with it
        (``last``) or was given up, its next request; else who claims it beside."""
        known = self._contexts.get(context.number) is context
        if known and not last:
            return True
        claimants = self.claimed.get(value)
        return claimants is not None and not (known and claimants == context.number)

    def get(self, key: SessionKey) -> Session | None:
        return self._sessions.get(key)

    def sessions(self, key: SessionKey, *, tree: bool) -> list[Session]:
        """The session, with ``tree`` and its descendants; those that are known."""
        if tree:
            return self.family(key)
        session = self._sessions.get(key)
        return [session] if session is not None else []

    def family(self, key: SessionKey) -> list[Session]:
        """A session and its descendants, those that are known."""
        children: dict[SessionKey, list[SessionKey]] = {}
        for session in self._sessions.values():
            if session.parent is not None:
                children.setdefault(session.parent, []).append(session.key)
        found: dict[SessionKey, None] = {}
        todo = [key]
        while todo:
            one = todo.pop()
            if one not in found:
                found[one] = None
                todo += children.get(one, ())
        return [self._sessions[one] for one in found if one in self._sessions]

    def ranking(self, now: float) -> Ranking:
        """All contexts, worst first: by level, then by worth, then the one heard of longer ago first; of those whose
        requests are there the other way round: who has waited in the engine's queue longest is served next."""
        if self._ranking is None or not 0 <= now - self._ranking.made_at < RANKING_S:
            ascending = [entry[2] for level in self._levels(now) for entry in sorted(level)]
            self._ranking = Ranking(ascending, {number: i for i, number in enumerate(ascending)}, now)
        return self._ranking

    def _levels(self, now: float) -> list[list[tuple[float, float, int]]]:
        """Of each level: worth, when it was heard of last (or how long ago its request came), and number, of each
        context."""
        main, child = (self._returns.curve(child, now).worth for child in (False, True))
        protected = self._protected(now)
        levels: list[list[tuple[float, float, int]]] = [[] for _ in Level]
        demoted, live, kept = levels
        since = [now if c.waits_since is None else c.waits_since for c in self._contexts.values()]
        bins = bins_of(now - np.array(since)).tolist()
        for (number, context), reached in zip(self._contexts.items(), bins, strict=True):
            level = kept if number in protected else live
            if context.running:
                level.append((math.inf, -context.used_at, number))
                continue
            session = context.session
            if level is live and (session is None or session.demoted):
                level = demoted
            worth = 0.0
            if session is not None and context.waits_since is not None:
                worth = (main if session.parent is None else child)[reached]
                if context.expected_at > 0:
                    worth = max(worth, _announced(context.expected_at - now))
                if context.due_until > now:
                    worth = max(worth, _announced(0.0))
            level.append((worth, context.used_at, number))
        return levels

    def _protected(self, now: float) -> set[int]:
        """Contexts somebody wishes to retain, the latest wishes first, as far as the budget of their salt goes."""
        wishes: dict[str, list[tuple[float, Context]]] = {}
        for context in self._contexts.values():
            session = context.session
            if session is None and context.expires_at > now:
                wishes.setdefault(str(context.origin), []).append((context.used_at, context))
            elif session is not None and session.retained_until > now:
                wishes.setdefault(session.key[0], []).append((session.retained_at, context))
        found: set[int] = set()
        for by_salt in wishes.values():
            left = PROTECTED_SHARE * self.pool_blocks / len(wishes)
            for _, context in sorted(by_salt, key=lambda wish: wish[0], reverse=True):
                if len(context.hashes) <= left:
                    left -= len(context.hashes)
                    found.add(context.number)
        return found

    # ------------------------------------------------------------ claims

    def _set_claims(self, context: Context, hashes: Sequence[Hash], *, keep_tokens: bool = False) -> None:
        """The context claims exactly these from now on; of its tokens those stay that are still right."""
        old = context.hashes
        common = common_prefix(old, hashes)
        if common == len(old) == len(hashes):
            return
        if not keep_tokens:
            del context.tokens[common * self.block_tokens :]
        lost, new = old[common:], hashes[common:]
        del old[common:]
        old.extend(new)
        self._claims += len(new) - len(lost)
        number, claimed = context.number, self.claimed
        for value in new:
            if claimed.setdefault(value, number) != number:
                self._share(value, number)
        if lost:
            for value in lost if not new else set(lost).difference(new):
                if (found := claimed.pop(value, number)) != number:
                    self._unshare(value, number, found)
            self.on_lost(context.number, common * self.block_tokens)

    def _share(self, value: Hash, number: int) -> None:
        """Somebody else claims it beside."""
        found = self.claimed[value]
        if isinstance(found, set):
            found.add(number)
        else:
            self.claimed[value] = {found, number}

    def _unshare(self, value: Hash, number: int, found: int | set[int]) -> None:
        """Others, who go on claiming it, claimed it beside."""
        if isinstance(found, set):
            found.discard(number)
            found = found if len(found) > 1 else found.pop()
        self.claimed[value] = found

    # ------------------------------------------------------------ contexts

    def _going_on(self, session: Session, hashes: Sequence[Hash]) -> Context | None:
        """The idle conversation that a prompt goes on with: the one it shares most with, if that is enough."""
        best, most = None, -1
        for context in session.contexts:
            if context.running:
                continue
            common = common_prefix(context.hashes, hashes)
            if common > most and common >= GOES_ON * context.prompt_blocks:
                best, most = context, common
        return best

    def _new_context(self, session: Session) -> Context:
        idle = [context for context in session.contexts if not context.running]
        for context in idle[: max(0, len(session.contexts) + 1 - MAX_THREADS)]:
            self._forget(context)
        context = self._add(Context(0, session))
        session.contexts.append(context)
        return context

    def _add(self, context: Context) -> Context:
        context.number = self._free_numbers.pop() if self._free_numbers else len(self._contexts)
        self._contexts[context.number] = context
        self._lose_place(context)
        return context

    def _lose_place(self, context: Context) -> None:
        if self._ranking is not None:
            self._ranking.place.pop(context.number, None)

    def _forget(self, context: Context) -> None:
        self._set_claims(context, ())
        del self._contexts[context.number]
        self._free_numbers.append(context.number)
        if (session := context.session) is None:
            self.wishes -= 1
        else:
            session.contexts.remove(context)
            if not session.contexts and session.retained_until <= 0.0:
                self._sessions.pop(session.key, None)

    def _make_room(self, spare: Context) -> None:
        """Memory stays bounded: who was not heard of longest is forgotten."""
        if len(self._contexts) <= MAX_CONTEXTS and self._claims <= self._max_claims:
            return
        for context in sorted(self._contexts.values(), key=lambda c: c.used_at):
            if context is spare or context.running:
                continue
            self._forget(context)
            if len(self._contexts) <= MAX_CONTEXTS and self._claims <= self._max_claims:
                return

    def contexts(self) -> Iterator[Context]:
        return iter(self._contexts.values())


def _announced(seconds: float) -> float:
    """Worth, in returns per second, of room kept for a return that was announced; long overdue ones count less."""
    return 1.0 / max(0.1, seconds if seconds >= 0 else -2 * seconds)


def _append(tokens: array[int], more: Sequence[int]) -> None:
    if isinstance(more, list):
        tokens.fromlist(more)  # In half the time.
    else:
        tokens.extend(more)
