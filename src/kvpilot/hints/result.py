"""What a request may say, in one vocabulary, whichever dialect said it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvpilot.domain import Command, SessionRef, SignalKind

_NO_SESSION = SessionRef()


@dataclass(frozen=True, slots=True)
class HintRequest:
    """What a dialect sees of a request."""

    fields: Mapping[str, msgspec.Raw]
    """Top level of the JSON body, values undecoded; empty when the body is not a JSON object."""
    headers: Mapping[str, str]
    """Header names in lower case."""
    tenant: str = "default"
    salt: str = ""
    body: bytes = b""
    """The whole body, for commands whose range refers to its messages or tools."""

    @property
    def has_content(self) -> bool:
        """Whether there is anything to infer from: a request without it can only be about KV."""
        values = (self.fields.get(name) for name in ("messages", "prompt"))
        return any(value is not None and not _is_empty(value) for value in values)


@dataclass(frozen=True, slots=True)
class Retention:
    """A wish to keep the context for ``ttl_s`` seconds, up to ``message_offset`` (None: all of it)."""

    ttl_s: int
    message_offset: int | None = None


@dataclass(frozen=True, slots=True)
class Hints:
    """What was understood. Dialects leave their commands' session to :func:`kvpilot.hints.read_hints`."""

    session: SessionRef = _NO_SESSION
    commands: tuple[Command, ...] = ()
    signals: tuple[SignalKind, ...] = ()
    retention: Retention | None = None
    manage: bool = False
    """The request manages KV: answer it at the gateway, never forward it."""
    dropped: tuple[str, ...] = ()
    """What was malformed, one reason each."""


def _is_empty(value: msgspec.Raw) -> bool:
    return memoryview(value).nbytes < 64 and b"".join(bytes(value).split()) in (b"[]", b'""', b"null")
