"""What a request may say, in one vocabulary, whichever dialect said it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from kvpilot.domain import (
    ActionKind,
    Command,
    Retention,
    SessionRef,
    Signal,
    SignalKind,
    TargetKind,
)
from kvpilot.hints.body import Marked

__all__ = ["ContextEdit", "HintRequest", "Hints", "Retention"]

_NO_SESSION = SessionRef()
_WITHOUT_RANGE = (TargetKind.SESSION, TargetKind.CHUNKS)


CONTENT_FIELDS = ("messages", "prompt", "prompt_embeds", "input")


class HintRequest(msgspec.Struct, frozen=True):
    """What a dialect sees of a request."""

    fields: Mapping[str, msgspec.Raw]
    """Top level of the JSON body, values undecoded; empty when the body is not a JSON object."""
    headers: Mapping[str, str]
    """Header names in lower case."""
    tenant: str = "default"
    salt: str = ""
    body: bytes = b""
    """The whole body, for commands whose range refers to its messages or tools."""
    now: float = msgspec.field(default_factory=time.time)
    seen: dict[str, Any] = msgspec.field(default_factory=dict)
    """What one dialect decoded of the body and the next may look for, too (``hints.content``, ``hints.values``)."""

    @property
    def has_content(self) -> bool:
        """Whether there is anything to infer from: a request without it can only be about KV."""
        for name in CONTENT_FIELDS:
            if isinstance(self.fields, Marked) and self.fields.lists.get(name):
                return True
            value = self.fields.get(name)
            if value is not None and not _is_empty(value):
                return True
        return False

    def command(
        self,
        kind: ActionKind,
        target: TargetKind,
        source: str,
        *,
        session: SessionRef = _NO_SESSION,
        start: int = 0,
        end: int = 0,
        chunks: tuple[str, ...] = (),
        client_ids: tuple[str, ...] = (),
    ) -> Command:
        """A command of this request's tenant. Ranges take the body with them: it tells what they count in."""
        return Command(
            kind=kind,
            tenant=self.tenant,
            salt=self.salt,
            session=session,
            target=target,
            start=start,
            end=end,
            body=b"" if target in _WITHOUT_RANGE else self.body,
            chunks=chunks,
            source=source,
            client_ids=client_ids,
        )

    def signal(
        self,
        kind: SignalKind,
        *,
        session: SessionRef = _NO_SESSION,
        eta_s: float | None = None,
        retention: Retention | None = None,
    ) -> Signal:
        """A signal of this request's tenant."""
        return Signal(
            at=self.now, tenant=self.tenant, session=session, kind=kind, eta_s=eta_s, retention=retention
        )


class ContextEdit(msgspec.Struct, frozen=True):
    """An edit of the context the client asks the server for (Anthropic's ``context_management``).

    ``trigger`` and ``keep`` are a unit and a number, like ``("input_tokens", 100000)``; None where not given.
    """

    kind: str
    """``clear_tool_uses``, ``clear_thinking`` or ``compact``."""
    trigger: tuple[str, int] | None = None
    keep: tuple[str, int] | None = None
    clear_at_least: int = 0
    """Input tokens below which clearing is not worth the broken prefix."""
    exclude_tools: tuple[str, ...] = ()
    clear_tool_inputs: bool | tuple[str, ...] = False
    """Whether the inputs of cleared tool uses go too, or those of which tools."""


class Hints(msgspec.Struct, frozen=True):
    """What was understood.

    Commands and signals that a dialect leaves without a session are bound to the request's by
    :func:`kvpilot.hints.read_hints`.
    """

    session: SessionRef = _NO_SESSION
    commands: tuple[Command, ...] = ()
    signals: tuple[Signal, ...] = ()
    """Of a request that is forwarded, they hold once it has ended."""
    retention: Retention | None = None
    """Of the context this request has."""
    edits: tuple[ContextEdit, ...] = ()
    warm: bool = False
    """The client only wants its prompt cached: nothing is to be generated."""
    manage: bool = False
    """The request manages KV: answer it at the gateway, never forward it."""
    dropped: tuple[str, ...] = ()
    """What was malformed or cannot be done, one reason each."""


def _is_empty(value: msgspec.Raw) -> bool:
    if len(value) > 64:
        return False
    text = bytes(value).strip()
    return text in (b'""', b"null") or b"".join(text.split()) == b"[]"
