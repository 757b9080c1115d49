"""The optimum of one tier: Belady's rule per chunk, with bypass. A bound, not a policy: it knows all requests.

Of the chunks that are there or could be, those used again soonest are kept; a chunk never used again is not. This is
the rule for single chunks, yet a chunk is used whenever its successors are, so it never drops a chunk before those
behind it: all that is next used by call *c* lies on the path of *c*, as one run ``[low, high)`` of its chunks. A
request therefore costs a few runs, not its chunks. Nothing is pinned: what a running request uses may go, as only
the next use counts; at the end of its reply all of its context is there to be kept once more.
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
        following = np.full(len(workload.size), self.never, dtype=np.int32)
        prompt_tip, context_tip = workload.prompt_tip.tolist(), workload.context_tip.tolist()
        for event in reversed(events):
            call = event.item
            if event.kind is EventKind.REQUEST:
                path = np.array(workload.path(prompt_tip[call]), dtype=np.int32)
                self.after_request[call] = _runs(workload, path, following)
                following[path] = call
            elif event.kind is EventKind.END:
                path = np.array(workload.path(context_tip[call]), dtype=np.int32)
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
            hits[call] = kept.take(call)
            for low, high, following in uses.after_request[call]:
                kept.add(low, high, following, known=int(hits[call]))
        elif event.kind is EventKind.END:
            for low, high, following in uses.after_end[call]:
                kept.add(low, high, following, known=0)
        level.set(kept.used, event.at)
    return Outcome(hits, level.mean, level.peak, kept.written)


class _Kept:
    """What is kept, by the call that uses it next."""

    def __init__(self, capacity: int, never: int) -> None:
        self.used = self.written = 0
        self._capacity, self._never = capacity, never
        self._runs: dict[int, tuple[int, int]] = {}
        self._farthest: list[int] = []

    def take(self, call: int) -> int:
        """The call uses what was kept for it: how many leading chunks."""
        low, high = self._runs.pop(call, (0, 0))
        assert low == 0, "the optimum dropped a chunk before those behind it"
        self.used -= high
        return high

    def add(self, low: int, high: int, call: int, known: int) -> None:
        """Chunks [low, high) of the call's path, of which those below ``known`` were here already."""
        if call == self._never:
            return
        before = self._runs.get(call)
        if before is None:
            heapq.heappush(self._farthest, -call)
            self._runs[call] = (low, high)
        else:
            assert before[0] <= high and low <= before[1], "the optimum left a hole"
            self._runs[call] = (min(low, before[0]), max(high, before[1]))
        self.used += self._runs[call][1] - self._runs[call][0] - (before[1] - before[0] if before else 0)
        self._shrink()
        run = self._runs.get(call)
        if run is not None:
            first, end = max(low, known), min(run[1], high)
            there = max(0, min(end, before[1]) - max(first, before[0])) if before else 0
            self.written += max(0, end - first) - there

    def _shrink(self) -> None:
        while self.used > self._capacity:
            last = -self._farthest[0]
            run = self._runs.get(last)
            if run is None:
                heapq.heappop(self._farthest)
                continue
            gone = min(self.used - self._capacity, run[1] - run[0])
            self.used -= gone
            if run[0] + gone == run[1]:
                del self._runs[last]
                heapq.heappop(self._farthest)
            else:
                self._runs[last] = (run[0], run[1] - gone)
