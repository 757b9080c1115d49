"""Claude Code's headers; without them (older versions) the session that its ``metadata.user_id`` ends with.

Its sub-agents share the session's id and have one of their own besides, in the headers only.
"""

from __future__ import annotations

import re

from kvpilot.domain import SessionRef
from kvpilot.hints.ids import parse_id, read_id
from kvpilot.hints.result import HintRequest, Hints
from kvpilot.hints.values import read_field, read_object

HEADERS = ("x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id")
CANONICAL = ("x-dynamo-session-id", "x-session-id")
"""Headers of others by which somebody says more about the session than its user id does."""
FIELD = "metadata"
SOURCE = "claude-code"

_USER_ID = re.compile(r"user_[0-9a-f]*_account_[0-9a-f-]*_session_([0-9a-f-]+)")


def read_headers(request: HintRequest) -> Hints | None:
    dropped: list[str] = []
    session, agent, parent = [read_id(request.headers, name, "", dropped) for name in HEADERS]
    ref = SessionRef(session, parent, SOURCE)
    if agent is not None:
        ref = SessionRef(agent, parent or session, SOURCE)
    return Hints(session=ref, dropped=tuple(dropped))


def read_body(request: HintRequest) -> Hints | None:
    """Everybody may send ``metadata``: what is not Claude Code's is nobody's mistake."""
    if any(name in request.headers for name in (*HEADERS, *CANONICAL)):
        return None
    user = (read_field(request, FIELD, []) or {}).get("user_id")
    session = _session(user) if isinstance(user, str) else None
    return Hints(session=SessionRef(session, source=SOURCE)) if session is not None else None


def _session(user: str) -> str | None:
    if found := _USER_ID.fullmatch(user):
        return parse_id(found[1], FIELD, [])
    if not user.startswith("{"):
        return None
    said = read_object(user.encode("utf-8", "replace"), FIELD, []) or {}
    return parse_id(said.get("session_id"), FIELD, []) if "device_id" in said else None
