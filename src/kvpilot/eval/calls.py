"""Recorded sessions laid over one another as the requests and replies a proxy would see, truth attached.

A message stands for its recorded id: the same id is the same text. Recordings leave out a compaction's summarising
call; it is put in before the call that has the summary: the old context and a fixed instruction, answered with the
first message added after the break.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from kvpilot.context.conversation import NAMED_REPLIES, OPENING_MESSAGES, starts_agent
from kvpilot.replay.plan import COMPACT_INSTRUCTION
from kvpilot.traces import Overlay, ToolUse, TraceAgent, TraceCall, TraceMessage

HEAD = 2
"""Leading hashes of a prompt that name tools and system messages: recordings tell them by one id."""
_SHARE_OF_GAP = 0.9

AgentKey = tuple[str, str]
"""(session, agent): one agent context."""


@dataclass(frozen=True, slots=True)
class SeenCall:
    """What a proxy sees of a call, and (``agent``, ``parent``, ``breaks``, ``after_person``) what is true of it.

    ``hashes`` are chained, ``HEAD`` of them in front of the first message. ``after_person``: the pause before the
    call was a person's, False = a tool's, None = there was none. Not ``recorded``: a summarising call.
    """

    begin: float
    end: float
    hashes: tuple[bytes, ...]
    opening: tuple[str, ...]
    said: tuple[bytes, ...]
    reply_text: str
    reply_name: bytes
    tools: tuple[str, ...]
    agent_calls: int
    agent: AgentKey
    parent: AgentKey | None
    breaks: bool
    after_person: bool | None
    recorded: bool = True


class _Context:
    """One agent's context as it grows."""

    def __init__(self, agent: TraceAgent) -> None:
        tools = hashlib.blake2b(digest_size=16).digest()
        self.hashes = [tools, _chain(tools, "system", agent.hidden_id)]
        self.messages: list[TraceMessage] = []
        self.ended = 0.0

    def keep(self, messages: int) -> None:
        del self.hashes[HEAD + messages :]
        del self.messages[messages:]

    def add(self, message: TraceMessage) -> None:
        self.hashes.append(_chain(self.hashes[-1], message.role, message.id))
        self.messages.append(message)

    def opening(self) -> tuple[str, ...]:
        first = self.messages[:OPENING_MESSAGES]
        return tuple(_text(message) for message in first if message.role != "assistant")

    def said(self) -> tuple[bytes, ...]:
        replies = [message for message in self.messages if message.role == "assistant"]
        return tuple(message.id.encode() for message in reversed(replies[-NAMED_REPLIES:]))


def seen_calls(laid: Overlay) -> Iterator[SeenCall]:
    """All calls of an overlay, each agent's in order (the overlay's order of beginnings)."""
    contexts: dict[AgentKey, _Context] = {}
    for begin, session, call in laid.calls():
        trace_agent = session.agent(call.agent)
        key = (session.id, call.agent)
        parent = (session.id, trace_agent.parent) if trace_agent.parent else None
        first = key not in contexts
        context = contexts.setdefault(key, _Context(trace_agent))
        if call.compacted and context.messages and call.add:
            yield _summarising(context, call, begin, key, parent)
        breaks = call.keep < len(context.messages)
        context.keep(call.keep)
        for message in call.add:
            context.add(message)
        end = begin + max(0.0, call.t_end - call.t_request)
        yield SeenCall(
            begin=begin,
            end=end,
            hashes=tuple(context.hashes),
            opening=context.opening(),
            said=context.said(),
            reply_text=_text(call.reply),
            reply_name=call.reply.id.encode(),
            tools=tuple(use.name for use in call.reply.calls),
            agent_calls=sum(map(_starts_agent, call.reply.calls)),
            agent=key,
            parent=parent,
            breaks=breaks,
            after_person=None if first else "human" in call.events,
        )
        context.add(call.reply)
        context.ended = end


def _summarising(
    context: _Context, call: TraceCall, before: float, key: AgentKey, parent: AgentKey | None
) -> SeenCall:
    begin = (context.ended + before) / 2
    asked = _chain(context.hashes[-1], COMPACT_INSTRUCTION.role, COMPACT_INSTRUCTION.id)
    return SeenCall(
        begin=begin,
        end=begin + (before - begin) * _SHARE_OF_GAP,
        hashes=(*context.hashes, asked),
        opening=context.opening(),
        said=context.said(),
        reply_text=_text(call.add[0]),
        reply_name=call.add[0].id.encode(),
        tools=(),
        agent_calls=0,
        agent=key,
        parent=parent,
        breaks=False,
        after_person=None,
        recorded=False,
    )


def _starts_agent(use: ToolUse) -> bool:
    return use.subagent is not None or starts_agent(use.name, use.arguments or "")


def _chain(before: bytes, role: str, message: str) -> bytes:
    return hashlib.blake2b(f"{role}\0{message}".encode(), key=before, digest_size=16).digest()


def _text(message: TraceMessage) -> str:
    """Some text for the message's id, as long as its recorded one roughly was."""
    return f"<{message.id}>" * max(1, min(message.tok, 64_000) * 4 // (len(message.id) + 2))
