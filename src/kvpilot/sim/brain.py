"""kvpilot's own policy in the simulator: the forecasts of production rank what is resident."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvpilot.context.conversation import starts_agent
from kvpilot.domain import ToolFacts
from kvpilot.forecast import Forecaster, prior
from kvpilot.forecast.arrivals import Arrivals
from kvpilot.sim.compiled import KERNELS
from kvpilot.sim.policy import ContextPolicy, Run
from kvpilot.sim.tree_cache import TreeCache
from kvpilot.sim.view import Reply, Request, SeenSignal
from kvpilot.sim.workload import ROOT, Floats, Ints
from kvpilot.traces import ToolUse

NOW = 1e6
"""Returns per second of the conversation whose request begins next: above any forecast."""
NOBODY = -1e9
"""Added to the time of the last use of what nobody is expected to use: below any worth, the oldest first."""


class Kvpilot(ContextPolicy):
    """Evicts first what returns least per unit of room and time, and admits only what beats that."""

    def __init__(self, run: Run, forecaster: Forecaster | None = None) -> None:
        """``forecaster``: what is known already (default: what is packaged)."""
        super().__init__(run)
        self.forecaster = forecaster or knowing()
        self.arrivals = Arrivals()
        self._heard_of: set[int] = set()
        self._next_up: dict[int, float] = {}
        """Worths of those whose requests wait for room."""
        self._now = -1.0
        self._values: dict[int, Floats] = {}

    def on_request(self, request: Request) -> None:
        self._now = -1.0
        self._see(request.tip, request.at, request.head, begins=request.context not in self._heard_of)
        self._heard_of.add(request.context)
        self.forecaster.request(
            request.context,
            request.at,
            session=str(request.session),
            conversation=str(request.context),
            child=request.parent >= 0,
            added_tokens=sum(message.tok for message in request.added),
        )

    def on_end(self, request: Request, reply: Reply) -> None:
        self._now = -1.0
        self._see(reply.tip, reply.at, 0, begins=False)
        tools = [tool_facts(call) for call in reply.message.calls]
        self.forecaster.reply(request.context, reply.at, tools, reply.message.tok)

    def on_signal(self, signal: SeenSignal) -> None:
        self._now = -1.0
        self.forecaster.signal(signal.context, signal.at, signal.kind)

    def scores(self, leaves: Ints, now: float) -> Floats:
        # Returns of several holders add up; what nobody holds is below any worth.
        return self.ranked(self.cache, leaves, now)

    def ranked(self, cache: TreeCache, leaves: Ints, now: float, horizon: int = 0) -> Floats:
        """Scores of the leaves of any tier."""
        if len(leaves) == 1:
            return np.array([self._ranked_one(cache, int(leaves[0]), now, horizon)])
        held = cache.joined(leaves, self.worths(now, horizon))
        rates = self.arrivals.rates(leaves, now)
        return np.where(held + rates > 0.0, held + rates, cache.last_used[leaves] + NOBODY)

    def newcomer(self, request: Request, now: float) -> float:
        # All worths are only looked up where something has to make way.
        return self.worth(request.context, now)

    def worth(self, context: int, now: float, horizon: int = 0) -> float:
        """``worths`` of one conversation."""
        return self._next_up.get(context) or self.forecaster.worth(context, now, horizon)

    def worths(self, now: float, horizon: int = 0) -> Floats:
        """By conversation: returns per second that a unit of room held for it brings."""
        if now != self._now:
            self._values, self._now = {}, now
        if horizon not in self._values:
            self._values[horizon] = worths = self.forecaster.worths(now, horizon)
            worths[list(self._next_up)] = list(self._next_up.values())
        return self._values[horizon]

    def next_up(self, contexts: Sequence[int]) -> None:
        """These conversations' requests wait for room, in this order."""
        if not contexts and not self._next_up:
            return
        self._now = -1.0
        self._next_up = {context: NOW / place for place, context in enumerate(contexts, 1)}

    def _ranked_one(self, cache: TreeCache, leaf: int, now: float, horizon: int) -> float:
        worths, holders = self.worths(now, horizon), cache.holders.get(leaf, ())
        worth = sum(float(worths[context]) for context in sorted(holders)) + self.arrivals.rate(leaf, now)
        return worth if worth > 0.0 else NOBODY + float(cache.last_used[leaf])

    def _see(self, tip: int, now: float, head: int, begins: bool) -> None:
        """A context ends with ``tip`` now, whose first ``head`` chunks are system prompt and tools. O(new nodes), for
        the first of a conversation O(its nodes)."""
        parent, new = self.cache.parent, []
        while tip != ROOT and not self.arrivals.knows(tip):
            new.append(tip)
            tip = parent[tip]
        start = self.cache.start
        self.arrivals.see([node for node in new if start[node] >= head], now)
        self.arrivals.see([node for node in new if start[node] < head], now, head=True)
        if begins:
            known = []
            while tip != ROOT:
                known.append(tip)
                tip = parent[tip]
            self.arrivals.begin(known, now)


def knowing(horizons: Sequence[float] = (math.inf,)) -> Forecaster:
    """What is packaged, as a simulation runs it; ``horizons`` as in :class:`Forecaster`."""
    return Forecaster(prior.pauses(KERNELS), prior.cycles(KERNELS), horizons=horizons)


def tool_facts(call: ToolUse) -> ToolFacts:
    """A recorded tool call, as the reply of an engine would show it."""
    return ToolFacts(
        name=call.name,
        program=call.program,
        timeout_s=None if call.timeout_ms is None else call.timeout_ms / 1000,
        background=call.background,
        agent=call.subagent is not None or starts_agent(call.name, call.arguments or ""),
    )
