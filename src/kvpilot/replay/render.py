"""Planned calls as chat messages, and what an infinite cache would have hit."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvpilot.replay.plan import PlannedCall
from kvpilot.replay.text import MESSAGE_OVERHEAD, TextMaker
from kvpilot.traces import ToolUse, TraceMessage

_ROLES = {"developer": "system", "block": "user"}


class Conversation:
    """Renders one session's calls. Replies of the engine go into later prompts in place of the recorded ones
    when they are no longer than planned; ``salt`` sets this run's texts apart from every other run's."""

    def __init__(self, texts: TextMaker, salt: str = "") -> None:
        self._texts, self._salt = texts, salt
        self._replies: dict[tuple[str, str], str] = {}

    def replied(self, agent: str, call: PlannedCall, content: str) -> None:
        if content and self._texts.count(content) <= call.max_tokens:
            self._replies[agent, call.reply.id] = content

    def messages(self, call: PlannedCall) -> list[dict[str, Any]]:
        """The request's ``messages``: hidden prefix as the system message, tool calls and results as such."""
        out: list[dict[str, Any]] = []
        if call.hidden_tok:
            out.append({"role": "system", "content": self._text(call.hidden_id, call.hidden_tok)})
        blocks: list[str] = []
        for message in call.prompt:
            if message.role == "block":
                blocks.append(self._text(message.id, message.tok))
            else:
                out.append(self._message(call, message))
        if blocks:
            out.append({"role": "user", "content": "".join(blocks)})
        return out

    def units(self, call: PlannedCall) -> list[tuple[str, int]]:
        """The prompt as (what it says, tokens) in order: the pieces prefixes are compared by."""
        units = [(call.hidden_id, call.hidden_tok + MESSAGE_OVERHEAD - 1)] if call.hidden_tok else []
        for message in call.prompt:
            overhead = 0 if message.role == "block" else MESSAGE_OVERHEAD - 1
            units.append((f"{message.role}:{self._content(call, message)}", message.tok + overhead))
        return units

    def reply_unit(self, call: PlannedCall) -> tuple[str, int]:
        """The reply as the piece that it will be in the next prompt."""
        return f"assistant:{self._content(call, call.reply)}", call.max_tokens + MESSAGE_OVERHEAD - 1

    def _message(self, call: PlannedCall, message: TraceMessage) -> dict[str, Any]:
        content = self._content(call, message)
        if message.results:
            return {"role": "tool", "tool_call_id": message.results[0], "content": content}
        rendered: dict[str, Any] = {"role": _ROLES.get(message.role, message.role), "content": content}
        if message.calls and message.role == "assistant":
            rendered["tool_calls"] = [_tool_call(use) for use in message.calls]
        return rendered

    def _content(self, call: PlannedCall, message: TraceMessage) -> str:
        replied = self._replies.get((call.agent, message.id)) if message.role == "assistant" else None
        if replied is not None:
            return replied
        if message.text is not None:
            return message.text
        return self._text(message.id, message.tok)

    def _text(self, text_id: str, tokens: int) -> str:
        return self._texts.text(self._salt + text_id, tokens)


def _tool_call(use: ToolUse) -> dict[str, Any]:
    arguments = use.arguments
    if arguments is None:
        known = {
            "command": use.program,
            "timeout": use.timeout_ms,
            "run_in_background": use.background or None,
            "subagent_type": use.subagent,
        }
        arguments = json.dumps({key: value for key, value in known.items() if value is not None})
    return {"id": use.id, "type": "function", "function": {"name": use.name, "arguments": arguments}}


class PrefixMemory:
    """Every prompt and reply of a run as a trie of hashed pieces: what could have been hit."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()

    def reusable(self, units: list[tuple[str, int]], salt: str = "") -> int:
        """Tokens of the longest prefix, in whole pieces, that any earlier prompt or reply had."""
        total = 0
        for digest, tokens in _chain(units, salt):
            if digest not in self._known:
                break
            total += tokens
        return total

    def add(self, units: list[tuple[str, int]], salt: str = "") -> None:
        self._known.update(digest for digest, _ in _chain(units, salt))


def _chain(units: list[tuple[str, int]], salt: str) -> list[tuple[bytes, int]]:
    digest = salt.encode()
    chain = []
    for content, tokens in units:
        digest = hashlib.blake2b(digest + content.encode(), digest_size=16).digest()
        chain.append((digest, tokens))
    return chain
