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
    control, management = hint.get("cache_control"), hint.get("context_management")
    edits = management.get("edits") if isinstance(management, dict) else None
    words = set(control) if isinstance(control, dict) else set()
    for edit in _first(edits):
        if isinstance(edit, dict):
            words.update(edit)
    return not words.isdisjoint(rfc52113.OWN_WORDS) and words.isdisjoint(openjiuwen.OWN_WORDS)


def _first(edits: object) -> list[Any]:
    return edits[: openjiuwen.MAX_EDITS] if isinstance(edits, list) else []
