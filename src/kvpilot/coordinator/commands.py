"""From what somebody asks for (a session, a range of its messages, chunks) to work on chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from kvpilot.context.chunks import ChunkHasher, parse_hash
from kvpilot.context.conversation import Body, content_hashes, decode_body
from kvpilot.context.messages import common_prefix
from kvpilot.context.segments import SegmentedPrompt, spans_of_messages, spans_of_tools
from kvpilot.coordinator.actions import Work
from kvpilot.domain import Command, Space, TargetKind
from kvpilot.sessions.book import Session, SessionBook, Thread
from kvpilot.sessions.references import ReferenceTable

SegmentsOf = Callable[[Thread], Awaitable[SegmentedPrompt | None]]


class Missing(LookupError):
    """The target is not known, or no longer matches what the client describes."""


@dataclass(slots=True)
class Target:
    """What a command is about.

    ``whole``: complete sessions. ``cut``: token position from which a range edit makes the context useless.
    A target that is neither is a set of chunks, and no context gives up anything for it.
    """

    sessions: list[Session] = field(default_factory=list)
    threads: list[Thread] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    whole: bool = False
    cut: int | None = None

    @property
    def turns(self) -> list[int]:
        """How many requests each session had: others later mean that they went on."""
        return [session.turns for session in self.sessions]

    def went_on(self, turns: Sequence[int]) -> bool:
        """Whether a session had another request since it had ``turns``."""
        # After a crash it may be known with fewer than it had.
        return any(now > then for now, then in zip(self.turns, turns, strict=True))

    @property
    def gives_up(self) -> bool:
        return self.whole or self.cut is not None


class Resolver:
    """Finds what a command is about. Nothing is changed here."""

    def __init__(
        self,
        book: SessionBook,
        references: ReferenceTable,
        hasher: ChunkHasher,
        segments_of: SegmentsOf,
        block_size: int,
    ):
        self._book = book
        self._references = references
        self._hasher = hasher
        self._segments_of = segments_of
        self._block_size = block_size

    async def resolve(self, command: Command, space: Space) -> Target:
        """Raises Missing with the reason."""
        if command.target is TargetKind.CHUNKS:
            return self._chunks(command, space)
        if command.session.id is None:
            raise Missing("no session id given")
        session = self._book.get(command.tenant, command.session.id)
        if session is None:
            raise Missing(f"session {command.session.id!r} is not known")
        if command.target is TargetKind.SESSION:
            return self.tree(session)
        return await self._range(session, command)

    def tree(self, session: Session) -> Target:
        sessions = self._book.tree(session, named=True)
        threads = [
            t
            for s in sessions
            for t in s.threads.values()
            if t.owner in self._references or t.leftover or t.unsettled
        ]
        threads.sort(key=lambda t: -t.last_seen)
        works = [self.context(t) for t in threads if t.owner in self._references]
        return Target(sessions, threads, works, whole=True)

    def context(self, thread: Thread) -> Work:
        """All the thread holds now; no chunks when it holds nothing."""
        held = thread.owner in self._references
        chunks = self._references.chunks(thread.owner) if held else ()
        return Work(thread.space, tuple(chunks), thread.owner)

    def _chunks(self, command: Command, space: Space) -> Target:
        """Hashes a client names, in its own tenant's spaces only. Their order is not to be trusted: the
        longest known context that has them gives it."""
        threads = [
            thread
            for session, thread in self._book.threads()
            if session.tenant == command.tenant and thread.owner in self._references
        ]
        spaces = list(dict.fromkeys([*(thread.space for thread in threads), space]))
        left = self._named(command.chunks, spaces)
        works, used = [], []
        while left and threads:
            best = max(threads, key=lambda t: len(left.intersection(self._references.chunks(t.owner))))
            ordered = [c for c in self._references.chunks(best.owner) if c in left]
            if not ordered:
                break
            works.append(Work(best.space, tuple(ordered), best.owner))
            used.append(best)
            left.difference_update(ordered)
        if left:
            works += [Work(known, tuple(sorted(left))) for known in spaces]
        if not works:
            raise Missing("none of the chunk hashes is known")
        return Target(threads=used, works=works)

    def given_up(self, work: Work) -> Target:
        """Chunks that their context is done with: it keeps what lies before the first that only it holds."""
        thread = self._book.thread(work.owner) if work.owner else None
        if thread is None or thread.owner not in self._references:
            return Target(works=[work])
        own = set(exclusively_held(self._references, work, (thread.owner,)))
        chunks = self._references.chunks(thread.owner)
        first = next((index for index, chunk in enumerate(chunks) if chunk in own), None)
        if first is None:
            return Target(works=[work])
        session = self._book.sessions[thread.session]
        return Target([session], [thread], [work], cut=first * self._hasher.chunk_size)

    def _named(self, texts: Sequence[str], spaces: Sequence[Space]) -> set[bytes]:
        named: set[bytes] = set()
        for text in texts:
            try:
                value = parse_hash(text)
            except ValueError as error:
                raise Missing(str(error)) from None
            if isinstance(value, bytes):
                named.add(value)
                continue
            resolved = (self._references.resolve(space, value) for space in spaces)
            named.update(full for full in resolved if full is not None)
        return named

    async def _range(self, session: Session, command: Command) -> Target:
        body = decode_body(command.body)
        hashes = content_hashes(body)
        threads = [t for t in session.threads.values() if t.owner in self._references]
        if not threads:
            raise Missing(f"session {session.id!r} holds no context")
        thread = max(threads, key=lambda t: (common_prefix(t.hashes, hashes), t.last_seen))
        if command.target in (TargetKind.TOKENS, TargetKind.BLOCKS):
            if len(threads) > 1 and common_prefix(thread.hashes, hashes) < len(thread.hashes):
                raise Missing("the session has several contexts and the messages do not tell which one")
            return self._cut(session, thread, *self._counted(thread, command))
        segmented = await self._segments_of(thread)
        if thread.owner not in self._references:
            raise Missing(f"session {session.id!r} gave its context up meanwhile")
        if segmented is None:
            raise Missing("the context's message boundaries are not known")
        return self._cut(session, thread, *self._span(thread, segmented, body, hashes, command))

    def _counted(self, thread: Thread, command: Command) -> tuple[int, int]:
        """A span given in tokens, or in blocks of the engine, the last of which may be part full."""
        size = self._block_size if command.target is TargetKind.BLOCKS else 1
        cut_away = len(thread.leftover) * self._hasher.chunk_size
        total = max(self._references.length(thread.owner), cut_away)
        if command.end > -(-total // size):
            raise Missing(f"the range ends behind the context, which has {total} tokens")
        return command.start * size, min(command.end * size, total)

    def _cut(self, session: Session, thread: Thread, start: int, end: int) -> Target:
        chunks = thread.leftover or self._references.chunks(thread.owner)
        # A chunk the range only touches holds content that is gone: no context can use it whole any more.
        touched = self._hasher.touched(start, end)
        left = tuple(chunk for chunk in chunks[touched.start : touched.stop] if chunk)
        work = Work(thread.space, left, thread.owner)
        return Target([session], [thread], [work], cut=start)

    def _span(
        self,
        thread: Thread,
        segmented: SegmentedPrompt,
        body: Body,
        hashes: Sequence[bytes],
        command: Command,
    ) -> tuple[int, int]:
        known = (
            len(thread.hashes) - 1
        )  # messages of the last prompt; its reply may follow in the client's list
        if command.target is TargetKind.TOOLS:
            if not hashes or not thread.hashes or hashes[0] != thread.hashes[0]:
                raise Missing("the tools are not those of the session's last request")
            span = spans_of_tools(segmented, command.start, command.end)
        else:
            end = min(command.end, known)
            if common_prefix(hashes, thread.hashes) < 1 + end or command.start > known:
                raise Missing("the messages up to the range are not those of the session's last request")
            total = self._references.length(thread.owner)
            if command.start == known:
                ends = segmented.message_ends
                if known - 1 in segmented.inexact:
                    raise Missing("where the last message ends is not known")
                return (ends[-1] if ends else 0), total
            span = spans_of_messages(segmented, command.start, end)
            if span is not None and command.end > known:
                return span[0], total
        if span is None:
            raise Missing("the range's token span is not known")
        return span


def evictable(references: ReferenceTable, works: Sequence[Work], owners: Collection[str]) -> int:
    """How many chunks would have no holder left once ``owners`` gave up their references."""
    wanted: dict[Space, dict[bytes, None]] = {}
    for work in works:
        wanted.setdefault(work.space, {}).update(dict.fromkeys(work.chunks))
    return sum(
        len(exclusively_held(references, Work(space, tuple(chunks)), owners))
        for space, chunks in wanted.items()
    )


def exclusively_held(references: ReferenceTable, work: Work, owners: Collection[str]) -> tuple[bytes, ...]:
    """Those of the work's chunks that nobody but ``owners`` references."""
    own: Counter[bytes] = Counter()
    for owner in set(owners):
        if owner in references and references.space(owner) == work.space:
            own.update(references.chunks(owner))
    holders = references.holders(work.space, work.chunks)
    return tuple(chunk for chunk, n in zip(work.chunks, holders, strict=True) if n <= own[chunk])


def disjoint(works: Sequence[Work]) -> list[Work]:
    """The works without what an earlier one has already."""
    seen: set[tuple[Space, bytes]] = set()
    out = []
    for work in works:
        chunks = tuple(chunk for chunk in work.chunks if (work.space, chunk) not in seen)
        seen.update((work.space, chunk) for chunk in chunks)
        if chunks:
            out.append(Work(work.space, chunks, work.owner))
    return out
