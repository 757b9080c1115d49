"""The ``agent_hint`` of vLLM's RFC #52113: ranges in engine blocks, a ttl in seconds."""

from __future__ import annotations

from typing import Any

from kvpilot.domain import Command, Retention, TargetKind
from kvpilot.hints.ids import read_session
from kvpilot.hints.openjiuwen import KINDS
from kvpilot.hints.result import HintRequest, Hints
from kvpilot.hints.values import as_index, as_list, as_object, as_range, read_ttl

NAME = "agent_hint"
OWN_WORDS = frozenset(("block_offset", "block_start", "block_end"))
MAX_EDITS = 16
TTL_DEFAULT_S, TTL_MAX_S = 300.0, 3600.0


def read(request: HintRequest, hint: dict[str, Any]) -> Hints:
    """``hint`` is the decoded ``agent_hint``."""
    dropped: list[str] = []
    session = read_session(hint, NAME, "session_id", "parent_session_id", dropped)
    management = as_object(hint.get("context_management"), f"{NAME}.context_management", dropped) or {}
    manage = management.get("manage_request")
    if manage is not None and not isinstance(manage, bool):
        dropped.append(f"{NAME}.context_management.manage_request: not a boolean")
    return Hints(
        session=session,
        commands=_commands(request, management.get("edits"), dropped),
        retention=_retention(hint.get("cache_control"), dropped),
        manage=manage is True,
        dropped=tuple(dropped),
    )


def _commands(request: HintRequest, edits: object, dropped: list[str]) -> tuple[Command, ...]:
    name = f"{NAME}.context_management.edits"
    commands = []
    for number, edit in enumerate(as_list(edits, name, MAX_EDITS, dropped)):
        command = _command(request, edit)
        if isinstance(command, str):
            dropped.append(f"{name}[{number}]: {command}")
        else:
            commands.append(command)
    return tuple(commands)


def _command(request: HintRequest, edit: object) -> Command | str:
    """One edit, or why it is none. Without a range it is about the whole session."""
    if not isinstance(edit, dict):
        return "not an object"
    word = edit.get("type")
    kind = KINDS.get(word) if isinstance(word, str) else None
    if kind is None:
        return "type is not one of evict, offload, prefetch"
    if "block_start" not in edit and "block_end" not in edit:
        return request.command(kind, TargetKind.SESSION, NAME)
    blocks = as_range(edit.get("block_start"), edit.get("block_end"))
    if blocks is None:
        return "block_start and block_end are not a half-open range"
    return request.command(kind, TargetKind.BLOCKS, NAME, start=blocks[0], end=blocks[1])


def _retention(value: object, dropped: list[str]) -> Retention | None:
    name = f"{NAME}.cache_control"
    control = as_object(value, name, dropped)
    if control is None:
        return None
    if control.get("type", "ephemeral") != "ephemeral":
        dropped.append(f"{name}.type: not ephemeral")
        return None
    offset = control.get("block_offset")
    if offset is not None and as_index(offset) is None:
        dropped.append(f"{name}.block_offset: not a position")
        return None
    ttl = read_ttl(control.get("ttl"), f"{name}.ttl", TTL_DEFAULT_S, TTL_MAX_S, dropped)
    return Retention(ttl_s=ttl, up_to=offset, unit=TargetKind.BLOCKS)
