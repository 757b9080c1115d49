"""Caches that know single chunks and no contexts: LRU, LFU, ARC, S3-FIFO.

A request's chunks are used from the last to the first, as vLLM frees and LMCache touches them, so that of chunks used
together the tail is the older. What a running request uses is not evicted: where a policy's choice falls on such a
chunk, it counts as used again. When a prompt cannot get room for all its missing chunks, its first ones get it.

Sources: LRU and LFU as in textbooks (LFU: of equal counts the least recently used goes); ARC: Megiddo and Modha, FAST
2003, figure 4; S3-FIFO: Yang et al., SOSP 2023, algorithm 1. All steps are O(1) per chunk, on doubly linked lists in
arrays.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvpilot.sim.events import Event, EventKind
from kvpilot.sim.flat_policies import (
    CAPACITY,
    COUNTERS,
    PINNED,
    USED,
    WRITTEN,
    State,
    flat_access,
    flat_reply,
    flat_request,
    flat_unpin,
)
from kvpilot.sim.outcome import Level, Outcome
from kvpilot.sim.workload import Ints, Workload


class Flat(IntEnum):
    """The policies, by the number that the compiled code knows them by."""

    LRU = 0
    LFU = 1
    ARC = 2
    S3FIFO = 3


class FlatCache:
    """``chunks`` distinct chunks, of which ``capacity`` fit; no chunk is used more than ``uses`` times."""

    def __init__(self, policy: Flat, chunks: int, capacity: int, uses: int) -> None:
        lists = uses + 3 if policy is Flat.LFU else 8
        self._policy = int(policy)
        self._counters: npt.NDArray[np.int64] = np.zeros(COUNTERS, dtype=np.int64)
        self._counters[CAPACITY] = capacity
        self._state: State = (
            np.arange(chunks + lists, dtype=np.int32),
            np.arange(chunks + lists, dtype=np.int32),
            np.zeros(chunks, dtype=np.int8),
            np.zeros(chunks, dtype=np.int32),
            np.zeros(chunks, dtype=np.int32),
            self._counters,
        )

    @property
    def used(self) -> int:
        return int(self._counters[USED])

    @property
    def written(self) -> int:
        return int(self._counters[WRITTEN])

    @property
    def pinned(self) -> int:
        """Chunks here that running requests use."""
        return int(self._counters[PINNED])

    def access(self, chunk: int) -> bool:
        """One chunk on its own is used, and admitted if it was not here; whether it was."""
        return bool(flat_access(self._policy, self._state, chunk))

    def request(self, firsts: Ints, sizes: Ints) -> int:
        """A prompt of runs of chunks begins, and is pinned; how many leading chunks hit."""
        return int(flat_request(self._policy, self._state, firsts, sizes))

    def reply(self, firsts: Ints, sizes: Ints, prompt_runs: int) -> None:
        """A request ended whose prompt are the first ``prompt_runs`` runs; if that is all here the rest follows."""
        flat_reply(self._policy, self._state, firsts, sizes, prompt_runs)

    def unpin(self, firsts: Ints, sizes: Ints) -> None:
        """The prompt is in use no more."""
        flat_unpin(self._state, firsts, sizes)


def run_flat(
    workload: Workload, events: list[Event], policy: Flat, capacity: int, pin_calls: bool = True
) -> Outcome:
    """The policy in a tier of ``capacity`` chunks. O(chunks of the prompt) per event.

    ``pin_calls``: a prompt is pinned until its reply ended, not only while it is admitted.
    """
    cache = FlatCache(policy, workload.distinct_chunks, capacity, 2 * workload.calls)
    first = np.concatenate(([0], np.cumsum(workload.size, dtype=np.int32)[:-1])).astype(np.int32)
    hits = np.zeros(workload.calls, dtype=np.int32)
    prompt_tip, context_tip = workload.prompt_tip.tolist(), workload.context_tip.tolist()
    paths = _Paths(workload)
    level = Level()
    for now, kind, call in events:
        path = paths.of(prompt_tip[call])
        prompt = first[path], workload.size[path]
        if kind is EventKind.REQUEST:
            hits[call] = cache.request(*prompt)
        else:
            whole = paths.of(context_tip[call])
            cache.reply(first[whole], workload.size[whole], len(path))
        if pin_calls == (kind is EventKind.END):
            cache.unpin(*prompt)
        level.set(cache.used, now)
    return Outcome(hits, level.mean, level.peak, cache.written)


class _Paths:
    """Paths as arrays."""

    def __init__(self, workload: Workload) -> None:
        self._parent: list[int] = workload.parent.tolist()

    def of(self, tip: int) -> Ints:
        nodes = []
        parent = self._parent
        while tip >= 0:
            nodes.append(tip)
            tip = parent[tip]
        return np.array(nodes[::-1], dtype=np.int32)
