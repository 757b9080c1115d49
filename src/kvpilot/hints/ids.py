"""What counts as a session id."""

from __future__ import annotations

from collections.abc import Mapping

from kvpilot.domain import SessionRef

MAX_ID = 256


def parse_id(value: object, name: str, dropped: list[str]) -> str | None:
    """``value`` as a session id: at most 256 printable characters, not empty; else None and a reason."""
    if value is None:
        return None
    text = value.strip() if isinstance(value, str) else ""
    if _is_sound(text):
        return text
    dropped.append(f"{name}: {_what_is_wrong(text)}")
    return None


def read_id(values: Mapping[str, object], key: str, place: str, dropped: list[str]) -> str | None:
    """The id under ``key`` of a hint, ``place`` in the body, or of the headers (no place)."""
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, str) and _is_sound(text := value.strip()):
        return text  # Most are, and need no name for a reason.
    return parse_id(value, f"{place}.{key}" if place else key, dropped)


def read_session(
    values: Mapping[str, object], source: str, session: str, parent: str | None, dropped: list[str]
) -> SessionRef:
    """The session named by key ``session`` (and its parent by key ``parent``) of a hint or of the headers."""
    own = read_id(values, session, source, dropped)
    other = read_id(values, parent, source, dropped) if parent is not None else None
    return SessionRef(id=own, parent=other, source=source)


def _is_sound(text: str) -> bool:
    return 0 < len(text) <= MAX_ID and text.isprintable()


def _what_is_wrong(text: str) -> str:
    if not text:
        return "not a non-empty string"
    return f"longer than {MAX_ID} characters" if len(text) > MAX_ID else "has unprintable characters"
