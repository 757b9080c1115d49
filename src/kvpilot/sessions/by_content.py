"""Finding the conversation a request goes on with by its content alone.

Chained hashes name places in conversations: one hash, everything before it. A conversation is known by its *tip*
(its last prompt), by the replies it received at places that are still the same, by the tip a break left behind, by
the last text it was given (a summary comes back inside the compacted context), and by replies that come back
behind something else (a compaction that keeps the last exchanges, a cleared message further ahead).

Pure state. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvpilot.domain import Space
from kvpilot.sessions.thread import Change, Point, Thread

MAX_POINTS = 64
"""Per conversation: how many of its earlier prompts stay recognisable."""
MIN_QUOTED, MIN_SUMMARY, MAX_SUMMARY = 40, 200, 64 * 1024
"""Characters of a reply that is looked for in a new context, as a whole message or (from 200) as part of one:
shorter ones may turn up anywhere by chance."""
MAX_SUMMARIES = 256
MAX_PLACES, MAX_WAITS = 256, 16
"""Places where several conversations stood at once, and waits remembered of each."""
SAME_TIME = 0.005
"""Share by which equal waits may differ."""

_K = TypeVar("_K")


class ContentIndex:
    """Places in conversations → the threads that were there."""

    def __init__(self) -> None:
        self._tips: dict[Point, list[Thread]] = {}
        self._replies: dict[Point, list[Thread]] = {}
        self._left: dict[Point, list[Thread]] = {}
        self._heads: dict[Point, list[Thread]] = {}
        self._said: dict[Point, list[Thread]] = {}
        """By what a reply was, wherever it stands."""
        self._texts: OrderedDict[str, Thread] = OrderedDict()
        """Threads by owner whose last reply may be a summary, the latest last."""
        self._waits: OrderedDict[Point, list[float]] = OrderedDict()
        """How long each of several conversations had waited at a place when one of them went on."""

    def __bool__(self) -> bool:
        return bool(self._tips or self._replies or self._left or self._heads or self._said or self._texts)

    def find(
        self,
        space: Space,
        points: Sequence[Point],
        head: int,
        opening: Sequence[str],
        said: Callable[[], Sequence[bytes]],
        *,
        whole: bool,
        now: float,
    ) -> tuple[Thread | None, Change]:
        """The conversation a prompt belongs to, and how it relates to what that had before.

        ``points``: places of the prompt, head first, ``head`` of them tools and system messages. ``opening``:
        texts of its first messages behind those. ``said``: names of the replies among its messages, the latest
        first; asked for only when nothing else tells. ``whole``: the last place names the whole prompt.
        """
        thread = self._continued(space, points, head, whole=whole, now=now)
        if thread is not None:
            return thread, Change.CONTINUED
        thread, known = self._broken(space, points, head)
        if not known:
            thread = self._summarised(space, points, head, opening) or self._retold(space, points, head, said)
        return (thread, Change.BROKEN) if thread is not None else (None, Change.NEW)

    def _continued(
        self, space: Space, points: Sequence[Point], head: int, *, whole: bool, now: float
    ) -> Thread | None:
        # The first place only says that there are no tools.
        for n in range(len(points), max(head, 1), -1):
            there = [t for t in self._tips.get(points[n - 1], ()) if t.space == space]
            idle = [t for t in there if not t.in_flight]
            if n < len(points):
                there = idle or there
            elif whole:
                # The very same prompt again: a retry, a stateless client, or else a copy of this conversation
                # that has come as far as it.
                there = [t for t in idle if not t.answered or len(t.prompt_ends) == 1]
            else:
                there = []  # what differs may lie behind the last place
            if there:
                return there[0] if len(there) == 1 else self._next_of(there, points[n - 1], now)
        return None

    def _next_of(self, copies: Sequence[Thread], place: Point, now: float) -> Thread:
        """Which of several conversations that stand at the same place goes on.

        Their content tells nothing; they take turns. But copies keep the same time: where one has waited as long
        as one of those did who were here when another went on, it is that one's turn (whoever had waited longer
        may have ended).
        """
        waits = [now - thread.last_seen for thread in copies]
        before = self._waits.setdefault(place, [])
        in_time = [
            thread
            for thread, wait in zip(copies, waits, strict=True)
            if any(abs(wait - other) <= SAME_TIME * other for other in before)
        ]
        before += waits
        del before[:-MAX_WAITS]
        self._waits.move_to_end(place)
        if len(self._waits) > MAX_PLACES:
            self._waits.popitem(last=False)
        return min(in_time or copies, key=lambda thread: thread.last_seen)

    def _broken(self, space: Space, points: Sequence[Point], head: int) -> tuple[Thread | None, bool]:
        """The conversation that is broken, and whether the place is known at all."""
        for n in range(len(points), head + 1, -1):
            if n < len(points) and any(t.space == space for t in self._left.get(points[n - 1], ())):
                return None, True  # what looked like a break there was another conversation branching off
            there = [t for t in self._replies.get(points[n - 1], ()) if t.space == space]
            if there:
                if any(_retraces(points, t) for t in there):
                    return None, True  # a copy of this conversation, behind it
                idle = [t for t in there if not t.in_flight]
                return max(idle, key=lambda t: t.last_seen, default=None), True
        return None, False

    def _summarised(
        self, space: Space, points: Sequence[Point], head: int, opening: Sequence[str]
    ) -> Thread | None:
        quoted = [
            thread
            for thread in self._texts.values()
            if thread.space == space and any(_quotes(text, thread.last_text) for text in opening)
        ]
        # What several conversations were told says nothing about which of them this is.
        if len(quoted) == 1 and _may_be_broken(quoted[0], space, points, head):
            return quoted[0]
        return None

    def _retold(
        self, space: Space, points: Sequence[Point], head: int, said: Callable[[], Sequence[bytes]]
    ) -> Thread | None:
        if not points:
            return None
        tenant, salt, _ = points[0]
        for name in said():
            there = self._said.get((tenant, salt, name), ())
            if len(there) == 1 and _may_be_broken(there[0], space, points, head):
                return there[0]
        return None

    def left_at(self, points: Sequence[Point], space: Space) -> bool:
        """Whether a conversation was at a place before this prompt's end when it was taken for broken."""
        return any(t.space == space for point in points[:-1] for t in self._left.get(point, ()))

    def tip(self, points: Sequence[Point], head: int) -> Thread | None:
        """An idle thread whose last prompt, and a reply to it, this prompt goes on from."""
        for n in range(len(points) - 1, max(head, 1), -1):
            for thread in self._tips.get(points[n - 1], ()):
                if not thread.in_flight:
                    return thread
        return None

    def alike(self, point: Point) -> list[Thread]:
        """Threads whose tools and system messages end at ``point``, the latest first."""
        return self._heads.get(point, [])[::-1]

    # ------------------------------------------------------------ changes

    def moved(self, thread: Thread, points: Sequence[Point], kept: int) -> None:
        """The thread's prompt is now at ``points``, of which the first ``kept`` are those of its last one.

        To be called before the thread's own fields change.
        """
        if thread.hashes:
            tip = (thread.session[0], thread.space.salt, thread.hashes[-1])
            _take(self._tips, tip, thread)
            if kept < len(thread.hashes):
                self._put(self._left, tip, thread)
        thread.prompt_ends = [end for end in thread.prompt_ends if end <= kept][-MAX_POINTS:]
        # The entry behind an earlier prompt is the reply that prompt received.
        for end in thread.prompt_ends:
            if end < len(points):
                self._put(self._replies, points[end], thread)
        if points:
            self._put(self._tips, points[-1], thread)
        if not thread.prompt_ends or thread.prompt_ends[-1] != len(points):
            thread.prompt_ends.append(len(points))

    def begins_with(self, thread: Thread, point: Point) -> None:
        """The thread's tools and system messages end at ``point``."""
        self._put(self._heads, point, thread)

    def told(self, thread: Thread, text: str, name: bytes | None) -> None:
        """The thread's last reply: its text where it could be a summary, else empty, and what names it."""
        if name is not None:
            self._put(self._said, (thread.session[0], thread.space.salt, name), thread)
        self._texts.pop(thread.owner, None)
        thread.last_text = text.strip() if MIN_QUOTED <= len(text) <= MAX_SUMMARY else ""
        if thread.last_text:
            self._texts[thread.owner] = thread
            if len(self._texts) > MAX_SUMMARIES:
                self._texts.popitem(last=False)

    def forget(self, thread: Thread) -> None:
        self._texts.pop(thread.owner, None)
        self._remove(thread, thread.indexed)
        thread.indexed = []

    def _put(self, index: dict[Point, list[Thread]], point: Point, thread: Thread) -> None:
        there = index.setdefault(point, [])
        if thread in there:
            there.remove(thread)
        else:
            thread.indexed.append(point)
        there.append(thread)
        if len(thread.indexed) > 4 * MAX_POINTS:
            stale, thread.indexed = thread.indexed[: -2 * MAX_POINTS], thread.indexed[-2 * MAX_POINTS :]
            self._remove(thread, set(stale) - set(thread.indexed))

    def _remove(self, thread: Thread, points: Iterable[Point]) -> None:
        for point in points:
            for index in (self._tips, self._replies, self._left, self._heads, self._said):
                _take(index, point, thread)


def _retraces(points: Sequence[Point], thread: Thread) -> bool:
    """Whether the prompt is a beginning of what the thread has had already."""
    n = len(points)
    return 0 < n <= len(thread.hashes) and thread.hashes[n - 1] == points[-1][2]


def _may_be_broken(thread: Thread, space: Space, points: Sequence[Point], head: int) -> bool:
    """Whether an idle thread begins with the same tools and system messages."""
    begin = max(head, 1) - 1
    return (
        thread.space == space
        and not thread.in_flight
        and thread.head == head
        and len(thread.hashes) > begin
        and len(points) > begin
        and thread.hashes[begin] == points[begin][2]
    )


def _quotes(text: str, reply: str) -> bool:
    return reply in text if len(reply) >= MIN_SUMMARY else reply == text.strip()


def _take(index: dict[_K, list[Thread]], key: _K, thread: Thread) -> None:
    there = index.get(key)
    if there is not None and thread in there:
        there.remove(thread)
        if not there:
            del index[key]
