"""A replay as if it had been recorded: what was planned, when it was played. For the simulator.

Prompts are as the engine saw them: scaled, with the chat template's tokens, and a reply is its agent's own, not the
text that another session has under the same id. Where the text of a reply comes back as fewer tokens than were sampled
(the next prompt is shorter than planned), what was computed for the reply is of no use to that prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kvpilot.domain import SignalKind
from kvpilot.replay.driver import TurnRow
from kvpilot.replay.plan import PlannedCall, PlannedSession
from kvpilot.replay.text import MESSAGE_OVERHEAD
from kvpilot.traces import Overlay, Placed, ToolRun, TraceAgent, TraceCall, TraceMessage, TraceSession


def around(role: str) -> int:
    """Tokens that the template of the built-in models puts around a message: "assistant" is two tokens there."""
    if role == "block":
        return 0
    return MESSAGE_OVERHEAD if role == "assistant" else MESSAGE_OVERHEAD - 1


def as_recorded(planned: Sequence[PlannedSession], rows: Iterable[TurnRow]) -> Overlay:
    """The calls of ``planned`` that were played (those with a row), at the times of their rows."""
    played = {(row.session, row.agent, row.turn): row for row in rows}
    placed = []
    for session in planned:
        calls = [
            (call, row) for call in session.calls if (row := played.get((session.id, call.agent, call.turn)))
        ]
        if calls:
            placed.append(Placed(_session(session, sorted(calls, key=_began)), 0.0))
    window = max((row.started_s for row in played.values()), default=0.0)
    return Overlay(tuple(placed), window, 0)


def _began(played: tuple[PlannedCall, TurnRow]) -> float:
    return played[1].started_s


def _session(session: PlannedSession, calls: Sequence[tuple[PlannedCall, TurnRow]]) -> TraceSession:
    own = {(call.agent, call.reply.id) for call, _ in calls}
    again: dict[str, TraceMessage] = {}
    hidden = {call.agent: call for call, _ in calls}
    contexts: dict[str, list[TraceMessage]] = {}
    lengths: dict[str, int] = {}
    """Agent → tokens of its last prompt, as the engine counted them."""
    waits: dict[str, bool] = {}
    summarised: set[str] = set()
    out = []
    for call, row in calls:
        prompt = [_named(session, call.agent, message, own) for message in call.prompt]
        prompt = [again.get(message.id, message) for message in prompt]
        before = contexts.get(call.agent, [])
        if before and prompt[: len(before)] == before:
            missing = _missing(lengths[call.agent], row.prompt_tokens, prompt[len(before) - 1 :])
            if missing:
                said = prompt[len(before) - 1]
                again[said.id] = prompt[len(before) - 1] = msgspec.structs.replace(
                    said, id=f"{said.id}:again", tok=max(1, said.tok - missing)
                )
        reply = _named(session, call.agent, call.reply, own)
        keep = _common(before, prompt)
        contexts[call.agent] = [*prompt, reply]
        lengths[call.agent] = row.prompt_tokens
        events = ("human",) if waits.get(call.agent) else ()
        if call.agent in summarised:
            events = ("compact:auto",)
            summarised.discard(call.agent)
        if call.summarises:
            summarised.add(call.agent)
        kinds = {signal.kind: signal for signal in call.signals}
        waits[call.agent] = SignalKind.WAITING_HUMAN in kinds
        finished = kinds.get(SignalKind.TOOL_FINISHED)
        out.append(
            TraceCall(
                agent=call.agent,
                t_request=row.started_s,
                t_first=None if row.ttft_ms is None else row.started_s + row.ttft_ms / 1000,
                t_end=row.started_s + (row.e2e_ms or 0.0) / 1000,
                keep=keep,
                add=tuple(prompt[keep:]),
                reply=reply,
                events=events,
                tools=(ToolRun("", "", duration_s=finished.after_s),) if finished is not None else (),
            )
        )
    return TraceSession(
        source=session.source,
        id=session.id,
        agents=tuple(_agent(session, agent, call) for agent, call in _parents_first(session, hidden)),
        calls=tuple(out),
    )


def _missing(before: int, now: int, added: Sequence[TraceMessage]) -> int:
    """Tokens by which a prompt grew less than by what was added; 0 where the engine did not count."""
    return before + sum(message.tok for message in added) - now if before and now else 0


def _parents_first(session: PlannedSession, hidden: dict[str, PlannedCall]) -> list[tuple[str, PlannedCall]]:
    def depth(agent: str) -> int:
        return 1 + depth(session.parents[agent]) if agent in session.parents else 0

    return sorted(hidden.items(), key=lambda item: depth(item[0]))


def _agent(session: PlannedSession, agent: str, call: PlannedCall) -> TraceAgent:
    return TraceAgent(
        id=agent,
        parent=session.parents.get(agent),
        hidden_tok=call.hidden_tok + around("system") if call.hidden_tok else 0,
        hidden_id=f"{session.tenant}:{call.hidden_id}",
    )


def _named(
    session: PlannedSession, agent: str, message: TraceMessage, own: set[tuple[str, str]]
) -> TraceMessage:
    """The message under a name that says whose text it is, at its length with the template."""
    played = message.role == "assistant" and (agent, message.id) in own
    scope = f"{session.id}:{agent}" if played else session.tenant
    return msgspec.structs.replace(
        message, id=f"{scope}:{message.role}:{message.id}", tok=message.tok + around(message.role), text=None
    )


def _common(before: Sequence[TraceMessage], now: Sequence[TraceMessage]) -> int:
    """Messages that two contexts begin with alike."""
    alike = 0
    for a, b in zip(before, now, strict=False):
        if a.id != b.id or a.tok != b.tok:
            break
        alike += 1
    return alike
