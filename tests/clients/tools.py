"""A tool, and what makes a random model call it: the engine holds the call to the tool's schema."""

from __future__ import annotations

import json
from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"deep": {"type": "boolean"}},
    "required": ["deep"],
    "additionalProperties": False,
}
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Look at the list.", "parameters": SCHEMA, "strict": True},
}
FORCED: dict[str, Any] = {
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "max_tokens": 400,
    # Left to itself the model writes blanks between "{" and the name for ever: JSON allows it.
    "frequency_penalty": 2,
}


def called(name: str, arguments: str) -> bool:
    """Whether this is a call of the tool with what its schema allows."""
    return name == "look" and json.loads(arguments) in ({"deep": True}, {"deep": False})
