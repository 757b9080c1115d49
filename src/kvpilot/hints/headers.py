"""Session ids in headers: ``X-Session-ID`` and ``X-Parent-Session-ID`` (vLLM, OpenCode and others)."""

from __future__ import annotations

from kvpilot.domain import SessionRef
from kvpilot.hints.ids import parse_id
from kvpilot.hints.result import HintRequest, Hints


def read(request: HintRequest) -> Hints | None:
    values = request.headers.get("x-session-id"), request.headers.get("x-parent-session-id")
    if values == (None, None):
        return None
    dropped: list[str] = []
    session = parse_id(values[0], "x-session-id", dropped)
    parent = parse_id(values[1], "x-parent-session-id", dropped)
    return Hints(session=SessionRef(id=session, parent=parent, source="headers"), dropped=tuple(dropped))
