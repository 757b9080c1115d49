"""The ``agent_hint`` of openJiuwen and MindIE.

Ids, ``context_management``, ``session_control``, ``cache_control``; also the short form
``{"session_id", "parent_task_id", "action"}``, one session-wide edit.
"""

from __future__ import annotations

from typing import Any

from kvpilot.domain import ActionKind, Command, Signal, SignalKind, TargetKind
from kvpilot.hints.content import count_items
from kvpilot.hints.ids import read_session
from kvpilot.hints.result import HintRequest, Hints, Retention
from kvpilot.hints.values import as_number, as_range

FIELD = "agent_hint"
OWN_WORDS = frozenset(("msg_offset", "target", "start", "end", "session_control", "action", "parent_task_id"))
"""Words that only this dialect of ``agent_hint`` has."""
MAX_EDITS = 16
TTL_DEFAULT_S, TTL_MIN_S, TTL_MAX_S = 300, 60, 3600

KINDS = {"evict": ActionKind.EVICT, "offload": ActionKind.DEMOTE, "prefetch": ActionKind.PREFETCH}
_RANGES = {"messages": TargetKind.MESSAGES, "tools": TargetKind.TOOLS}
_CONTROLS: dict[str, tuple[ActionKind, SignalKind] | None] = {
    "start": None,
    "pause": (ActionKind.DEMOTE, SignalKind.SUSPEND),
    "resume": (ActionKind.PREFETCH, SignalKind.RESUME),
    "stop": (ActionKind.EVICT, SignalKind.END),
    "compact": (ActionKind.EVICT, SignalKind.COMPACTED),
}


def read(request: HintRequest, hint: dict[str, Any]) -> Hints:
    """``hint`` is the decoded ``agent_hint``."""
    return _Reader(request, hint).read()


class _Reader:
    """One pass over one hint; collects what is valid and a reason for what is not."""

    def __init__(self, request: HintRequest, hint: dict[str, Any]) -> None:
        self.request = request
        self.hint = hint
        self.commands: list[Command] = []
        self.signals: list[Signal] = []
        self.dropped: list[str] = []
        self.manage = False

    def read(self) -> Hints:
        parent_field = "parent_session_id" if "parent_session_id" in self.hint else "parent_task_id"
        session = read_session(self.hint, FIELD, "session_id", parent_field, self.dropped)
        self._context_management()
        self._session_control()
        self._action()
        return Hints(
            session=session,
            commands=tuple(self.commands),
            signals=tuple(self.signals),
            retention=self._retention(),
            manage=self.manage,
            dropped=tuple(self.dropped),
        )

    def _drop(self, what: str, why: str) -> None:
        self.dropped.append(f"{FIELD}.{what}: {why}")

    def _add(self, kind: ActionKind, target: TargetKind, start: int = 0, end: int = 0) -> None:
        self.commands.append(self.request.command(kind, target, FIELD, start=start, end=end))

    def _context_management(self) -> None:
        name = "context_management"
        value = self.hint.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            return self._drop(name, "not an object")
        manage, edits = value.get("manage_request"), value.get("edits")
        # Whatever is wrong with its edits, its old messages are not there to be answered.
        self.manage = manage is True
        if edits is not None and not isinstance(edits, list):
            return self._drop(f"{name}.edits", "not a list")
        if not isinstance(manage, bool):
            if edits or manage is not None:
                self._drop(f"{name}.manage_request", "must be a boolean")
            return None
        for index, edit in enumerate(edits or ()):
            if index >= MAX_EDITS:
                return self._drop(f"{name}.edits", f"more than {MAX_EDITS}")
            if reason := self._edit(edit):
                self._drop(f"{name}.edits[{index}]", reason)
        return None

    def _edit(self, edit: object) -> str | None:
        """Take one edit; the reason when it is not valid."""
        if not isinstance(edit, dict):
            return "not an object"
        kind = _lookup(KINDS, edit.get("type"))
        if kind is None:
            return "type is not one of evict, offload, prefetch"
        if "block_start" in edit or "block_end" in edit:
            return "a range in blocks beside words of openJiuwen: give messages or tools"
        target = edit.get("target", "session")
        if target == "session":
            self._add(kind, TargetKind.SESSION)
            return None
        if not isinstance(target, str) or target not in _RANGES:
            return "target is not one of session, messages, tools"
        span = as_range(edit.get("start"), edit.get("end"))
        if span is None:
            return "start and end are not a half-open range"
        self._add(kind, _RANGES[target], *span)
        return None

    def _session_control(self) -> None:
        name = "session_control"
        value = self.hint.get(name)
        if value is None:
            return None
        control = value.get("type") if isinstance(value, dict) else None
        if not isinstance(control, str) or control not in _CONTROLS:
            return self._drop(name, "type is not one of " + ", ".join(_CONTROLS))
        if self.manage and any(command.target is TargetKind.SESSION for command in self.commands):
            return self._drop(name, "a session-wide edit was given too and wins")
        meaning = _CONTROLS[control]
        if meaning is None:
            self.manage = self.manage or not self.request.has_content
            return None
        kind, signal = meaning
        self._add(kind, TargetKind.SESSION)
        self.signals.append(self.request.signal(signal))
        self.manage = True
        return None

    def _action(self) -> None:
        value = self.hint.get("action")
        if value is None:
            return None
        kind = _lookup(KINDS, value)
        if kind is None:
            return self._drop("action", "not one of evict, offload, prefetch")
        if self.commands:
            return self._drop("action", "edits or session_control were given too and win")
        self._add(kind, TargetKind.SESSION)
        self.manage = self.manage or not self.request.has_content
        return None

    def _retention(self) -> Retention | None:
        name = "cache_control"
        value = self.hint.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self._drop(name, "not an object")
            return None
        offset = value.get("msg_offset")
        if offset is not None and not (
            type(offset) is int and 0 <= offset < count_items(self.request, "messages")
        ):
            self._drop(name, "msg_offset does not lie inside messages")
            return None
        return Retention(ttl_s=_ttl(value.get("ttl")), up_to=offset)


def _lookup(table: dict[str, ActionKind], key: object) -> ActionKind | None:
    return table.get(key) if isinstance(key, str) else None


def _ttl(value: object) -> int:
    """Seconds as MindIE reads them: an integer in 60…3600, 300 when it is not a number."""
    number = as_number(value)
    return TTL_DEFAULT_S if number is None else int(min(max(number, TTL_MIN_S), TTL_MAX_S))
