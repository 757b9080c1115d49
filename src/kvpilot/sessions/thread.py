"""One growing conversation, and the words for where it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvpilot.domain import Retention, Segment, Space

SessionKey = tuple[str, str]
"""(tenant, session id): equal ids of two tenants are two sessions."""


Point = tuple[str, str, bytes]
"""(tenant, salt, hash): a place in a conversation. Hashes are chained, so one names everything before it."""


class Change(StrEnum):
    """How a request's context relates to what its thread had before."""

    NEW = "new"
    CONTINUED = "continued"
    BROKEN = "broken"


@dataclass(slots=True, eq=False)
class Thread:
    """One growing conversation. ``owner`` names its reference in the reference table."""

    owner: str
    session: SessionKey
    space: Space
    hashes: list[bytes] = field(default_factory=list)
    """Chained content hashes of the last prompt: tools first, then one per message."""
    head: int = 0
    """How many leading entries of ``hashes`` are tools and system messages; 0 when there are neither."""
    in_flight: int = 0
    awaited: int = 0
    """How many tellings of its tokens are still to come, of requests that ended."""
    turns: int = 0
    last_seen: float = 0.0
    prompt_ends: list[int] = field(default_factory=list)
    """Lengths of ``hashes`` at earlier requests, oldest first."""
    indexed: list[Point] = field(default_factory=list)
    """Where a content index has it."""
    answered: bool = False
    """Whether its last prompt got a complete reply."""
    awaits_tools: bool = False
    """Whether that reply called tools."""
    mapped_turn: int = 0
    """Which of its requests its reference is that of."""
    last_text: str = ""
    """That reply, where it may be a summary of the conversation."""
    segments: tuple[Segment, ...] = ()
    segments_method: str = ""
    leftover: list[bytes] = field(default_factory=list)
    """The context's chunks as they were before range edits cut it, head first, those edited away empty. What lies
    behind the cut is unusable as a prefix now and goes when the next prompt shows the new context, or with it."""
    keep_until: float = 0.0
    priority: int = 0
    """What a client last wished for this context: a bias where room is made, gone after a restart."""

    @property
    def unsettled(self) -> bool:
        """Whether its context is still going to move: a request runs, or the tokens of one are still to come."""
        return self.in_flight > 0 or self.awaited > 0

    def retain(self, wish: Retention, now: float) -> None:
        """Take a wish to be kept; it replaces an earlier one."""
        self.keep_until, self.priority = now + wish.ttl_s, wish.priority
