"""kvpilot's own policy in the simulator: the forecasts of production rank what is resident."""

from __future__ import annotations

from kvpilot.context.conversation import starts_agent
from kvpilot.domain import ToolFacts
from kvpilot.forecast import Forecaster
from kvpilot.sim.policy import ContextPolicy, Run
from kvpilot.sim.view import Reply, Request, SeenSignal
from kvpilot.sim.workload import Floats, Ints
from kvpilot.traces import ToolUse


class Kvpilot(ContextPolicy):
    """Evicts first what returns least per unit of room and time, and admits only what beats that."""

    def __init__(self, run: Run, forecaster: Forecaster | None = None) -> None:
        """``forecaster``: what is known already (default: what is packaged)."""
        super().__init__(run)
        self.forecaster = forecaster or Forecaster()
        self._now = -1.0
        self._values: Floats | None = None

    def on_request(self, request: Request) -> None:
        self._now = -1.0
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
        tools = [tool_facts(call) for call in reply.message.calls]
        self.forecaster.reply(request.context, reply.at, tools, reply.message.tok)

    def on_signal(self, signal: SeenSignal) -> None:
        self._now = -1.0
        self.forecaster.signal(signal.context, signal.at, signal.kind)

    def scores(self, leaves: Ints, now: float) -> Floats:
        # Returns of several holders add up; what nobody holds is below any worth.
        return self.by_holder(leaves, self._worths(now), nobody=-1e9, join=sum)

    def newcomer(self, request: Request, now: float) -> float:
        return float(self._worths(now)[request.context])

    def _worths(self, now: float) -> Floats:
        if self._values is None or now != self._now:
            self._values, self._now = self.forecaster.worths(now), now
        return self._values


def tool_facts(call: ToolUse) -> ToolFacts:
    """A recorded tool call, as the reply of an engine would show it."""
    return ToolFacts(
        name=call.name,
        program=call.program,
        timeout_s=None if call.timeout_ms is None else call.timeout_ms / 1000,
        background=call.background,
        agent=call.subagent is not None or starts_agent(call.name, call.arguments or ""),
    )
