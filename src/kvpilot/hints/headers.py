"""``X-Session-ID`` and ``X-Parent-Session-ID``: vLLM, OpenCode, MindIE and others."""

from __future__ import annotations

from kvpilot.hints.ids import read_session
from kvpilot.hints.result import HintRequest, Hints

HEADERS = ("x-session-id", "x-parent-session-id")


def read(request: HintRequest) -> Hints | None:
    dropped: list[str] = []
    session = read_session(request.headers, "headers", *HEADERS, dropped)
    return Hints(session=session, dropped=tuple(dropped))
