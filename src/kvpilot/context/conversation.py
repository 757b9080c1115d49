"""What requests and replies say: their places, their texts, the tools they call. Never raises on what was sent."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvpilot.context import anthropic, responses
from kvpilot.context.messages import message_hashes
from kvpilot.context.pieces import texts_of
from kvpilot.context.programs import program_of
from kvpilot.domain import ToolFacts

Body = Mapping[str, Any]

OPENING_MESSAGES = 3
"""Among so many leading messages of a compacted context its summary is."""
NAMED_REPLIES = 16
MIN_NAMED, MIN_ID = 120, 16
"""Characters of a reply's text, or of a tool call's id, that do not come twice by chance."""
PROMPT_BLOCK = 512
"""Characters (or token ids) of a completion's prompt that stand for one message when it is told apart by content."""


def decode_body(raw: bytes) -> Body:
    """The request's JSON object; an empty one for anything else (the engine will have refused it)."""
    try:
        body = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def read_request(path: str, raw: bytes) -> Body:
    """The request as a chat request (or a completion), whichever API it came by."""
    body = decode_body(raw)
    match path:
        case anthropic.PATH:
            return anthropic.chat_body(body)
        case responses.PATH:
            return responses.chat_body(body)
    return body


def head_length(body: Body) -> int:
    """How many leading entries of ``message_hashes(body)`` are tools and system messages; 0 if neither is there."""
    messages = body.get("messages")
    system = 0
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            break
        system += 1
    return 1 + system if system or body.get("tools") else 0


def content_hashes(body: Body) -> list[bytes]:
    """``message_hashes`` of a chat request; of a text completion, its prompt in blocks that are complete."""
    prompt = body.get("prompt")
    if isinstance(prompt, str | list) and "messages" not in body:
        whole = len(prompt) // PROMPT_BLOCK * PROMPT_BLOCK
        return message_hashes(
            {"messages": [prompt[i : i + PROMPT_BLOCK] for i in range(0, whole, PROMPT_BLOCK)]}
        )
    return message_hashes(body)


def added_bytes(body: Body, kept: int) -> int:
    """About how much a chat says behind the messages that the first ``kept`` of its ``message_hashes`` name, in
    bytes of JSON; a reply right behind them is not counted, as the conversation has it already."""
    messages = body.get("messages")
    new = messages[max(0, kept - 1) :] if isinstance(messages, list) else []
    if kept and new and isinstance(new[0], dict) and new[0].get("role") == "assistant":
        new = new[1:]
    return sum(len(msgspec.json.encode(message)) for message in new)


def message_text(message: Mapping[str, Any]) -> str:
    """What a chat message says, without what was thought; blocks of text are joined."""
    return "".join(texts_of(message.get("content"))).rpartition("</think>")[2].strip()


def opening_texts(body: Body) -> list[str]:
    """Texts of those of a chat's first messages that are neither the system's nor the assistant's."""
    messages = body.get("messages")
    told = [
        message
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and message.get("role") not in ("system", "developer")
    ]
    first = told[:OPENING_MESSAGES]
    return [message_text(message) for message in first if message.get("role") != "assistant"]


def reply_name(message: Mapping[str, Any]) -> bytes | None:
    """Names a reply by its text and its tool calls, which clients send back as they got them; None for one that
    says too little to be told from others."""
    text = message_text(message)
    calls = message.get("tool_calls")
    calls = [call for call in (calls if isinstance(calls, list) else ()) if isinstance(call, dict)]
    if len(text) < MIN_NAMED and not any(len(str(call.get("id"))) >= MIN_ID for call in calls):
        return None
    parts = [text]
    for call in calls:
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        parts += (str(call.get("id")), str(function.get("name")), str(function.get("arguments")))
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=16).digest()


def named_replies(body: Body) -> list[bytes]:
    """Names of the last replies among a chat's messages, the latest first."""
    messages = body.get("messages")
    replies = [
        message
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and message.get("role") == "assistant"
    ]
    names = map(reply_name, reversed(replies[-NAMED_REPLIES:]))
    return [name for name in names if name is not None]


@dataclass(frozen=True, slots=True)
class ReadReply:
    """What a reply's message says, and the tools it calls."""

    text: str
    name: bytes | None
    tools: list[ToolFacts]

    @property
    def agents(self) -> int:
        """How many of the tool calls start a sub-agent."""
        return sum(tool.agent for tool in self.tools)


def read_reply(message: bytes) -> ReadReply:
    reply = decode_body(message)
    calls = reply.get("tool_calls")
    tools = [tool_facts(call) for call in (calls if isinstance(calls, list) else ())]
    return ReadReply(message_text(reply), reply_name(reply), tools)


def tool_facts(call: Any) -> ToolFacts:
    """What one of a message's ``tool_calls`` tells of how long it may take."""
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    name, raw = function.get("name"), function.get("arguments")
    name = name[:MAX_TOOL_NAME] if isinstance(name, str) else "?"
    raw = raw if isinstance(raw, str) else ""
    arguments = decode_body(raw.encode("utf-8", "replace")) if len(raw) <= MAX_ARGUMENTS else {}
    return ToolFacts(
        name=name,
        program=program_of(name, arguments),
        timeout_s=_timeout_s(arguments),
        background=any(arguments.get(key) is True for key in _BACKGROUND),
        agent=starts_agent(name, raw),
    )


def _timeout_s(arguments: Body) -> float | None:
    for key, unit_s in _TIMEOUTS.items():
        value = arguments.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LONGEST_TIMEOUT:
            return float(value) * (unit_s or (0.001 if value >= 1000 else 1.0))
    return None


MAX_ARGUMENTS = 100_000
"""Characters of a tool call's arguments; longer ones carry files, and say nothing of how long the call takes."""
MAX_TOOL_NAME = 80
_LONGEST_TIMEOUT = 1e9
_TIMEOUTS = {
    "timeout_ms": 0.001,
    "timeout_s": 1.0,
    "timeout_seconds": 1.0,
    "timeout_secs": 1.0,
    "timeout_sec": 1.0,
    "timeout": None,
}
"""Arguments that bound a call, and their unit in seconds; a ``timeout`` is in milliseconds for Claude Code, in seconds
for OpenHands: nobody means less than a second or more than a quarter of an hour by 1000."""
_BACKGROUND = ("run_in_background", "background", "is_background")
_AGENT_TOOLS = re.compile(
    r"(?i)^(task|agent|(spawn|run|start|launch|delegate|dispatch|call|invoke)_?(to_?)?(sub_?)?(task|agent))$"
)
_AGENT_ARGUMENT = re.compile(r'"(subagent_type|subagent|agent_type)"\s*:')


def starts_agent(tool: str, arguments: str) -> bool:
    """Whether a tool call starts a sub-agent: by its name, or by an argument that names one (Claude Code, OpenCode)."""
    return _AGENT_TOOLS.match(tool) is not None or _AGENT_ARGUMENT.search(arguments) is not None
