"""Anthropic's context edits, applied to the messages of a request. Pure: counts of tokens are arguments.

Semantics as in Anthropic's "Context editing": the client always sends its whole history, and every request is
edited anew from it. The oldest goes first; a cleared tool result leaves a placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvpilot.hints import ContextEdit

PLACEHOLDER = "[Old tool result content cleared]"
KEEP_TOOL_USES, KEEP_THINKING_TURNS = 3, 1
TRIGGER = ("input_tokens", 100_000)
TYPES = {"clear_tool_uses": "clear_tool_uses_20250919", "clear_thinking": "clear_thinking_20251015"}
"""The edits that are applied, and what they are called on the wire."""
_THOUGHTS = ("thinking", "redacted_thinking")

Block = dict[str, Any]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Messages after one edit, and of how much it took something: tool uses or turns."""

    messages: list[Message]
    count: int


def clear(edit: ContextEdit, messages: Sequence[Message]) -> Cleared | None:
    """What the edit does once it is triggered; None when there is nothing to clear (or it is not one of these)."""
    if edit.keep is not None and edit.keep[0] == "all":
        return None
    if edit.kind == "clear_tool_uses":
        return _clear_tool_uses(edit, messages)
    return _clear_thinking(edit, messages) if edit.kind == "clear_thinking" else None


def token_trigger(edit: ContextEdit) -> int:
    """Input tokens beyond which the edit applies; -1 when tokens do not matter to it."""
    unit, value = edit.trigger or TRIGGER
    return value if edit.kind == "clear_tool_uses" and unit == "input_tokens" else -1


def triggered_by_uses(edit: ContextEdit, messages: Sequence[Message]) -> bool:
    """Whether there are enough tool uses; True for an edit they do not matter to."""
    unit, value = edit.trigger or TRIGGER
    if edit.kind != "clear_tool_uses" or unit != "tool_uses":
        return True
    return sum(1 for _ in _blocks(messages, "assistant", "tool_use")) > value


def applied(edit: ContextEdit, cleared: Cleared, tokens: int) -> dict[str, Any]:
    """One entry of ``applied_edits``; ``tokens``: input tokens it cleared."""
    what = "cleared_tool_uses" if edit.kind == "clear_tool_uses" else "cleared_thinking_turns"
    return {"type": TYPES[edit.kind], what: cleared.count, "cleared_input_tokens": tokens}


def _clear_tool_uses(edit: ContextEdit, messages: Sequence[Message]) -> Cleared | None:
    uses = [(str(b.get("id")), b.get("name")) for b in _blocks(messages, "assistant", "tool_use")]
    keep = edit.keep[1] if edit.keep is not None else KEEP_TOOL_USES
    first_kept = max(0, len(uses) - keep)
    # Some clients give every turn's call the same id: what one of them spares, it spares for all.
    spared = {use for n, (use, name) in enumerate(uses) if n >= first_kept or name in edit.exclude_tools}
    old = {use for use, _ in uses[:first_kept]} - spared
    inputs = edit.clear_tool_inputs
    touched: set[str] = set()

    def change(block: Block) -> Block:
        kind = block.get("type")
        use = str(block.get("id" if kind == "tool_use" else "tool_use_id"))
        if use not in old:
            return block
        if kind == "tool_result" and block.get("content") not in (PLACEHOLDER, None, "", []):
            touched.add(use)
            return {**block, "content": PLACEHOLDER}
        too = inputs is True or (isinstance(inputs, tuple) and block.get("name") in inputs)
        if kind == "tool_use" and too and block.get("input"):
            touched.add(use)
            return {**block, "input": {}}
        return block

    changed = _changed(messages, change)
    return Cleared(changed, len(touched)) if touched else None


def _clear_thinking(edit: ContextEdit, messages: Sequence[Message]) -> Cleared | None:
    turns = [turn for turn in _turns(messages) if any(map(_thinks, (messages[i] for i in turn)))]
    keep = edit.keep[1] if edit.keep is not None else KEEP_THINKING_TURNS
    old = turns[: max(0, len(turns) - keep)]
    changed = list(messages)
    count = 0
    for turn in old:
        before = [changed[i] for i in turn]
        for i in turn:
            left = [b for b in _content(changed[i]) if b.get("type") not in _THOUGHTS]
            # A message of nothing but thoughts stays: without them it would be none.
            if left:
                changed[i] = {**changed[i], "content": left}
        count += any(map(_thinks, before)) and before != [changed[i] for i in turn]
    return Cleared(changed, count) if count else None


def _turns(messages: Sequence[Message]) -> Iterator[list[int]]:
    """Indices of the assistant's messages, turn by turn: results of its tools do not end its turn."""
    turn: list[int] = []
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            turn.append(index)
        elif turn and not _only_results(message):
            yield turn
            turn = []
    if turn:
        yield turn


def _only_results(message: Message) -> bool:
    blocks = _content(message)
    return bool(blocks) and all(block.get("type") == "tool_result" for block in blocks)


def _thinks(message: Message) -> bool:
    return any(block.get("type") in _THOUGHTS for block in _content(message))


def _blocks(messages: Sequence[Message], role: str, kind: str) -> Iterator[Block]:
    for message in messages:
        if message.get("role") == role:
            yield from (block for block in _content(message) if block.get("type") == kind)


def _content(message: Message) -> list[Block]:
    content = message.get("content")
    return [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []


def _changed(messages: Sequence[Message], change: Callable[[Block], Block]) -> list[Message]:
    return [
        {**message, "content": [change(b) if isinstance(b, dict) else b for b in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
