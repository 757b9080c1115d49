"""``agent_hint``: one key of the body, two dialects.

A word only openJiuwen has settles it; else engine blocks mean vLLM's RFC #52113; ids alone are openJiuwen's.
"""

from __future__ import annotations

from typing import Any

from kvpilot.hints import openjiuwen, rfc52113
from kvpilot.hints.result import HintRequest, Hints
from kvpilot.hints.values import read_object

FIELD = openjiuwen.FIELD


def read(request: HintRequest) -> Hints | None:
    dropped: list[str] = []
    hint = read_object(request.fields.get(FIELD), FIELD, dropped)
    if hint is None:
        return Hints(dropped=tuple(dropped)) if dropped else None
    return rfc52113.read(request, hint) if speaks_of_blocks(hint) else openjiuwen.read(request, hint)


def speaks_of_blocks(hint: dict[str, Any]) -> bool:
    """Whether the hint is RFC #52113's."""
    if not openjiuwen.OWN_WORDS.isdisjoint(hint):
        return False
    management = hint.get("context_management")
    edits = management.get("edits") if isinstance(management, dict) else None
    parts = edits[: openjiuwen.MAX_EDITS] if isinstance(edits, list) else []
    blocks = False
    for part in (hint.get("cache_control"), *parts):
        if isinstance(part, dict):
            if not openjiuwen.OWN_WORDS.isdisjoint(part):
                return False
            blocks = blocks or not rfc52113.OWN_WORDS.isdisjoint(part)
    return blocks
