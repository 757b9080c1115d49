"""How a policy plugs in: what it is told, and what it is asked.

A policy sees a run as a proxy would (:mod:`kvpilot.sim.view`): requests, replies and, under ``hints=lifecycle``,
signals. It is asked for one thing only: when room is needed, a score for each leaf of what is resident. Whatever
scores lowest goes first, from its tail; when a leaf is gone, the node above it may have become one and is asked for
too. So a policy keeps what it knows by conversation and answers with arrays::

    class Soonest(ContextPolicy):
        def on_end(self, request, reply):
            self.due[request.context] = reply.at + self.expected_pause(reply.message.calls)

        def scores(self, leaves, now):
            return self.by_holder(leaves, -self.due, nobody=-1e18)

Others' policies are examples in :mod:`kvpilot.sim.baselines`, :class:`~kvpilot.sim.baselines.References` a simple one.
Register a policy in :mod:`kvpilot.sim.policies`. Rules the harness keeps for every policy: capacity is never exceeded,
nothing that a running request uses is evicted, no chunk stays without its predecessor, and what does not fit is
not admitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from kvpilot.sim.tree_cache import TreeCache
from kvpilot.sim.view import Reply, Request, SeenSignal, View
from kvpilot.sim.workload import Floats, Ints


@dataclass(frozen=True, slots=True)
class Run:
    """What a policy is given at its beginning. It reads ``cache``; ``release`` and ``expire`` are its to call."""

    cache: TreeCache
    view: View
    chunk_tokens: int


class ContextPolicy:
    """Base of policies over contexts: learns nothing, and takes everything new in."""

    uses_hints: ClassVar[bool] = True
    """Whether rows under different hints can differ."""

    def __init__(self, run: Run) -> None:
        self.cache = run.cache
        self.view = run.view
        self.chunk_tokens = run.chunk_tokens

    def before(self, now: float) -> None:
        """Something is about to happen: a chance to let go of what is over."""

    def on_request(self, request: Request) -> None:
        """A request arrives; its missing chunks are admitted after this."""

    def on_end(self, request: Request, reply: Reply) -> None:
        """A request ended; its reply's chunks are admitted after this."""

    def on_signal(self, signal: SeenSignal) -> None:
        """A life-cycle hint. At the end of a conversation the harness has released it already."""

    def scores(self, leaves: Ints, now: float) -> Floats:
        """A new array: a score for each leaf, lowest evicted first. Default: least recently used."""
        return self.cache.last_used[leaves]

    def newcomer(self, request: Request, now: float) -> float:
        """The score of chunks that are not here yet: they displace only lower ones. Infinity: any."""
        return math.inf

    def by_holder(
        self,
        leaves: Ints,
        values: Floats,
        nobody: float,
        join: Callable[[Iterable[float]], float] = max,
    ) -> Floats:
        """``values`` by conversation → by leaf: those of all who rest on it joined (the highest); where nobody
        does, ``nobody`` + the time of its last use, so that the oldest goes first."""
        holders = self.cache.holders
        out = nobody + self.cache.last_used[leaves]
        for index, leaf in enumerate(leaves.tolist()):
            here = holders.get(leaf)
            if here is not None:
                out[index] = join(values[context] for context in here)
        return out
