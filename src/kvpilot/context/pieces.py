"""What a message consists of: the texts to look for in the prompt, and what each of them is.

Kinds beyond the role are told by conservative marks at the beginning of a text, so that ordinary text that
merely talks about skills or summaries stays what its role says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpilot.context.render import call_arguments, part_text
from kvpilot.domain import SegmentKind

_SUMMARY_OPENINGS = (
    "This session is being continued from a previous conversation",  # Claude Code
    "Another language model started to solve this problem and produced a summary",  # Codex
    "<summary>",
    "<conversation_summary>",
    "<conversation-summary>",
    "[Conversation summary",
)
_SKILL_OPENINGS = ("<skill", "Base directory for this skill:")
_SKILL_FILE = re.compile(r"\W*(\S*/)?SKILL\.md\W*")
"""A first line that is nothing but the name of a skill file."""
_SKILL_TOOLS = ("Skill", "skill", "load_skill", "use_skill")
_HEAD = 200
"""Characters at the beginning of a text that can say what it is."""

_ROLES = {
    "system": SegmentKind.SYSTEM,
    "developer": SegmentKind.SYSTEM,
    "assistant": SegmentKind.ASSISTANT,
    "tool": SegmentKind.TOOL_RESULT,
    "function": SegmentKind.TOOL_RESULT,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message. ``needles``: texts it shows up as, one behind the other, each with alternatives."""

    kind: SegmentKind
    needles: tuple[tuple[str, ...], ...]
    name: str | None = None


def role_kind(message: Mapping[str, Any]) -> SegmentKind:
    return _ROLES.get(str(message.get("role")), SegmentKind.USER)


def pieces_of(message: Mapping[str, Any], tool_names: Mapping[str, str]) -> list[Piece]:
    """The pieces of a message in the order templates write them; ``tool_names``: tool call id → tool."""
    kind = role_kind(message)
    if kind is SegmentKind.ASSISTANT:
        return list(_assistant(message))
    name = None
    if kind is SegmentKind.TOOL_RESULT:
        name = tool_names.get(str(message.get("tool_call_id"))) or _string(message.get("name"))
        if name in _SKILL_TOOLS:
            kind = SegmentKind.SKILL
    return [
        Piece(_marked(text, kind), (_shapes(text),), name)
        for text in texts_of(message.get("content"))
        if text
    ]


def tool_names(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Tool call id → name of the tool, over all messages."""
    return {
        str(call.get("id")): str(call["function"].get("name"))
        for message in messages
        for call in _calls(message)
    }


def tool_shapes(tool: Mapping[str, Any]) -> tuple[str, ...]:
    """JSON texts as which templates write one tool."""
    return tuple(
        shape
        for value in (tool, tool.get("function"))
        if value
        for shape in (
            json.dumps(value, ensure_ascii=False),
            json.dumps(value, ensure_ascii=False, indent=4),
            json.dumps(value, ensure_ascii=False, indent=2),
            json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        )
    )


def _assistant(message: Mapping[str, Any]) -> Iterator[Piece]:
    reasoning = message.get("reasoning", message.get("reasoning_content"))
    if isinstance(reasoning, str) and reasoning.strip():
        yield Piece(SegmentKind.THINKING, (_shapes(reasoning),))
    for text in texts_of(message.get("content")):
        thought, mark, answer = text.partition("</think>")
        if mark and thought.replace("<think>", "").strip():
            yield Piece(SegmentKind.THINKING, (_shapes(thought.replace("<think>", "")),))
        said = answer if mark else text
        if said.strip():
            yield Piece(_marked(said, SegmentKind.ASSISTANT), (_shapes(said),))
    for call in _calls(message):
        name = str(call["function"].get("name"))
        yield Piece(SegmentKind.TOOL_CALL, ((f'"{name}"', name), _argument_shapes(call["function"])), name)


def _calls(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        call
        for call in message.get("tool_calls") or ()
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
    ]


def _argument_shapes(function: Mapping[str, Any]) -> tuple[str, ...]:
    raw = function.get("arguments")
    arguments = call_arguments(raw)
    shapes = [raw] if isinstance(raw, str) and raw else []
    shapes += [
        json.dumps(arguments, ensure_ascii=False),
        json.dumps(arguments, ensure_ascii=False, separators=(",", ":")),
        json.dumps(arguments, ensure_ascii=False, indent=4),
    ]
    if arguments:  # templates that write each argument in markup of its own: the last value ends the call
        last = list(arguments.values())[-1]
        shapes += [last] if isinstance(last, str) else [json.dumps(last, ensure_ascii=False)]
    return tuple(dict.fromkeys(shape for shape in shapes if shape))


def texts_of(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part_text(part) for part in content] if isinstance(content, Sequence) else []


def _shapes(text: str) -> tuple[str, ...]:
    """As it is, trimmed, or as a JSON string."""
    return tuple(dict.fromkeys((text, text.strip(), json.dumps(text, ensure_ascii=False))))


def _marked(text: str, kind: SegmentKind) -> SegmentKind:
    head = text[: 2 * _HEAD].lstrip()[:_HEAD]
    if head.startswith(_SUMMARY_OPENINGS):
        return SegmentKind.SUMMARY
    if kind in (SegmentKind.SYSTEM, SegmentKind.USER):
        first_line = head.partition("\n")[0]
        if head.startswith(_SKILL_OPENINGS) or _SKILL_FILE.fullmatch(first_line):
            return SegmentKind.SKILL
    return kind


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) else None
