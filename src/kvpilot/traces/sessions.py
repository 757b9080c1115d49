"""Reader of ``sessions/*.jsonl.gz``: structure of real coding-agent sessions, one session a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvpilot.traces.errors import TraceError
from kvpilot.traces.lines import read_lines
from kvpilot.traces.model import ToolRun, ToolUse, TraceAgent, TraceCall, TraceMessage, TraceSession


class _Message(msgspec.Struct):
    role: str
    tok: int
    id: str
    calls: tuple[dict[str, Any], ...] = ()
    results: tuple[str, ...] = ()
    thinking: bool = False


class _Call(msgspec.Struct):
    agent: str
    t_request: float
    t_end: float
    keep: int
    add: list[_Message]
    reply: _Message
    t_first: float | None = None
    events: tuple[str, ...] = ()
    tools: tuple[ToolRun, ...] = ()


class _Agent(msgspec.Struct):
    id: str
    parent: str | None = None
    spawned_by: str | None = None
    hidden_prefix_tok: int | None = None


class _Session(msgspec.Struct):
    source: str
    session: str
    agents: list[_Agent]
    calls: list[_Call]


def read_sessions(path: Path) -> Iterator[TraceSession]:
    """The sessions of one file, one at a time. Raises TraceError with file and line."""
    for number, raw in read_lines(path, _Session):
        try:
            yield _session(raw)
        except (ValueError, msgspec.ValidationError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from None


def _session(raw: _Session) -> TraceSession:
    agents = {agent.id: agent for agent in raw.agents}
    held: dict[str, int] = {}
    calls: list[TraceCall] = []
    for index, call in enumerate(raw.calls):
        if call.agent not in agents:
            raise ValueError(f"call {index} is of an unknown agent {call.agent!r}")
        if not 0 <= call.keep <= held.get(call.agent, 0):
            raise ValueError(f"call {index} keeps {call.keep} of {held.get(call.agent, 0)} messages")
        held[call.agent] = call.keep + len(call.add) + 1
        calls.append(
            TraceCall(
                agent=call.agent,
                t_request=call.t_request,
                t_first=call.t_first,
                t_end=call.t_end,
                keep=call.keep,
                add=tuple(map(_message, call.add)),
                reply=_message(call.reply),
                events=call.events,
                tools=call.tools,
            )
        )
    return TraceSession(
        source=raw.source,
        id=raw.session,
        agents=tuple(_agent(raw, agent) for agent in raw.agents),
        calls=tuple(calls),
    )


def _agent(session: _Session, agent: _Agent) -> TraceAgent:
    own = f"/{session.session}/{agent.id}" if agent.parent else ""
    return TraceAgent(
        id=agent.id,
        parent=agent.parent,
        spawned_by=agent.spawned_by,
        hidden_tok=agent.hidden_prefix_tok or 0,
        hidden_id=f"hidden:{session.source}{own}",
    )


def _message(raw: _Message) -> TraceMessage:
    return TraceMessage(
        id=raw.id,
        role=raw.role,
        tok=raw.tok,
        calls=tuple(msgspec.convert(call, ToolUse) for call in raw.calls),
        results=raw.results,
        thinking=raw.thinking,
    )
