"""``context_management`` of a Messages request: which edits apply is decided here, with the engine's own counts."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvpilot.gateway.edits import TYPES, Message, applied, clear, token_trigger, triggered_by_uses
from kvpilot.gateway.errors import GatewayError
from kvpilot.gateway.headers import RawHeaders
from kvpilot.gateway.request import Fields
from kvpilot.gateway.upstream import Upstream
from kvpilot.hints import ContextEdit

log = logging.getLogger(__name__)

COUNT_PATH = "/v1/messages/count_tokens"
FIELD = "context_management"
TEMPLATE_BYTES = 16 * 1024
"""What a chat template may add to a request's own text. Beyond it a token is at least a byte."""

MAX_COUNTS = 3
"""Counts before a request: the first, and one behind an edit of either kind."""

Count = Callable[[bytes], Awaitable[int | None]]
"""Input tokens of a request's body, by the engine; None when it does not say."""

_FIELDS = msgspec.json.Decoder(Fields)
_MESSAGES = msgspec.json.Decoder(list[Message])


@dataclass(frozen=True, slots=True)
class Edited:
    """A request after its edits. ``applied`` as Anthropic reports them; ``original_tokens`` where it was counted."""

    body: bytes
    applied: list[dict[str, Any]] = field(default_factory=list)
    original_tokens: int | None = None

    def report(self) -> bytes:
        """The reply's ``context_management``."""
        return msgspec.json.encode({"applied_edits": self.applied})


async def edit_context(raw: bytes, edits: Sequence[ContextEdit], count: Count) -> Edited:
    """Apply ``edits`` in their order. Without the engine's counts nothing is cleared: nobody could say how much.
    Nor is what would need more than ``MAX_COUNTS`` of them: the request waits for each.

    Edits that are not applied here (compaction, later ones) stay in the body for the engine.
    """
    try:
        fields = _FIELDS.decode(raw)
        messages = _MESSAGES.decode(fields["messages"])
    except (ValueError, RecursionError, KeyError):
        return Edited(raw)
    fields = _without(fields)
    body = msgspec.json.encode(fields)
    tokens: int | None = None
    original: int | None = None
    done: list[dict[str, Any]] = []
    counts_left = MAX_COUNTS - 1
    for edit in edits:
        limit = token_trigger(edit)
        if len(body) + TEMPLATE_BYTES <= limit or not triggered_by_uses(edit, messages):
            continue
        cleared = clear(edit, messages)
        if cleared is None:
            continue
        if not counts_left:
            break
        if tokens is None:
            tokens = original = await count(body)
        if tokens is None:
            break
        if tokens <= limit:
            continue
        shorter = msgspec.json.encode({**fields, "messages": cleared.messages})
        counts_left -= 1
        left = await count(shorter)
        if left is None or tokens - left < edit.clear_at_least:
            continue
        done.append(applied(edit, cleared, tokens - left))
        body, messages, tokens = shorter, cleared.messages, left
    return Edited(body, done, original)


class EngineCounter:
    """Counts by the engine's own ``count_tokens``. That it gave none is told once."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._told = False

    def of(self, headers: RawHeaders) -> Count:
        """``headers``: those of the request that is counted."""

        async def count(body: bytes) -> int | None:
            found = await self._ask(headers, body)
            if found is None and not self._told:
                self._told = True
                log.warning("context edits were not applied: the engine counted no tokens; told once")
            return found

        return count

    async def _ask(self, headers: RawHeaders, body: bytes) -> int | None:
        try:
            async with await self._upstream.send("POST", COUNT_PATH, list(headers), body) as reply:
                text = await reply.read()
                if reply.status != 200:
                    return None
            answer = msgspec.json.decode(text)
        except (GatewayError, ValueError, RecursionError):
            return None
        found = answer.get("input_tokens") if isinstance(answer, dict) else None
        return found if type(found) is int else None


def count_reply(text: bytes, original: int | None) -> bytes:
    """``count_tokens``' reply, with what the request had before its edits: as much as now where none of them came
    so far that it was counted (None)."""
    try:
        fields = _FIELDS.decode(text)
        before = fields["input_tokens"] if original is None else msgspec.Raw(b"%d" % original)
    except (ValueError, RecursionError, KeyError):
        return text
    fields[FIELD] = msgspec.Raw(msgspec.json.encode({"original_input_tokens": before}))
    return msgspec.json.encode(fields)


def _without(fields: Fields) -> Fields:
    """The request without the edits that are applied here."""
    try:
        management = msgspec.json.decode(fields[FIELD])
        left = [edit for edit in management["edits"] if not _is_applied_here(edit)]
    except (ValueError, RecursionError, KeyError, TypeError):
        return fields
    rest = {**management, "edits": left}
    kept = {name: value for name, value in fields.items() if name != FIELD}
    return {**kept, FIELD: msgspec.Raw(msgspec.json.encode(rest))} if left else kept


def _is_applied_here(edit: object) -> bool:
    return isinstance(edit, dict) and edit.get("type") in TYPES.values()
