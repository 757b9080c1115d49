"""Reading what clients wrote: every function takes anything JSON can hold and never raises."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from kvpilot.hints.result import HintRequest

MAX_BYTES = 64 * 1024
"""Largest hint that is decoded at all."""
MAX_NUMBER = 2**53
MAX_TTL_S = 86_400.0
MIN_PRIORITY, MAX_PRIORITY = -100, 100

_decode = msgspec.json.Decoder().decode
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def read_object(
    raw: msgspec.Raw | bytes | None, name: str, dropped: list[str], limit: int = MAX_BYTES
) -> dict[str, Any] | None:
    """A JSON object; None for null and what is absent, None and a reason for anything else."""
    if raw is None:
        return None
    if len(raw) > limit:
        dropped.append(f"{name}: larger than {limit} bytes")
        return None
    try:
        value = _decode(raw)
    except (ValueError, RecursionError):
        dropped.append(f"{name}: not valid JSON")
        return None
    return as_object(value, name, dropped)


def read_field(request: HintRequest, name: str, dropped: list[str]) -> dict[str, Any] | None:
    """The same for a field of the body that several dialects look into: decoded once, not to be changed."""
    if name not in request.seen:
        reasons: list[str] = []
        request.seen[name] = read_object(request.fields.get(name), name, reasons), reasons
    value: dict[str, Any] | None
    value, reasons = request.seen[name]
    if reasons:
        dropped += reasons
    return value


def as_object(value: object, name: str, dropped: list[str]) -> dict[str, Any] | None:
    """The same for what is decoded already."""
    if value is None or isinstance(value, dict):
        return value
    dropped.append(f"{name}: not an object")
    return None


def as_list(value: object, name: str, limit: int, dropped: list[str]) -> list[Any]:
    """The first ``limit`` items of a list; nothing, and a reason, for anything else."""
    if value is None:
        return []
    if not isinstance(value, list):
        dropped.append(f"{name}: not a list")
        return []
    if len(value) > limit:
        dropped.append(f"{name}: more than {limit}")
    return value[:limit]


def as_number(value: object) -> float | None:
    """A finite number; booleans and texts are none."""
    if type(value) is not int and type(value) is not float:
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def as_index(value: object) -> int | None:
    """A position or a count: a whole number from 0 on."""
    return value if type(value) is int and 0 <= value < MAX_NUMBER else None


def as_range(start: object, end: object) -> tuple[int, int] | None:
    """A half-open range that is not empty."""
    first, last = as_index(start), as_index(end)
    return None if first is None or last is None or first >= last else (first, last)


def as_duration(value: object) -> float | None:
    """Seconds of a duration like ``30m``, at most a day."""
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    return None if found is None else min(float(found[1]) * _UNIT_S[found[2]], MAX_TTL_S)


def read_ttl(value: object, name: str, default_s: float, max_s: float, dropped: list[str]) -> float:
    """Seconds in 0…``max_s``; the default when absent, the default and a reason when it is not that."""
    if value is None:
        return default_s
    number = as_number(value)
    if number is None or not 0 <= number <= max_s:
        dropped.append(f"{name}: not a number of seconds in 0 to {max_s:g}")
        return default_s
    return number


def read_priority(value: object, name: str, dropped: list[str]) -> int:
    """A priority in -100…100, 0 when absent; higher is kept longer."""
    if value is None:
        return 0
    number = as_number(value)
    if number is None:
        dropped.append(f"{name}: not a number")
        return 0
    return int(min(max(number, MIN_PRIORITY), MAX_PRIORITY))


def is_true(value: str | None) -> bool:
    """A header that says yes."""
    return value is not None and value.strip().lower() in ("true", "1")
