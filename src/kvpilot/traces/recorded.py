"""Recordings that kvpilot's coordinator makes of its own traffic (``--record``), and their reader.

JSON lines: a head, then in order of time one line for each request that ended and for each signal. No text: messages
have a role, a length in tokens and an id (a keyed hash: equal ids are equal texts within one file), tool calls their
name and program. Times are unix seconds. A file is complete in itself: the first line of a conversation in it has the
whole prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvpilot.domain import SignalKind
from kvpilot.traces.errors import TraceError
from kvpilot.traces.lines import read_lines
from kvpilot.traces.model import Record as _Struct
from kvpilot.traces.model import ToolRun, TraceAgent, TraceCall, TraceMessage, TraceSession

VERSION = 1
SOURCE = "kvpilot"


class RecordedHead(_Struct, frozen=True, tag="kvpilot_recording", tag_field="line"):
    """The first line of a file."""

    version: int = VERSION
    chunk_tokens: int = 256


class RecordedCall(_Struct, frozen=True, tag="call", tag_field="line"):
    """A request and its reply. The prompt is the head (tools and system messages, ``head_tok`` tokens of what
    ``head`` names), and (the conversation's previous prompt behind the head + reply)[:keep] + add."""

    session: str
    agent: str
    """The conversation."""
    at: float
    end: float
    head: str
    head_tok: int
    keep: int
    add: tuple[TraceMessage, ...]
    reply: TraceMessage
    first: float | None = None
    """When the first token came."""
    parent: str | None = None
    """The session that started this one."""
    cached_tok: int | None = None
    """Tokens of the prompt that the engine found in cache."""


class RecordedSignal(_Struct, frozen=True, tag="signal", tag_field="line"):
    """A life-cycle hint."""

    session: str
    at: float
    kind: SignalKind


Line = RecordedHead | RecordedCall | RecordedSignal


def read_recorded(path: Path) -> Iterator[TraceSession]:
    """The sessions of one file, in order of their first requests. Raises TraceError."""
    reader = _Reader()
    lines: Iterator[tuple[int, Line]] = read_lines(path, Line)  # type: ignore[arg-type]
    for number, line in lines:
        try:
            reader.take(line)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
    yield from reader.sessions()


class _Reader:
    def __init__(self) -> None:
        self._chunk_tokens = RecordedHead().chunk_tokens
        self._calls: dict[str, list[RecordedCall]] = {}
        """By session, in order of their ends."""
        self._signals: dict[str, list[RecordedSignal]] = {}
        self._parents: dict[str, str] = {}
        self._begun: dict[str, float] = {}
        """By conversation, when its latest request began."""
        self._held: dict[str, tuple[str, int]] = {}
        """By conversation: its head, and how many messages it has behind it."""

    def take(self, line: Line) -> None:
        if isinstance(line, RecordedHead):
            if line.version != VERSION:
                raise ValueError(f"a recording of version {line.version}; {VERSION} can be read")
            self._chunk_tokens = line.chunk_tokens
        elif isinstance(line, RecordedSignal):
            self._signals.setdefault(line.session, []).append(line)
        else:
            head, held = self._held.get(line.agent, (line.head, 0))
            if not 0 <= line.keep <= (held if head == line.head else 0):
                raise ValueError(f"the call keeps {line.keep} of {held} messages")
            self._held[line.agent] = (line.head, line.keep + len(line.add) + 1)
            # Of requests that overlap the one that ended first was there first, as far as prompts go.
            begun = self._begun[line.agent] = max(line.at, self._begun.get(line.agent, line.at))
            line = msgspec.structs.replace(line, at=begun, end=max(begun, line.end))
            self._calls.setdefault(line.session, []).append(line)
            if line.parent is not None:
                self._parents[line.session] = line.parent

    def sessions(self) -> Iterator[TraceSession]:
        families: dict[str, list[str]] = {}
        for session in self._calls:
            families.setdefault(self._root(session), []).append(session)
        begun = {root: min(self._calls[s][0].at for s in members) for root, members in families.items()}
        for root in sorted(families, key=lambda root: begun[root]):
            yield self._session(root, families[root], begun[root])

    def _root(self, session: str) -> str:
        seen = {session}
        while (parent := self._parents.get(session)) in self._calls and parent not in seen:
            seen.add(session := parent)
        return session

    def _session(self, root: str, members: list[str], begun: float) -> TraceSession:
        calls = sorted((call for member in members for call in self._calls[member]), key=lambda call: call.at)
        agents: dict[tuple[str, str], TraceAgent] = {}
        main_of: dict[str, str] = {}
        """By session the agent that talked first."""
        for call in calls:
            key = (call.agent, call.head)
            if key in agents:
                continue
            name = f"agent{len(agents)}" if agents else "main"
            above = self._parents.get(call.session)
            agents[key] = TraceAgent(
                id=name,
                parent=main_of.get(above) if above is not None else None,
                hidden_tok=call.head_tok,
                hidden_id=f"hidden:{call.head}",
            )
            main_of.setdefault(call.session, name)
        by_agent: dict[str, list[RecordedCall]] = {}
        for call in calls:
            by_agent.setdefault(agents[call.agent, call.head].id, []).append(call)
        traced = [
            _call(agent, call, own[index + 1] if index + 1 < len(own) else None, self._finished(call), begun)
            for agent, own in by_agent.items()
            for index, call in enumerate(own)
        ]
        return TraceSession(
            source=SOURCE,
            id=root,
            agents=tuple(agents.values()),
            calls=tuple(sorted(traced, key=lambda call: call.t_request)),
            chunk_tokens=self._chunk_tokens,
        )

    def _finished(self, call: RecordedCall) -> list[float]:
        """When the session's tools were said to have finished."""
        signals = self._signals.get(call.session, ())
        return [s.at for s in signals if s.kind is SignalKind.TOOL_FINISHED and s.at >= call.end]


def _call(
    agent: str, call: RecordedCall, following: RecordedCall | None, finished: list[float], begun: float
) -> TraceCall:
    runs: tuple[ToolRun, ...] = ()
    if following is not None:
        # What is known of a tool: when it was said to have finished, else that its result is in the next request.
        done = min([at for at in finished if at <= following.at], default=following.at)
        duration = max(0.0, done - call.end)
        runs = tuple(ToolRun(id=use.id, name=use.name, duration_s=duration) for use in call.reply.calls)
    return TraceCall(
        agent=agent,
        t_request=call.at - begun,
        t_first=None if call.first is None else call.first - begun,
        t_end=call.end - begun,
        keep=call.keep,
        add=call.add,
        reply=call.reply,
        events=tuple(_events(call)),
        tools=runs,
    )


def _events(call: RecordedCall) -> Iterator[str]:
    if any(message.results for message in call.add):
        yield "tool"
    elif any(message.role == "user" for message in call.add):
        yield "human"
