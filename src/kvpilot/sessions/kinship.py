"""Which new session is whose sub-agent, when nobody says so.

A sub-agent begins within seconds of the tool call that starts it: behind the end of the parent's reply, or still
during it, when the client acts on a call as soon as it has streamed in. It mostly has tools or a system prompt of its
own; a session that begins like its would-be parent may as well be just another one. Pure state.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpilot.domain import Space
from kvpilot.sessions.thread import SessionKey

AFTER_CALL_S, AFTER_CALL_ALIKE_S = 5.0, 1.0
"""How long after its parent's reply a sub-agent may begin; and one with the parent's own head."""
BEFORE_END_S = 60.0
"""How long before the end of its parent's reply."""


@dataclass(slots=True)
class _Call:
    """``left`` agents called by a reply that ended at ``at`` have not been seen yet."""

    parent: SessionKey
    space: Space
    head: bytes
    at: float
    left: int


@dataclass(frozen=True, slots=True)
class _Orphan:
    session: SessionKey
    space: Space
    head: bytes
    at: float


class Kinship:
    """Agent calls waiting for their agents, and new sessions that may yet turn out to be some."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._orphans: list[_Orphan] = []

    def born(self, session: SessionKey, space: Space, head: bytes, now: float) -> SessionKey | None:
        """A session begins at ``now``, its tools and system messages named by ``head``; its parent, if one waits."""
        self._calls = [call for call in self._calls if call.left and now - call.at <= AFTER_CALL_S]
        self._orphans = [orphan for orphan in self._orphans if now - orphan.at <= BEFORE_END_S]
        waiting = [
            call
            for call in self._calls
            if call.space == space
            and call.parent[0] == session[0]
            and (call.head != head or now - call.at <= AFTER_CALL_ALIKE_S)
        ]
        if not waiting:
            self._orphans.append(_Orphan(session, space, head, now))
            return None
        call = max(waiting, key=lambda call: call.at)
        call.left -= 1
        return call.parent

    def called(
        self, parent: SessionKey, space: Space, head: bytes, began: float, agents: int, now: float
    ) -> list[SessionKey]:
        """The parent's reply, begun at ``began`` and ended ``now``, has called agents; those that run already."""
        running = [
            orphan
            for orphan in self._orphans
            if orphan.space == space
            and orphan.session[0] == parent[0]
            and orphan.head != head
            and max(began, now - BEFORE_END_S) < orphan.at <= now
        ]
        # The latest: calls are at the end of a reply.
        found = running[-agents:]
        self._orphans = [orphan for orphan in self._orphans if orphan not in found]
        self._calls = [call for call in self._calls if call.left and now - call.at <= AFTER_CALL_S]
        if agents > len(found):
            self._calls.append(_Call(parent, space, head, now, agents - len(found)))
        return [orphan.session for orphan in found]
