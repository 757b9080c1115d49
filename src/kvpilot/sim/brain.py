"""kvpilot's own policy in the simulator: the forecasts of production rank what is resident."""

from __future__ import annotations

import numpy as np

from kvpilot.domain import SignalKind
from kvpilot.forecast import prior
from kvpilot.forecast.features import (
    Cycle,
    Pause,
    ToolFacts,
    cycle_features,
    pause_features,
    slowest,
)
from kvpilot.forecast.hazard import HazardModel
from kvpilot.forecast.waits import Waits
from kvpilot.sim.policy import ContextPolicy, Run
from kvpilot.sim.view import Reply, Request, SeenSignal
from kvpilot.sim.workload import Floats, Ints
from kvpilot.traces import ToolUse


class Kvpilot(ContextPolicy):
    """Evicts first what returns least per unit of room and time, and admits only what beats that."""

    def __init__(
        self, run: Run, pauses: HazardModel | None = None, cycles: HazardModel | None = None
    ) -> None:
        """``pauses`` and ``cycles``: what is known already (default: what is packaged)."""
        super().__init__(run)
        self.pauses = Waits(pauses or prior.pauses())
        self.cycles = Waits(cycles or prior.cycles())
        contexts = run.view.contexts
        self._running = np.zeros(contexts, dtype=np.int32)
        self._turns = [0] * contexts
        self._last_s: list[float | None] = [None] * contexts
        self._after: list[ToolFacts | None] = [None] * contexts
        """The tool that a conversation waits for, or waited for last."""
        self._work: list[str | None] = [None] * contexts
        """The last tool it called at all."""
        self._cycle_s: list[float | None] = [None] * contexts
        self._reply_tokens = [0] * contexts
        self._now = -1.0
        self._values = np.zeros(contexts)

    def on_request(self, request: Request) -> None:
        now, context = request.at, request.context
        self._tick(now)
        elapsed = self.pauses.end(context, now)
        if elapsed is not None:
            self._last_s[context] = elapsed
        self._cycle_s[context] = self.cycles.end(context, now)
        self._turns[context] += 1
        cycle = Cycle(
            session=str(request.session),
            conversation=str(context),
            child=request.parent >= 0,
            turns=self._turns[context],
            after=self._after[context],
            added_tokens=sum(message.tok for message in request.added),
            last_s=self._cycle_s[context],
            last_reply_tokens=self._reply_tokens[context],
        )
        self.cycles.begin(context, cycle_features(cycle), now)
        self._running[context] += 1

    def on_end(self, request: Request, reply: Reply) -> None:
        context = request.context
        self._tick(reply.at)
        self._running[context] -= 1
        tools = [_facts(call) for call in reply.message.calls]
        pause = Pause(
            session=str(request.session),
            tools=tools,
            child=request.parent >= 0,
            reply_tokens=reply.message.tok,
            last_s=self._last_s[context],
            last_tool=self._work[context],
            turns=self._turns[context],
        )
        self._reply_tokens[context] = reply.message.tok
        self._after[context] = tool = slowest(tools) if tools else None
        if tool is not None:
            self._work[context] = tool.program or tool.name
        self.pauses.begin(context, pause_features(pause), reply.at)

    def on_signal(self, signal: SeenSignal) -> None:
        if signal.kind is SignalKind.END:
            self.pauses.drop(signal.context)
            self.cycles.drop(signal.context)
            self._now = -1.0

    def scores(self, leaves: Ints, now: float) -> Floats:
        # Returns of several holders add up; what nobody holds is below any worth.
        return self.by_holder(leaves, self._worths(now), nobody=-1e9, join=sum)

    def newcomer(self, request: Request, now: float) -> float:
        return float(self._worths(now)[request.context])

    def _worths(self, now: float) -> Floats:
        """By conversation, at ``now``; while a request runs, its whole cycle is what comes back."""
        if now != self._now:
            n = len(self._running)
            pauses, cycles = _padded(self.pauses.worths(now), n), _padded(self.cycles.worths(now), n)
            self._values = np.where(self._running > 0, cycles, pauses)
            self._now = now
        return self._values

    def _tick(self, now: float) -> None:
        self.pauses.tick(now)
        self.cycles.tick(now)
        self._now = -1.0


def _padded(values: Floats, n: int) -> Floats:
    return values[:n] if len(values) >= n else np.concatenate((values, np.zeros(n - len(values))))


def _facts(call: ToolUse) -> ToolFacts:
    return ToolFacts(
        name=call.name,
        program=call.program,
        timeout_s=None if call.timeout_ms is None else call.timeout_ms / 1000,
        background=call.background,
        agent=call.subagent is not None or call.name in ("Task", "Agent"),
    )
