"""Session ids that are none: clients that make up a new one for every request."""

from __future__ import annotations

from collections import Counter, OrderedDict

from kvpilot.sessions.thread import SessionKey

ENOUGH = 3
"""So many conversations that went on under a fresh id show that a tenant's ids rotate …"""
OUTWEIGHS = 4
"""… when they are so many times those whose id came again."""
MAX_ALIASES = 10_000


class Labels:
    """Per tenant, whether its ids name sessions; and the sessions behind ids that do not. Pure state."""

    def __init__(self) -> None:
        self._rotated: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        self._counted: dict[str, OrderedDict[str, None]] = {}
        self._aliases: OrderedDict[SessionKey, SessionKey] = OrderedDict()

    def came_again(self, tenant: str) -> None:
        """A request had an id that an earlier one had."""
        self._kept[tenant] += 1

    def went_on_under_another(self, tenant: str, owner: str) -> None:
        """A request went on with the conversation ``owner`` of an id used only once, under an id never seen. More
        than one that does so with the same conversation are branches of it."""
        counted = self._counted.setdefault(tenant, OrderedDict())
        if owner not in counted:
            counted[owner] = None
            self._rotated[tenant] += 1
            if len(counted) > MAX_ALIASES:
                counted.popitem(last=False)

    def rotate(self, tenant: str) -> bool:
        """Whether the tenant's ids are new for every request."""
        return self._rotated[tenant] >= max(ENOUGH, OUTWEIGHS * self._kept[tenant])

    def alias(self, label: SessionKey, session: SessionKey) -> None:
        """The request with this id belongs to that session."""
        self._aliases[label] = session
        if len(self._aliases) > MAX_ALIASES:
            self._aliases.popitem(last=False)

    def session(self, label: SessionKey) -> SessionKey | None:
        return self._aliases.get(label)
