"""One tier that holds the heads of contexts: of each path in the tree some leading chunks, never a hole.

What is resident is itself a tree; room is made at its leaves, from their tails. A running request pins what it has
there: to its end, or while it is admitted. Each conversation *rests* on the deepest resident node of its context: a
leaf on which none rests is of no live context (superseded, or of an ended session). A conversation that shares a path
with a longer resident one of somebody else rests where its own last call left it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvpilot.sim.workload import ROOT, Floats, Ints, Workload

ScoreLeaves = Callable[[Ints, float], Floats]
"""(leaves, now) → a new array with a score each. What scores lowest goes first; infinity is never evicted."""

_BRINGING = -1
"""Pins like a call does; calls are numbered from 0."""


def _never(leaves: Ints, now: float) -> Floats:
    return np.full(len(leaves), np.inf)


class TreeCache:
    """Chunks of one tier. Every operation is O(changed nodes), making room also O(leaves)."""

    def __init__(self, workload: Workload, capacity: int, pin_calls: bool = True) -> None:
        """``pin_calls``: a request pins what it has here until its end, not only while it is admitted."""
        nodes = len(workload.size)
        self.capacity = capacity
        self._pin_calls = pin_calls
        self.used = 0
        self.written = 0
        """Chunks admitted so far."""
        self.last_used: Floats = np.full(nodes, -np.inf)
        """By node, of leaves: when a call last went through it."""
        self.holders: dict[int, set[int]] = {}
        """Node → the conversations that rest on it."""
        self.start: list[int] = workload.start.tolist()
        """By node: chunks of the contexts in front of it."""
        self.parent: list[int] = workload.parent.tolist()
        self._size: list[int] = workload.size.tolist()
        self._resident = [0] * nodes
        self._children = [0] * nodes
        self._leaves: dict[int, None] = {}
        self._pins: dict[int, dict[int, int]] = {}
        self._pinned_at: dict[int, int] = {}
        self._rests_on: dict[int, int] = {}
        self._rests: Ints = np.full(64, ROOT, dtype=np.int32)
        """``_rests_on`` as an array by conversation."""
        self._place: Ints = np.full(nodes + 1, -1, dtype=np.int32)
        """Scratch; the last place is ROOT's."""
        self.on_evict: Callable[[int, int], None] | None = None
        """Called with a leaf and how many chunks of its tail are about to go."""

    def resident(self, node: int) -> int:
        """Chunks of ``node`` that are here: its first ones."""
        return self._resident[node]

    def held(self, tip: int) -> int:
        """Leading chunks that are here of the context that ends with ``tip``. O(missing nodes)."""
        node = self._deepest(tip)
        return 0 if node == ROOT else self.start[node] + self._resident[node]

    def rests_on(self, context: int) -> int:
        """The node on which a conversation rests (ROOT: nothing of it is here, or it was released)."""
        return self._rests_on.get(context, ROOT)

    def depth_of(self, context: int) -> int:
        """Leading chunks of a conversation that are here, in O(1)."""
        node = self._rests_on.get(context, ROOT)
        return 0 if node == ROOT else self.start[node] + self._resident[node]

    def tails(self) -> tuple[Ints, npt.NDArray[np.int64]]:
        """What could go first: leaves, and how many chunks could go from there up before somebody else, or a running
        request, is touched. O(nodes of those)."""
        tails = {leaf: n for leaf in self._leaves if (n := self._tail(leaf))}
        return np.array(list(tails), dtype=np.int32), np.array(list(tails.values()), dtype=np.int64)

    def joined(self, leaves: Ints, values: Floats) -> Floats:
        """``values`` by conversation → by leaf: those of all who rest on it added up. O(leaves + conversations)."""
        n = min(len(values), len(self._rests))
        place, rests = self._place, self._rests[:n]
        place[leaves] = np.arange(len(leaves), dtype=np.int32)
        at = place[rests]
        place[leaves] = -1
        there = at >= 0
        # Of no values at all numpy makes integers.
        return np.bincount(at[there], values[:n][there], len(leaves)).astype(np.float64, copy=False)

    def release(self, context: int) -> None:
        """The conversation is over, or taken for it: it rests on nothing any more."""
        node = self._rests_on.pop(context, ROOT)
        if node != ROOT:
            self._rests[context] = ROOT
            self._leave(node, context)

    def expire(self, before: float) -> None:
        """What was last used ``before`` that moment goes, except what running requests use. O(leaves)."""
        last_used = self.last_used
        old = [leaf for leaf in self._leaves if last_used[leaf] < before]
        while old:
            leaf = old.pop()
            self._evict(leaf, self._loose(leaf))
            above = self.parent[leaf]
            if above in self._leaves and last_used[above] < before:
                old.append(above)

    def fill(self, tip: int) -> int:
        """Admits all of a context where everything fits; how many leading chunks were here before."""
        found = self._deepest(tip)
        hit = 0 if found == ROOT else self.start[found] + self._resident[found]
        self._admit(tip, found, 0.0, _never, 0.0)
        return hit

    def request(
        self, call: int, tip: int, context: int, now: float, scores: ScoreLeaves, newcomer: float
    ) -> int:
        """A request begins: its prompt is pinned, what is missing is admitted from its head as far as it fits.

        Missing chunks displace only leaves that score below ``newcomer``. Returns the chunks that hit.
        """
        found = self._deepest(tip)
        hit = 0 if found == ROOT else self.start[found] + self._resident[found]
        self._pin(call, found)
        self._admit(tip, found, now, scores, newcomer)
        self._unpin(call)
        node = self._deepest(tip)
        if self._pin_calls:
            self._pin(call, node)
        self._rest(context, node, now)
        return hit

    def end(
        self,
        call: int,
        prompt_tip: int,
        tip: int,
        context: int | None,
        now: float,
        scores: ScoreLeaves,
        newcomer: float,
    ) -> None:
        """A request ended: its reply is admitted behind its prompt (if all of that is here), the pin removed.

        ``context`` None: the conversation has gone on already and rests elsewhere.
        """
        found = self._deepest(tip)
        whole = prompt_tip == ROOT or self._resident[prompt_tip] == self._size[prompt_tip]
        if whole and tip != prompt_tip:
            self._unpin(call)
            self._pin(call, found)
            self._admit(tip, found, now, scores, newcomer)
        self._unpin(call)
        node = self._deepest(tip)
        if context is not None:
            self._rest(context, node, now)
        elif node != ROOT:
            self.last_used[node] = max(self.last_used[node], now)

    def bring(
        self, context: int | None, tip: int, most: int, now: float, scores: ScoreLeaves, newcomer: float
    ) -> int:
        """Admits up to ``most`` more leading chunks of what ends with ``tip``, as a request for it would; how many
        it were. ``context``: the conversation it is brought for."""
        found = self._deepest(tip)
        self._pin(_BRINGING, found)
        taken = self._admit(tip, found, now, scores, newcomer, most)
        self._unpin(_BRINGING)
        if context is not None:
            self._rest(context, self._deepest(tip), now)
        return taken

    def follow(self, context: int, tip: int, now: float) -> None:
        """The conversation's context ends with ``tip`` now: it rests on what is here of that."""
        self._rest(context, self._deepest(tip), now)

    def check(self) -> None:
        """Raises AssertionError when the books do not add up (for tests)."""
        assert 0 <= self.used <= self.capacity
        assert self.used == sum(self._resident)
        for node, resident in enumerate(self._resident):
            above = self.parent[node]
            if resident and above != ROOT:
                assert self._resident[above] == self._size[above], "a chunk is here without its predecessor"
            is_leaf = resident > 0 and self._children[node] == 0
            assert (node in self._leaves) == is_leaf
        for node, pins in self._pins.items():
            assert max(pins.values()) <= self._resident[node], "a pinned chunk is gone"

    # ------------------------------------------------------------------------------------------------ inside

    def _deepest(self, tip: int) -> int:
        resident, parent = self._resident, self.parent
        while tip != ROOT and resident[tip] == 0:
            tip = parent[tip]
        return tip

    def _admit(
        self, tip: int, found: int, now: float, scores: ScoreLeaves, newcomer: float, most: int | None = None
    ) -> int:
        missing = []
        node = tip
        while node != found:
            missing.append(node)
            node = self.parent[node]
        if found != ROOT and self._resident[found] < self._size[found]:
            missing.append(found)
        wanted = sum(self._size[node] - self._resident[node] for node in missing)
        if most is not None:
            wanted = min(wanted, most)
        if not wanted:
            return 0
        room = self.capacity - self.used
        if wanted > room:
            room += self._make_room(wanted - room, now, scores, newcomer)
        room = min(room, wanted)
        admitted = 0
        for node in reversed(missing):
            take = min(room, self._size[node] - self._resident[node])
            if not take:
                break
            if not self._resident[node]:
                self._appear(node)
            self._resident[node] += take
            admitted += take
            room -= take
        self.used += admitted
        self.written += admitted
        return admitted

    def _make_room(self, wanted: int, now: float, scores: ScoreLeaves, newcomer: float) -> int:
        """Evicts up to ``wanted`` chunks; how many it were."""
        leaves = [leaf for leaf in self._leaves if self._loose(leaf)]
        if not leaves:
            return 0
        freed = 0
        values = scores(np.array(leaves, dtype=np.int32), now)
        exposed: list[tuple[float, int]] = []
        while freed < wanted:
            first = int(values.argmin())
            value, leaf = float(values[first]), leaves[first]
            if exposed and exposed[0] < (value, leaf):
                value, leaf = heapq.heappop(exposed)
            else:
                values[first] = np.inf
            if value == np.inf or value >= newcomer:
                break
            freed += self._evict(leaf, wanted - freed)
            above = self.parent[leaf]
            if above != ROOT and above in self._leaves and not self._resident[leaf] and self._loose(above):
                heapq.heappush(exposed, (float(scores(np.array([above], dtype=np.int32), now)[0]), above))
        return freed

    def _loose(self, leaf: int) -> int:
        """Chunks of a leaf that no running request pins."""
        pins = self._pins.get(leaf)
        return self._resident[leaf] - max(pins.values()) if pins else self._resident[leaf]

    def _tail(self, leaf: int) -> int:
        """Chunks from the end of a leaf up that only those hold who rest on it."""
        resident, children, pins, holders, parent = (
            self._resident,
            self._children,
            self._pins,
            self.holders,
            self.parent,
        )
        chunks = 0
        node = leaf
        while node not in pins:
            chunks += resident[node]
            node = parent[node]
            if node == ROOT or children[node] > 1 or node in holders:
                return chunks
        return chunks + self._loose(node)

    def _evict(self, leaf: int, most: int) -> int:
        gone = min(most, self._loose(leaf))
        if self.on_evict is not None:
            self.on_evict(leaf, gone)
        self._resident[leaf] -= gone
        self.used -= gone
        if not self._resident[leaf]:
            self._vanish(leaf)
        return gone

    def _appear(self, node: int) -> None:
        self._leaves[node] = None
        above = self.parent[node]
        if above != ROOT:
            self._children[above] += 1
            self._leaves.pop(above, None)

    def _vanish(self, node: int) -> None:
        del self._leaves[node]
        above = self.parent[node]
        movers = self.holders.pop(node, None)
        if above == ROOT:
            for context in movers or ():
                del self._rests_on[context]
                self._rests[context] = ROOT
            return
        self._children[above] -= 1
        if not self._children[above]:
            self._leaves[above] = None
        self.last_used[above] = max(self.last_used[above], self.last_used[node])
        if movers:
            for context in movers:
                self._rests_on[context] = self._rests[context] = above
            here = self.holders.get(above)
            if here is None:
                self.holders[above] = movers
            else:
                here |= movers

    def _rest(self, context: int, node: int, now: float) -> None:
        before = self._rests_on.get(context, ROOT)
        if node != before:
            if before != ROOT:
                self._leave(before, context)
                del self._rests_on[context]
            while context >= len(self._rests):
                self._rests = np.concatenate((self._rests, np.full_like(self._rests, ROOT)))
            self._rests[context] = node
            if node != ROOT:
                self._rests_on[context] = node
                self.holders.setdefault(node, set()).add(context)
        if node != ROOT:
            self.last_used[node] = max(self.last_used[node], now)

    def _leave(self, node: int, context: int) -> None:
        here = self.holders[node]
        here.discard(context)
        if not here:
            del self.holders[node]

    def _pin(self, call: int, node: int) -> None:
        if node != ROOT:
            self._pins.setdefault(node, {})[call] = self._resident[node]
            self._pinned_at[call] = node

    def _unpin(self, call: int) -> None:
        node = self._pinned_at.pop(call, ROOT)
        if node != ROOT:
            pins = self._pins[node]
            del pins[call]
            if not pins:
                del self._pins[node]
