"""Claude Code's headers. Its sub-agents share the session's id and have one of their own besides."""

from __future__ import annotations

from kvpilot.domain import SessionRef
from kvpilot.hints.ids import read_id
from kvpilot.hints.result import HintRequest, Hints

HEADERS = ("x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id")


def read(request: HintRequest) -> Hints | None:
    dropped: list[str] = []
    session, agent, parent = [read_id(request.headers, name, "", dropped) for name in HEADERS]
    ref = SessionRef(session, parent, "claude-code")
    if agent is not None:
        ref = SessionRef(agent, parent or session, "claude-code")
    return Hints(session=ref, dropped=tuple(dropped))
