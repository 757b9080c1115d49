"""The versioned KV-hint envelope of vLLM, SGLang and Dynamo: actions on a session, a token range or chunks.

``{"protocol_version", "message_id", "actions": [{"action_id", "action_type", "action_version", "payload"}]}``,
as the body's ``kv_hints`` (or ``kv_hint``) or in ``kv_transfer_params.kv_hint``. The envelope is theirs; they
define no payload for these actions yet, so this module does:

* target: ``block_hashes`` (unsigned 64-bit) or ``chunk_hashes`` (hex), else ``session_id`` (the request's own
  when absent), of that ``token_start`` and ``token_end``;
* ``kv.prefetch``: ``eta_s``, seconds until the KV is needed (absent: now); ``kv.retain``: ``ttl`` in seconds,
  ``priority``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kvpilot.domain import ActionKind, Command, Retention, SessionRef, Signal, SignalKind, TargetKind
from kvpilot.hints.ids import read_id
from kvpilot.hints.result import HintRequest, Hints
from kvpilot.hints.values import (
    MAX_TTL_S,
    as_list,
    as_object,
    as_range,
    read_field,
    read_object,
    read_priority,
    read_ttl,
)

NAME = "kv_hints"
FIELDS = ("kv_hints", "kv_hint", "kv_transfer_params")
PROTOCOL, ACTION_VERSION = "0.1", "1.0"
MAX_ACTIONS = 16
MAX_HASHES = 4096
TTL_DEFAULT_S = 300.0
RETAIN = "kv.retain"
KINDS = {
    "kv.prefetch": ActionKind.PREFETCH,
    "kv.demote": ActionKind.DEMOTE,
    "kv.release": ActionKind.EVICT,
}
NOT_YET = "rejected: not supported yet"


def read(request: HintRequest) -> Hints | None:
    dropped: list[str] = []
    params = read_field(request, "kv_transfer_params", dropped) or {}
    envelopes = (
        read_object(request.fields.get("kv_hints"), "kv_hints", dropped),
        read_object(request.fields.get("kv_hint"), "kv_hint", dropped),
        as_object(params.get("kv_hint"), "kv_transfer_params.kv_hint", dropped) if params else None,
    )
    found = [envelope for envelope in envelopes if envelope is not None]
    if not found:
        return Hints(dropped=tuple(dropped)) if dropped else None
    if len(found) > 1:
        dropped.append(f"{NAME}: more than one envelope, the first counts")
    return _Reader(request, dropped).read(found[0])


class _Reader:
    """One pass over one envelope."""

    def __init__(self, request: HintRequest, dropped: list[str]) -> None:
        self.request = request
        self.dropped = dropped
        self.commands: list[Command] = []
        self.signals: list[Signal] = []
        self.retention: Retention | None = None
        self.seen: set[str] = set()
        self.message_id: str | None = None

    def read(self, envelope: dict[str, Any]) -> Hints:
        if envelope.get("protocol_version") != PROTOCOL:
            return Hints(dropped=(*self.dropped, f"{NAME}.protocol_version: not {PROTOCOL}"))
        self.message_id = read_id(envelope, "message_id", NAME, self.dropped)
        for number, action in enumerate(
            as_list(envelope.get("actions"), f"{NAME}.actions", MAX_ACTIONS, self.dropped)
        ):
            place = f"{NAME}.actions[{number}]"
            if reason := self._action(action, number, place):
                self.dropped.append(f"{place}: {reason}")
        return Hints(
            commands=tuple(self.commands),
            signals=tuple(self.signals),
            retention=self.retention,
            dropped=tuple(self.dropped),
        )

    def _action(self, action: object, number: int, place: str) -> str | None:
        """Take one action; the reason when it is not taken."""
        if not isinstance(action, dict):
            return "not an object"
        word, payload = action.get("action_type"), action.get("payload")
        if not isinstance(word, str) or (word not in KINDS and word != RETAIN):
            return "action_type is not known"
        if action.get("action_version", ACTION_VERSION) != ACTION_VERSION:
            return f"action_version is not {ACTION_VERSION}"
        own_id = read_id(action, "action_id", place, self.dropped)
        if own_id in self.seen:
            return "action_id is a repetition"
        if own_id is not None:
            self.seen.add(own_id)
        if payload is not None and not isinstance(payload, dict):
            return "payload is not an object"
        before, payload = len(self.dropped), payload or {}
        session = SessionRef(id=read_id(payload, "session_id", place, self.dropped))
        if len(self.dropped) > before:
            return "its session is not known"
        if word == RETAIN:
            return self._retain(payload, session, place)
        names = [f"action:{own_id}"] if own_id else []
        names += [f"message:{self.message_id}#{number}"] if self.message_id else []
        source = f"{NAME}:{own_id}" if own_id else NAME
        return self._command(KINDS[word], payload, session, source, tuple(names))

    def _command(
        self,
        kind: ActionKind,
        payload: dict[str, Any],
        session: SessionRef,
        source: str,
        client_ids: tuple[str, ...],
    ) -> str | None:
        make = partial(self.request.command, client_ids=client_ids)
        hashes = _hashes(payload)
        if isinstance(hashes, str):
            return hashes
        span = _token_range(payload)
        if isinstance(span, str):
            return span
        eta = payload.get("eta_s") if kind is ActionKind.PREFETCH else None
        if eta is not None:
            seconds = read_ttl(eta, f"{NAME}.eta_s", 0.0, MAX_TTL_S, self.dropped)
            if seconds and not hashes and span is None:
                # A whole session due later: the planner fetches it in time and knows what else is due.
                self.signals.append(self.request.signal(SignalKind.EXPECTED, session=session, eta_s=seconds))
                return None
            if seconds:
                return f"{NOT_YET}: eta_s for a part of a session"
        if hashes:
            self.commands.append(make(kind, TargetKind.CHUNKS, source, session=session, chunks=hashes))
        elif span is not None:
            start, end = span
            self.commands.append(make(kind, TargetKind.TOKENS, source, session=session, start=start, end=end))
        else:
            self.commands.append(make(kind, TargetKind.SESSION, source, session=session))
        return None

    def _retain(self, payload: dict[str, Any], session: SessionRef, place: str) -> str | None:
        if "block_hashes" in payload or "chunk_hashes" in payload:
            return f"{NOT_YET}: chunks are kept with the session they belong to"
        span = _token_range(payload)
        if isinstance(span, str):
            return span
        if span is not None and span[0] != 0:
            return f"{NOT_YET}: a range that does not begin at token 0"
        retention = Retention(
            ttl_s=read_ttl(payload.get("ttl"), f"{place}.ttl", TTL_DEFAULT_S, MAX_TTL_S, self.dropped),
            up_to=span[1] if span is not None else None,
            unit=TargetKind.TOKENS if span is not None else TargetKind.MESSAGES,
            priority=read_priority(payload.get("priority"), f"{place}.priority", self.dropped),
        )
        if session.id is not None:
            self.signals.append(self.request.signal(SignalKind.RETAIN, session=session, retention=retention))
        elif self.retention is None:
            self.retention = retention
        else:
            return "a second retention of the same session"
        return None


def _hashes(payload: dict[str, Any]) -> tuple[str, ...] | str:
    """Chunk hashes in hex, or why there are none though some were given."""
    chunks, blocks = payload.get("chunk_hashes"), payload.get("block_hashes")
    if chunks is None and blocks is None:
        return ()
    given = chunks if chunks is not None else blocks
    if not isinstance(given, list) or not 0 < len(given) <= MAX_HASHES:
        return f"hashes are not a list of 1 to {MAX_HASHES}"
    if chunks is not None:
        if all(isinstance(item, str) and len(item) <= 80 for item in given):
            return tuple(given)
        return "chunk_hashes are not texts in hex"
    if all(type(item) is int and 0 <= item < 2**64 for item in given):
        return tuple(f"{item:016x}" for item in given)
    return "block_hashes are not unsigned 64-bit numbers"


def _token_range(payload: dict[str, Any]) -> tuple[int, int] | str | None:
    if "token_start" not in payload and "token_end" not in payload:
        return None
    start, end = payload.get("token_start", 0), payload.get("token_end")
    return as_range(start, end) or "token_start and token_end are not a half-open range"
