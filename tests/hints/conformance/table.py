"""What a row of the conformance table is, and how hints are put into words to compare with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpilot.domain import Command, Retention, Signal, TargetKind
from kvpilot.hints import ContextEdit, HintRequest, Hints, read_body, read_hints

MESSAGES = [{"role": "system", "content": "s"}, *[{"role": "user", "content": "hi"}] * 3]
NOW = 1_000_000.0


@dataclass(frozen=True, slots=True)
class Row:
    """One rule with one example. What a row does not mention must not be there in the result."""

    source: str
    """Section of the wire formats, then how that is known."""
    rule: str
    body: Mapping[str, Any] | None = None
    """Fields of the body beside ``model`` and, unless given, four messages."""
    headers: Mapping[str, str] | None = None
    session: str | None = None
    parent: str | None = None
    commands: Sequence[str] = ()
    signals: Sequence[str] = ()
    retention: str | None = None
    edits: Sequence[str] = ()
    manage: bool = False
    warm: bool = False
    dropped: Sequence[str] = ()
    """For each reason a text it contains."""

    def result(self) -> Hints:
        return read({"messages": MESSAGES, **(self.body or {})}, self.headers or {})

    def expected(self) -> dict[str, Any]:
        """The result in words."""
        names = ("session", "parent", "commands", "signals", "retention", "edits", "manage", "warm")
        return {name: _plain(getattr(self, name)) for name in names}


def read(body: Mapping[str, Any], headers: Mapping[str, str]) -> Hints:
    """As the gateway reads a request."""
    raw = json.dumps({"model": "m", **body}).encode()
    lower = {name.lower(): value for name, value in headers.items()}
    return read_hints(HintRequest(read_body(raw), lower, tenant="t", salt="s", body=raw, now=NOW))


def in_words(hints: Hints) -> dict[str, Any]:
    own = hints.session.id
    return {
        "session": own,
        "parent": hints.session.parent,
        "commands": [_command(command, own) for command in hints.commands],
        "signals": [_signal(signal, own) for signal in hints.signals],
        "retention": None if hints.retention is None else _retention(hints.retention),
        "edits": [_edit(edit) for edit in hints.edits],
        "manage": hints.manage,
        "warm": hints.warm,
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else value


def _command(command: Command, own: str | None) -> str:
    words = [command.kind.value, command.target.value]
    if command.target is TargetKind.CHUNKS:
        words.append(",".join(command.chunks))
    elif command.target is not TargetKind.SESSION:
        words.append(f"{command.start}:{command.end}")
    return " ".join(words) + _of(command.session.id, own)


def _signal(signal: Signal, own: str | None) -> str:
    words = [signal.kind.value]
    if signal.eta_s is not None:
        words.append(f"in {signal.eta_s:g} s")
    if signal.retention is not None:
        words.append(_retention(signal.retention))
    return " ".join(words) + _of(signal.session.id, own)


def _retention(wish: Retention) -> str:
    words = [f"{wish.ttl_s:g} s"]
    if wish.up_to is not None:
        words.append(f"up to {wish.unit.value} {wish.up_to}")
    if wish.priority:
        words.append(f"priority {wish.priority}")
    return " ".join(words)


def _edit(edit: ContextEdit) -> str:
    words = [edit.kind]
    for name, amount in (("from", edit.trigger), ("keep", edit.keep)):
        if amount is not None:
            words.append(f"{name} {amount[1]} {amount[0]}")
    if edit.clear_at_least:
        words.append(f"at least {edit.clear_at_least}")
    if edit.exclude_tools:
        words.append("not " + ",".join(edit.exclude_tools))
    if edit.clear_tool_inputs is True:
        words.append("inputs too")
    elif edit.clear_tool_inputs:
        words.append(f"inputs of {' '.join(edit.clear_tool_inputs)} too")
    return " ".join(words)


def _of(session: str | None, own: str | None) -> str:
    return "" if session == own else f" of {session}"
