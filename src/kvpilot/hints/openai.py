"""OpenAI's prompt caching: options, breakpoints, and the older ``prompt_cache_retention``.

``prompt_cache_key`` is a routing key that many conversations share: it names no session and is left alone.
"""

from __future__ import annotations

from kvpilot.domain import Retention
from kvpilot.hints.content import find_marks
from kvpilot.hints.result import HintRequest, Hints
from kvpilot.hints.values import as_duration, read_object

FIELDS = ("prompt_cache_options", "prompt_cache_retention")
MARK = "prompt_cache_breakpoint"
MAXMARKS = 80
TTL_DEFAULT_S = 300.0
RETENTIONS = {b'"in_memory"': 300.0, b'"24h"': 86_400.0}

_OPTIONS = "prompt_cache_options"
_RETENTION = "prompt_cache_retention"


def read(request: HintRequest) -> Hints | None:
    dropped: list[str] = []
    options = read_object(request.fields.get(_OPTIONS), _OPTIONS, dropped)
    marks = find_marks(request, MARK, ("messages", "input"), dropped)
    if len(marks) > MAXMARKS:
        dropped.append(f"{MARK}: more than {MAXMARKS}")
    explicit = [mark for mark in marks[-MAXMARKS:] if _is_explicit(mark.value, dropped)]
    ttls = [_ttl(mark.value, MARK, dropped) for mark in explicit]
    retention = None
    if options is not None:
        ttls.append(_ttl(options, _OPTIONS, dropped))
    if ttls:
        # Without explicit mode the service caches all of the prompt anyway: then a breakpoint bounds nothing.
        bounded = explicit and (options is None or options.get("mode") == "explicit")
        retention = Retention(ttl_s=max(ttls), up_to=explicit[-1].message if bounded else None)
    elif (older := request.fields.get(_RETENTION)) is not None:
        retention = _older(bytes(older), dropped)
    if retention is None and not dropped:
        return None
    return Hints(retention=retention, dropped=tuple(dropped))


def _is_explicit(value: object, dropped: list[str]) -> bool:
    if isinstance(value, dict) and value.get("mode") == "explicit":
        return True
    dropped.append(f"{MARK}: mode is not explicit")
    return False


def _ttl(value: dict[str, object], name: str, dropped: list[str]) -> float:
    ttl = value.get("ttl")
    if ttl is None:
        return TTL_DEFAULT_S
    seconds = as_duration(ttl)
    if seconds is None:
        dropped.append(f"{name}.ttl: not a duration like 30m")
        return TTL_DEFAULT_S
    return seconds


def _older(text: bytes, dropped: list[str]) -> Retention | None:
    if text == b"null":
        return None
    if text not in RETENTIONS:
        dropped.append(f"{_RETENTION}: not one of in_memory, 24h")
        return None
    return Retention(ttl_s=RETENTIONS[text])
