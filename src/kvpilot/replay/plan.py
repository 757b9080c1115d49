"""From recorded sessions to the calls of a replay: lengths, pauses, order and hints. No clock, no network.

A call waits for what it waited for in the recording: its agent's call before, and the call of the session
that ended last before it began (the one that started a sub-agent, the last sub-agent to come back). The pause
after that is the recorded one times ``gap_scale``, cut at ``max_gap_s``; how long calls themselves take is
the engine's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kvpilot.domain import SignalKind
from kvpilot.replay.text import MESSAGE_OVERHEAD
from kvpilot.traces import Overlay, TraceCall, TraceMessage, TraceSession

COMPACT_INSTRUCTION = TraceMessage(id="kvpilot:summarise-the-conversation", role="user", tok=64)
"""The fixed instruction of the summarising call, which recordings leave out."""
TOOL_CALL_TOKENS = 64
"""Room for one rendered tool call, for templates that render them."""


class Hints(StrEnum):
    NONE = "none"
    LIFECYCLE = "lifecycle"


class ReplayOptions(msgspec.Struct, frozen=True):
    """What is replayed and how. Times in seconds."""

    hints: Hints = Hints.LIFECYCLE
    gap_scale: float = 1.0
    max_gap_s: float = math.inf
    max_calls: int = 0
    """Calls per session that are replayed; 0 = all."""
    max_reply: int = 64
    """Longest reply in tokens after scaling."""


class Wait(msgspec.Struct, frozen=True):
    """A call of the session (by index) to wait for, and the pause after its end."""

    call: int
    gap_s: float


class PlannedSignal(msgspec.Struct, frozen=True):
    """A life-cycle hint ``after_s`` seconds after its call ended. ``eta_s``: pause that is still to come."""

    kind: SignalKind
    after_s: float
    eta_s: float | None = None


class PlannedCall(msgspec.Struct, frozen=True):
    """One request of the replay; ``signals`` are sent after its end."""

    index: int
    agent: str
    turn: int
    waits: tuple[Wait, ...]
    prompt: tuple[TraceMessage, ...]
    reply: TraceMessage
    hidden_id: str
    hidden_tok: int
    max_tokens: int
    summarises: bool = False
    signals: tuple[PlannedSignal, ...] = ()


class PlannedSession(msgspec.Struct, frozen=True):
    """One session: ids as the gateway will see them, its start in seconds of the replay, its calls."""

    id: str
    tenant: str
    source: str
    start_s: float
    calls: tuple[PlannedCall, ...]
    parents: dict[str, str] = {}
    """Agent → the agent that started it."""

    def session_id(self, agent: str) -> str:
        return self.id if agent not in self.parents else f"{self.id}:{agent}"

    def parent_id(self, agent: str) -> str:
        """A root has itself as its parent, as openJiuwen's clients say it."""
        return self.session_id(self.parents[agent]) if agent in self.parents else self.id


def plan_session(
    session: TraceSession,
    session_id: str,
    scale: float,
    options: ReplayOptions,
    start_s: float = 0.0,
    tenant: str = "default",
) -> PlannedSession:
    """The calls of one session, compactions' summarising calls put in, lengths times ``scale`` rounded up."""
    calls = [call for call in session.calls if call.reply is not None]
    if options.max_calls:
        calls = calls[: options.max_calls]
    builder = _Builder(session, options, scale)
    for call in calls:
        builder.add(call)
    return PlannedSession(
        id=session_id,
        tenant=tenant,
        source=session.source,
        start_s=start_s,
        calls=builder.finish(),
        parents={a.id: a.parent for a in session.agents if a.parent is not None},
    )


class _Builder:
    """Goes through a session's calls in order of time; indices are those of the planned calls."""

    def __init__(self, session: TraceSession, options: ReplayOptions, scale: float) -> None:
        self._session, self._options, self._scale = session, options, scale
        self._agents = {agent.id: agent for agent in session.agents}
        self._planned: list[PlannedCall] = []
        self._recorded: list[TraceCall | None] = []
        """The recorded call of each planned one; None = a summarising call."""
        self._ends: list[float] = []
        self._contexts: dict[str, tuple[TraceMessage, ...]] = {}
        self._last: dict[str, int] = {}
        self._turns: dict[str, int] = {}
        self._lengths: dict[int, tuple[TraceMessage, TraceMessage]] = {}
        """Identity of a recorded message → it (kept alive) and its scaled form."""

    def add(self, call: TraceCall) -> None:
        agent = call.agent
        context = self._contexts.get(agent, ())
        compacting = call.compacted and bool(context) and bool(call.add)
        if compacting:
            summary = msgspec.structs.replace(call.add[0], role="assistant", results=(), calls=())
            self._append(call, (*context, COMPACT_INSTRUCTION), summary, self._waits(call), summarises=True)
        waits = (Wait(self._last[agent], 0.0),) if compacting else self._waits(call)
        prompt = context[: call.keep] + call.add
        self._append(call, prompt, call.reply, waits)
        self._contexts[agent] = (*prompt, call.reply)

    def _append(
        self,
        call: TraceCall,
        prompt: tuple[TraceMessage, ...],
        reply: TraceMessage,
        waits: tuple[Wait, ...],
        summarises: bool = False,
    ) -> None:
        agent = self._agents[call.agent]
        index = len(self._planned)
        turn = self._turns.get(call.agent, 0)
        self._turns[call.agent] = turn + 1
        self._last[call.agent] = index
        self._recorded.append(None if summarises else call)
        self._ends.append(call.t_request if summarises else call.t_end)
        self._planned.append(
            PlannedCall(
                index=index,
                agent=call.agent,
                turn=turn,
                waits=waits,
                prompt=tuple(map(self._scaled, prompt)),
                reply=self._scaled(reply),
                hidden_id=agent.hidden_id,
                hidden_tok=scaled_tokens(agent.hidden_tok, self._scale) if agent.hidden_tok else 0,
                max_tokens=self._scaled(reply).tok,
                summarises=summarises,
            )
        )

    def _scaled(self, message: TraceMessage) -> TraceMessage:
        if id(message) not in self._lengths:
            longest = self._options.max_reply if message.role == "assistant" else message.tok
            self._lengths[id(message)] = (message, scaled(message, self._scale, longest))
        return self._lengths[id(message)][1]

    def _waits(self, call: TraceCall) -> tuple[Wait, ...]:
        ended = [i for i, end in enumerate(self._ends) if end <= call.t_request]
        indices = {max(ended, key=lambda i: (self._ends[i], i))} if ended else set()
        if call.agent in self._last:
            indices.add(self._last[call.agent])
        return tuple(Wait(i, self._gap(call.t_request - self._ends[i])) for i in sorted(indices))

    def _gap(self, recorded_s: float) -> float:
        return min(max(0.0, recorded_s) * self._options.gap_scale, self._options.max_gap_s)

    def finish(self) -> tuple[PlannedCall, ...]:
        if self._options.hints is Hints.NONE:
            return tuple(self._planned)
        following: dict[str, int] = {}
        for index in reversed(range(len(self._planned))):
            planned = self._planned[index]
            signals = self._signals(index, following.get(planned.agent))
            self._planned[index] = msgspec.structs.replace(planned, signals=signals)
            following[planned.agent] = index
        return tuple(self._planned)

    def _signals(self, index: int, following: int | None) -> tuple[PlannedSignal, ...]:
        """What an agent's framework knows after a call: tools ended, a person's turn, compaction, the end."""
        if following is None:
            return (PlannedSignal(SignalKind.END, 0.0),)
        if self._planned[index].summarises:
            return (PlannedSignal(SignalKind.COMPACTED, 0.0, 0.0),)
        call, after = self._recorded[index], self._recorded[following]
        pause = max(
            (wait.gap_s for wait in self._planned[following].waits if wait.call == index), default=0.0
        )
        if call is not None and call.reply.calls:
            recorded = max((run.duration_s or 0.0 for run in call.tools), default=0.0)
            ended = min(self._gap(recorded), pause)
            return (PlannedSignal(SignalKind.TOOL_FINISHED, ended, pause - ended),)
        if after is not None and "human" in after.events:
            return (PlannedSignal(SignalKind.WAITING_HUMAN, 0.0),)
        return ()


def scaled_tokens(tok: int, scale: float) -> int:
    """``tok`` × ``scale``, rounded up, at least 1."""
    return max(1, math.ceil(tok * scale - 1e-9))


def scaled(message: TraceMessage, scale: float, longest: int) -> TraceMessage:
    """The message at its scaled length, at most ``longest``; recorded text stays only at full length."""
    tok = min(scaled_tokens(message.tok, scale), longest)
    return message if tok == message.tok else msgspec.structs.replace(message, tok=tok, text=None)


def choose_scale(
    sessions: Sequence[TraceSession], max_model_len: int, options: ReplayOptions, carries_tools: bool = False
) -> float:
    """The largest factor s ≤ 1 with which every context of the run fits ``max_model_len`` with its template.

    Raises ValueError when not even one token a message fits.
    """
    tool_cost = TOOL_CALL_TOKENS if carries_tools else 0
    shapes = [shape for session in sessions for shape in _shapes(session, options, tool_cost)]

    def largest(scale: float) -> int:
        return max(fixed + _total(toks, scale) for fixed, toks in shapes)

    if not shapes or largest(1.0) <= max_model_len:
        return 1.0
    low, high = 0.0, 1.0
    if largest(low) > max_model_len:
        raise ValueError(f"a recorded context has too many messages for a context of {max_model_len} tokens")
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if largest(middle) <= max_model_len else (low, middle)
    return math.floor(low * 1e5) / 1e5


def _shapes(
    session: TraceSession, options: ReplayOptions, tool_cost: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Per agent and stretch between breaks, the longest context: (template tokens, lengths)."""
    uncapped = msgspec.structs.replace(options, hints=Hints.NONE, max_reply=1 << 40)
    plan = plan_session(session, "", 1.0, uncapped)
    longest: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = {}
    epochs: dict[str, int] = {}
    previous: dict[str, int] = {}
    for call in plan.calls:
        if len(call.prompt) < previous.get(call.agent, 0):
            epochs[call.agent] = epochs.get(call.agent, 0) + 1
        previous[call.agent] = len(call.prompt)
        toks = (call.hidden_tok, *(m.tok for m in call.prompt), call.reply.tok)
        chat_messages = 3 + sum(m.role != "block" for m in call.prompt)
        fixed = chat_messages * MESSAGE_OVERHEAD + 32 + tool_cost * sum(len(m.calls) for m in call.prompt)
        longest[call.agent, epochs.get(call.agent, 0)] = (fixed, toks)
    return list(longest.values())


def _total(toks: tuple[int, ...], scale: float) -> int:
    return sum(scaled_tokens(tok, scale) for tok in toks)


def plan_overlay(
    laid: Overlay,
    scale: float,
    options: ReplayOptions,
    run_id: str,
    tenants: int = 0,
) -> tuple[PlannedSession, ...]:
    """Sessions of an overlay in order of start; the last ``tenants`` of them belong to other tenants."""
    own = len(laid.placed) - tenants
    planned = []
    for number, placed in enumerate(laid.placed):
        tenant = "default" if number < own else f"other-{number - own + 1}"
        planned.append(
            plan_session(
                placed.session,
                f"{run_id}-{number}",
                scale,
                options,
                start_s=placed.start * options.gap_scale,
                tenant=tenant,
            )
        )
    return tuple(planned)
