"""Anthropic: ``cache_control`` on blocks or at the top level, ``context_management`` edits, warming."""

from __future__ import annotations

from typing import Any

from kvpilot.domain import Retention
from kvpilot.hints.content import BEFORE_MESSAGES, find_marks
from kvpilot.hints.result import ContextEdit, HintRequest, Hints
from kvpilot.hints.values import as_index, as_list, as_object, read_object

FIELDS = ("cache_control", "context_management")
MARK = "cache_control"
MAX_MARKS = 4
MAX_EDITS = 8
MAX_TOOLS = 256
TTLS = {"5m": 300.0, "1h": 3600.0}

_PLACES = ("tools", "system", "messages")
_EDITS = {
    "clear_tool_uses_20250919": "clear_tool_uses",
    "clear_thinking_20251015": "clear_thinking",
    "compact_20260112": "compact",
}
_UNITS: dict[str, dict[str, tuple[str, ...]]] = {
    "clear_tool_uses": {"trigger": ("input_tokens", "tool_uses"), "keep": ("tool_uses", "all")},
    "clear_thinking": {"keep": ("thinking_turns", "all")},
    "compact": {"trigger": ("input_tokens",)},
}
"""In which units an edit's amounts may be given."""


def read(request: HintRequest) -> Hints | None:
    dropped: list[str] = []
    retention = _retention(request, dropped)
    edits = _edits(request, dropped)
    if retention is None and not edits and not dropped:
        return None
    warm = request.fields.get("max_tokens")
    return Hints(
        retention=retention,
        edits=edits,
        warm=retention is not None and warm is not None and bytes(warm) == b"0",
        dropped=tuple(dropped),
    )


def _retention(request: HintRequest, dropped: list[str]) -> Retention | None:
    """As long as the longest mark asks, up to the last of them; all of it for a mark at the top level."""
    marks = find_marks(request, MARK, _PLACES, dropped, MAX_MARKS + 1)
    if len(marks) > MAX_MARKS:
        dropped.append(f"cache_control: more than {MAX_MARKS} marks")
    longest, last, up_to = 0.0, TTLS["1h"], BEFORE_MESSAGES
    for mark in marks[:MAX_MARKS]:
        ttl = _ttl(mark.value, dropped)
        if ttl is not None and ttl > last:
            dropped.append("cache_control: a longer ttl behind a shorter one")
        elif ttl is not None:
            longest, last, up_to = longest or ttl, ttl, mark.message
    whole = read_object(request.fields.get("cache_control"), "cache_control", dropped)
    ttl = _ttl(whole, dropped) if whole is not None else None
    if ttl is not None:
        return Retention(ttl_s=max(ttl, longest))
    return Retention(ttl_s=longest, up_to=up_to) if longest else None


def _ttl(control: object, dropped: list[str]) -> float | None:
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        dropped.append("cache_control: type is not ephemeral")
        return None
    ttl = control.get("ttl", "5m")
    if not isinstance(ttl, str) or ttl not in TTLS:
        dropped.append("cache_control.ttl: not one of 5m, 1h")
        return TTLS["5m"]
    return TTLS[ttl]


def _edits(request: HintRequest, dropped: list[str]) -> tuple[ContextEdit, ...]:
    name = "context_management"
    management = read_object(request.fields.get(name), name, dropped)
    if management is None:
        return ()
    edits = []
    for number, value in enumerate(as_list(management.get("edits"), f"{name}.edits", MAX_EDITS, dropped)):
        place = f"{name}.edits[{number}]"
        edit = as_object(value, place, dropped)
        word = edit.get("type") if edit is not None else None
        if edit is not None and isinstance(word, str) and word in _EDITS:
            edits += _edit(_EDITS[word], edit, place, dropped)
        elif edit is not None:
            dropped.append(f"{place}.type: not known")
    return tuple(edits)


def _edit(kind: str, edit: dict[str, Any], place: str, dropped: list[str]) -> list[ContextEdit]:
    """The edit; none, and the reasons, when any of it is not understood: a default in its place could clear what
    the client asked to keep."""
    if len(edit) == 1:  # Only its type.
        return [ContextEdit(kind=kind)]
    reasons: list[str] = []
    units = _UNITS[kind]
    least = _amount(edit, "clear_at_least", ("input_tokens",), place, reasons)
    read = ContextEdit(
        kind=kind,
        trigger=_amount(edit, "trigger", units.get("trigger", ()), place, reasons),
        keep=_amount(edit, "keep", units.get("keep", ()), place, reasons),
        clear_at_least=least[1] if least is not None else 0,
        exclude_tools=_tools(edit, "exclude_tools", place, reasons),
        clear_tool_inputs=_inputs(edit, "clear_tool_inputs", place, reasons),
    )
    dropped += reasons
    return [] if reasons else [read]


def _inputs(edit: dict[str, Any], name: str, place: str, dropped: list[str]) -> bool | tuple[str, ...]:
    value = edit.get(name)
    return value is True if value is None or isinstance(value, bool) else _tools(edit, name, place, dropped)


def _tools(edit: dict[str, Any], name: str, place: str, dropped: list[str]) -> tuple[str, ...]:
    value = edit.get(name)
    if value is None:
        return ()
    place = f"{place}.{name}"
    tools = as_list(value, place, MAX_TOOLS, dropped)
    if not all(isinstance(tool, str) for tool in tools):
        dropped.append(f"{place}: not names of tools")
    return tuple(tool for tool in tools if isinstance(tool, str))


def _amount(
    edit: dict[str, Any], name: str, units: tuple[str, ...], place: str, dropped: list[str]
) -> tuple[str, int] | None:
    """One of ``units`` and a number of it; ``"all"`` has the number 0."""
    value = edit.get(name)
    if value is None:
        return None
    place = f"{place}.{name}"
    if value == "all":
        value = {"type": "all"}
    unit = value.get("type") if isinstance(value, dict) else None
    number = as_index(value.get("value", 0 if unit == "all" else None)) if isinstance(value, dict) else None
    if not isinstance(unit, str) or number is None:
        dropped.append(f"{place}: not a type and a value")
    elif unit not in units:
        dropped.append(f"{place}.type: not one of {', '.join(units) or 'none'}")
    else:
        return unit, number
    return None
