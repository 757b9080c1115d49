"""One small vocabulary for recorded agents, whatever the recording looked like.

Times are seconds since the session began; lengths are tokens (of the recording's tokenizer). A message's
``id`` stands for its text: within one source the same id is the same text.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of the recorded things: immutable."""


class ToolUse(Record, frozen=True):
    """A tool call as the model wrote it. ``program``: first … last program of a shell line."""

    id: str
    name: str
    program: str | None = None
    arguments: str | None = None
    timeout_ms: float | None = None
    background: bool = False
    subagent: str | None = None


class ToolRun(Record, frozen=True):
    """How a tool call went: ``duration_s`` from call to result (a person's permission is inside)."""

    id: str
    name: str
    duration_s: float | None = None
    reported_s: float | None = None
    error: bool = False


class TraceMessage(Record, frozen=True):
    """One message (or one block of a block trace, role ``block``). ``text`` only where the trace has it."""

    id: str
    role: str
    tok: int
    calls: tuple[ToolUse, ...] = ()
    results: tuple[str, ...] = ()
    """Ids of the tool calls whose results this message carries."""
    thinking: bool = False
    text: str | None = None


class TraceAgent(Record, frozen=True):
    """An agent context of a session: the main one or a sub-agent.

    ``hidden_id`` names the text in front of every prompt that the log does not show (system prompt, tool
    schemas) of ``hidden_tok`` tokens: main agents of one source share it, sub-agents have their own.
    """

    id: str
    parent: str | None = None
    spawned_by: str | None = None
    hidden_tok: int = 0
    hidden_id: str = ""


class TraceCall(Record, frozen=True):
    """One LLM call. Its prompt is (the agent's previous prompt + reply)[:keep] + add."""

    agent: str
    t_request: float
    t_end: float
    keep: int
    add: tuple[TraceMessage, ...]
    reply: TraceMessage
    t_first: float | None = None
    events: tuple[str, ...] = ()
    tools: tuple[ToolRun, ...] = ()

    @property
    def compacted(self) -> bool:
        return any(event.startswith("compact:") for event in self.events)


class TraceSession(Record, frozen=True):
    """One recorded session with all its agents, calls in time order over all of them."""

    source: str
    id: str
    agents: tuple[TraceAgent, ...]
    calls: tuple[TraceCall, ...]
    chunk_tokens: int = 256
    """Granularity at which this recording's cache is to be judged (blocks: the trace's own block size)."""

    def agent(self, agent_id: str) -> TraceAgent:
        """The agent of that id. Raises KeyError."""
        for agent in self.agents:
            if agent.id == agent_id:
                return agent
        raise KeyError(agent_id)

    def prompts(self) -> Iterator[tuple[TraceCall, tuple[TraceMessage, ...]]]:
        """Every call with its full prompt (without the hidden prefix), in time order."""
        contexts: dict[str, tuple[TraceMessage, ...]] = {}
        for call in self.calls:
            prompt = contexts.get(call.agent, ())[: call.keep] + call.add
            contexts[call.agent] = (*prompt, call.reply)
            yield call, prompt

    @property
    def largest_context(self) -> int:
        """Tokens of the longest prompt with hidden prefix and reply."""
        hidden = {agent.id: agent.hidden_tok for agent in self.agents}
        return max(
            (hidden[c.agent] + sum(m.tok for m in prompt) + c.reply.tok for c, prompt in self.prompts()),
            default=0,
        )

    def busy_s(self, longest_gap: float = 600.0) -> float:
        """Time in calls and in gaps below ``longest_gap`` seconds, over the whole session."""
        busy, last_end = 0.0, None
        for call in self.calls:
            busy += max(0.0, call.t_end - call.t_request)
            if last_end is not None and 0 < call.t_request - last_end < longest_gap:
                busy += call.t_request - last_end
            last_end = call.t_end if last_end is None else max(last_end, call.t_end)
        return busy
