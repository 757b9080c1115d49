"""The optimum of one tier: Belady's rule per chunk, with bypass. A bound, not a policy: it knows all requests.

Of the chunks that are there or come, those used again soonest are kept; a chunk never used again is not. A request
brings the chunks of its prompt, its end those of the reply, and what was dropped comes back with its next request
alone. All that is next used by call *c* lies on the path of *c*, as a few runs of its chunks, and goes from the tail:
an event costs a few runs, not its chunks. Nothing is pinned: what a running request uses may go, as only the next
use counts. A chunk that is there counts as a hit even where one before it is not, so no policy has more.
"""

from __future__ import annotations

import heapq

import numpy as np

from kvpilot.sim.events import Event, EventKind
from kvpilot.sim.outcome import Level, Outcome
from kvpilot.sim.workload import Ints, Workload

_Run = tuple[int, int, int]
"""(first chunk, end, the call that uses it next)"""


class NextUses:
    """After each event, which calls use the chunks of its path next. Made once for a workload."""

    def __init__(self, workload: Workload, events: list[Event]) -> None:
        self.never = workload.calls
        self.after_request: list[list[_Run]] = [[] for _ in range(workload.calls)]
        self.after_end: list[list[_Run]] = [[] for _ in range(workload.calls)]
        """Of the reply's chunks."""
        following = np.full(len(workload.size), self.never, dtype=np.int32)
        prompt_tip, context_tip = workload.prompt_tip.tolist(), workload.context_tip.tolist()
        for event in reversed(events):
            call = event.item
            if event.kind is EventKind.REQUEST:
                path = np.array(workload.path(prompt_tip[call]), dtype=np.int32)
                self.after_request[call] = _runs(workload, path, following)
                following[path] = call
            elif event.kind is EventKind.END and context_tip[call] != prompt_tip[call]:
                path = np.array(workload.path(context_tip[call], above=prompt_tip[call]), dtype=np.int32)
                self.after_end[call] = _runs(workload, path, following)


def _runs(workload: Workload, path: Ints, following: Ints) -> list[_Run]:
    if not len(path):
        return []
    uses = following[path]
    firsts = np.concatenate(([0], np.flatnonzero(np.diff(uses)) + 1))
    starts = workload.start[path[firsts]].tolist()
    ends = [*starts[1:], workload.depth(int(path[-1]))]
    return list(zip(starts, ends, uses[firsts].tolist(), strict=True))


def belady(workload: Workload, events: list[Event], uses: NextUses, capacity: int) -> Outcome:
    """O(runs) per event; ``events`` are those ``uses`` was made with."""
    hits = np.zeros(workload.calls, dtype=np.int32)
    kept = _Kept(capacity, uses.never)
    level = Level()
    for event in events:
        call = event.item
        if event.kind is EventKind.REQUEST:
            used = kept.take(call)
            hits[call] = _size(used)
            for low, high, following in uses.after_request[call]:
                kept.add(low, high, following, used)
        elif event.kind is EventKind.END:
            for low, high, following in uses.after_end[call]:
                kept.add(low, high, following)
        level.set(kept.used, event.at)
    return Outcome(hits, level.mean, level.peak, kept.written)


_Pieces = tuple[tuple[int, int], ...]
"""Disjoint stretches [first chunk, end) of a context, ascending."""


class _Kept:
    """What is kept, by the call that uses it next."""

    def __init__(self, capacity: int, never: int) -> None:
        self.used = self.written = 0
        self._capacity, self._never = capacity, never
        self._pieces: dict[int, _Pieces] = {}
        self._farthest: list[int] = []

    def take(self, call: int) -> _Pieces:
        """The call uses what was kept for it."""
        pieces = self._pieces.pop(call, ())
        self.used -= _size(pieces)
        return pieces

    def add(self, low: int, high: int, call: int, used: _Pieces = ()) -> None:
        """Chunks [low, high) come that ``call`` uses next; ``used`` was here already, of the same context."""
        if call == self._never:
            return
        before = self._pieces.get(call, ())
        if not before:
            heapq.heappush(self._farthest, -call)
        self._pieces[call] = after = _joined(before, low, high)
        self.used += _size(after) - _size(before)
        self._shrink()
        there = _within(before, low, high) + _within(used, low, high)
        self.written += max(0, _within(self._pieces.get(call, ()), low, high) - there)

    def _shrink(self) -> None:
        while self.used > self._capacity:
            last = -self._farthest[0]
            pieces = self._pieces.get(last)
            if pieces is None:
                heapq.heappop(self._farthest)
                continue
            *before, (low, high) = pieces
            gone = min(self.used - self._capacity, high - low)
            self.used -= gone
            if low + gone < high:
                before.append((low, high - gone))
            if before:
                self._pieces[last] = tuple(before)
            else:
                del self._pieces[last]
                heapq.heappop(self._farthest)


def _size(pieces: _Pieces) -> int:
    return sum(high - low for low, high in pieces)


def _within(pieces: _Pieces, low: int, high: int) -> int:
    """Chunks of the pieces that lie in [low, high)."""
    return sum(max(0, min(end, high) - max(first, low)) for first, end in pieces)


def _joined(pieces: _Pieces, low: int, high: int) -> _Pieces:
    apart = []
    for first, end in pieces:
        if end < low or high < first:
            apart.append((first, end))
        else:
            low, high = min(low, first), max(high, end)
    return tuple(sorted([*apart, (low, high)]))
