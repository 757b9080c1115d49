"""Which headers travel on, in both directions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import quote

RawHeaders = Iterable[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_HOST = frozenset((b"host", b"expect"))
_HOST_AND_LENGTH = _HOST | {b"content-length"}


def as_mapping(headers: RawHeaders) -> dict[str, str]:
    """Names in lower case; of a repeated header the first value counts."""
    result: dict[str, str] = {}
    for name, value in headers:
        result.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return result


def request_headers(
    headers: RawHeaders, replace: Mapping[bytes, bytes], *, keep_length: bool = False
) -> list[tuple[bytes, bytes]]:
    """Headers for the engine: the client's without those of its connection, then ``replace`` in their place."""
    kept = _end_to_end(headers, frozenset(replace) | (_HOST if keep_length else _HOST_AND_LENGTH))
    kept.extend(replace.items())
    return kept


def reply_headers(headers: RawHeaders, *, keep_length: bool) -> list[tuple[bytes, bytes]]:
    """Headers for the client: the engine's without those of its connection."""
    return _end_to_end(headers, frozenset() if keep_length else frozenset((b"content-length",)))


def _end_to_end(headers: RawHeaders, drop: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    lowered = [(name.lower(), value) for name, value in headers]
    named = {
        token.strip().lower()
        for name, value in lowered
        if name == b"connection"
        for token in value.split(b",")
    }
    return [
        (name, value)
        for name, value in lowered
        if name not in _HOP_BY_HOP and name not in drop and name not in named
    ]


def header_text(text: str) -> bytes:
    """Any text as a header value: printable ASCII as it is, the rest percent-encoded."""
    return quote(text, safe=" !\"#$&'()*+,/:;<=>?@[]^`{|}\\").strip().encode("ascii")
