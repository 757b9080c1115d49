"""All dialects, asked in order of precedence, joined into one :class:`Hints`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvpilot.domain import SessionRef
from kvpilot.hints import headers, openjiuwen
from kvpilot.hints.result import HintRequest, Hints

Dialect = Callable[[HintRequest], Hints | None]
"""Reads one dialect; None when the request does not speak it. Never raises on what a client sent."""

DIALECTS: tuple[Dialect, ...] = (openjiuwen.read, headers.read)
"""What the body says comes before what headers say."""

_NOTHING = Hints()


def read_hints(request: HintRequest, dialects: Sequence[Dialect] = DIALECTS) -> Hints:
    """Everything the request says about its session. Earlier dialects win, id by id.

    One id alone counts for both; a session that is its own parent is a root (``parent`` None). Commands are
    bound to the session found; without any session they are dropped.
    """
    found = [hints for dialect in dialects if (hints := dialect(request)) is not None]
    if not found:
        return _NOTHING
    session = _join_ids([hints.session for hints in found])
    commands = [command for hints in found for command in hints.commands]
    signals = tuple(signal for hints in found for signal in hints.signals)
    dropped = [reason for hints in found for reason in hints.dropped]
    if (commands or signals) and session.id is None:
        dropped.append("edits or session_control without a session id")
        commands, signals = [], ()
    return Hints(
        session=session,
        commands=tuple(msgspec.structs.replace(command, session=session) for command in commands),
        signals=signals,
        retention=next((hints.retention for hints in found if hints.retention is not None), None),
        manage=any(hints.manage for hints in found),
        dropped=tuple(dropped),
    )


def _join_ids(refs: Sequence[SessionRef]) -> SessionRef:
    named = next((ref for ref in refs if ref.id is not None), None)
    parent = next((ref for ref in refs if ref.parent is not None), None)
    if named is not None:
        other = parent.parent if parent is not None else None
        return SessionRef(id=named.id, parent=other if other != named.id else None, source=named.source)
    if parent is not None:
        return SessionRef(id=parent.parent, source=parent.source)
    return SessionRef()
