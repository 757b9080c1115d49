"""``X-Session-ID`` and ``X-Parent-Session-ID``: vLLM, OpenCode, MindIE and others."""

from __future__ import annotations

from kvpilot.domain import SignalKind
from kvpilot.hints.ids import read_session
from kvpilot.hints.result import HintRequest, Hints
from kvpilot.hints.values import is_true

HEADERS = ("x-session-id", "x-parent-session-id")


def read(request: HintRequest) -> Hints | None:
    dropped: list[str] = []
    session = read_session(request.headers, "headers", *HEADERS, dropped)
    return Hints(session=session, dropped=tuple(dropped))


def read_flagged(request: HintRequest, source: str, names: tuple[str, str, str], kind: SignalKind) -> Hints:
    """A harness's own headers: session, parent, and one that says yes to a signal of ``kind``."""
    session, parent, flag = names
    dropped: list[str] = []
    found = read_session(request.headers, source, session, parent, dropped)
    if flag in request.headers and is_true(request.headers[flag]):
        return Hints(session=found, signals=(request.signal(kind),), dropped=tuple(dropped))
    return Hints(session=found, dropped=tuple(dropped))
