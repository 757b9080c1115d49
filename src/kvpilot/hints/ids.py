"""What counts as a session id."""

from __future__ import annotations

from collections.abc import Mapping

from kvpilot.domain import SessionRef

MAX_ID = 256


def parse_id(value: object, name: str, dropped: list[str]) -> str | None:
    """``value`` as a session id: at most 256 printable characters, not empty; else None and a reason."""
    if value is None:
        return None
    if not isinstance(value, str) or not (text := value.strip()):
        dropped.append(f"{name}: not a non-empty string")
    elif len(text) > MAX_ID:
        dropped.append(f"{name}: longer than {MAX_ID} characters")
    elif not text.isprintable():
        dropped.append(f"{name}: has unprintable characters")
    else:
        return text
    return None


def read_id(values: Mapping[str, object], key: str, place: str, dropped: list[str]) -> str | None:
    """The id under ``key`` of a hint, ``place`` in the body, or of the headers (no place)."""
    value = values.get(key)
    return None if value is None else parse_id(value, f"{place}.{key}" if place else key, dropped)


def read_session(
    values: Mapping[str, object], source: str, session: str, parent: str | None, dropped: list[str]
) -> SessionRef:
    """The session named by key ``session`` (and its parent by key ``parent``) of a hint or of the headers."""
    own = read_id(values, session, source, dropped)
    other = read_id(values, parent, source, dropped) if parent is not None else None
    return SessionRef(id=own, parent=other, source=source)
