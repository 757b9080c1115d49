"""What a gateway may do with a request, written down a second time, from the documentation.

A request the engine would have got without kvpilot reaches it; its body is the client's up to the changes named
here; its reply comes back as the engine would have written it. Every function returns what is wrong, or "".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvpilot.bench.fuzz.cases import Case
from kvpilot.bench.fuzz.engine import Received, answer

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OFF = (None, b"null", b"false")
_OWN_HEADERS = (b"accept-encoding", b"x-session-id", b"authorization", b"host", b"content-length")
_CONTENT = ("messages", "prompt", "prompt_embeds", "input")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case: what the client got, and what the engine got."""

    status: int
    reply: bytes
    received: Received | None


def wrong(case: Case, outcome: Outcome, tenant: str | None) -> str:
    """``tenant``: its name where the client has an API key of its own."""
    if found := wrong_body_or_refusal(case, outcome, tenant):
        return found
    if outcome.status != 200 or outcome.received is None:
        return ""
    return _wrong_headers(case, outcome.received) or _wrong_reply(case, outcome)


def wrong_body_or_refusal(case: Case, outcome: Outcome, tenant: str | None) -> str:
    """The same, of a request of which only the body is known that is to be forwarded."""
    if outcome.status == 400:
        return "" if _may_be_refused(fields(case.body), tenant) else "refused"
    if outcome.status != 200:
        return f"status {outcome.status}"
    if outcome.received is None:
        return "" if _may_be_answered_here(fields(case.body), outcome.reply) else "not forwarded"
    return wrong_body(case.body, outcome.received.body, tenant)


def wrong_body(sent: bytes, received: bytes, tenant: str | None = None) -> str:
    """Compares what the client sent with what the engine got."""
    if sent == received and tenant is None:
        return ""
    before, after = fields(sent), fields(received)
    if before is None or after is None:
        return "changed though it is no JSON object"
    if tenant is not None and not _text(after.get("cache_salt")).startswith(tenant):
        return "not salted with its tenant"
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if old != new and not _may_change(name, old, new, tenant):
            return f"{name}: {_short(old)} became {_short(new)}"
    return ""


def _may_change(name: str, old: bytes | None, new: bytes | None, tenant: str | None) -> bool:
    if name == "cache_salt":
        return tenant is not None
    if name == "return_token_ids":
        return old in _OFF and new == b"true"
    if name == "stream_options":
        asked = {} if old in (None, b"null") else fields(old)
        if asked is None or asked.get("include_usage") not in _OFF:
            return False
        asked.pop("continuous_usage_stats", None)
        return fields(new) == {**asked, "include_usage": b"true"}
    if name == "kv_transfer_params":
        asked = fields(old)
        if asked is None or asked.pop("chunk_hashes", None) != b"true":
            return False
        return new is None if not asked else fields(new) == asked
    return False


def _wrong_headers(case: Case, received: Received) -> str:
    expected = [(name.lower(), value) for name, value in case.headers]
    kept = [item for item in received.headers if item[0] not in _OWN_HEADERS]
    if kept != [item for item in expected if item[0] not in _OWN_HEADERS]:
        return "headers differ"
    return ""


def _wrong_reply(case: Case, outcome: Outcome) -> str:
    before = fields(case.body)
    if before is not None and _asks_for_hashes(before):
        return "" if fields(outcome.reply) is not None or before.get("stream") == b"true" else "no reply"
    return "" if outcome.reply == answer(case.body).text else "the reply is not the engine's"


def _asks_for_hashes(before: Mapping[str, bytes]) -> bool:
    return (fields(before.get("kv_transfer_params")) or {}).get("chunk_hashes") == b"true"


def _may_be_refused(before: Mapping[str, bytes] | None, tenant: str | None) -> bool:
    """Only a named tenant's, when its request cannot be kept apart from those of others."""
    if tenant is None:
        return False
    return before is None or (
        before.get("cache_salt") not in (None, b"null") and not _text(before["cache_salt"])
    )


def _may_be_answered_here(before: Mapping[str, bytes] | None, reply: bytes) -> bool:
    """It says that it manages KV, or holds nothing to infer from."""
    if before is None or b'"kvpilot":{"actions":' not in reply:
        return False
    hint = _decoded(before.get("agent_hint"))
    hint = hint if isinstance(hint, dict) else {}
    management = hint.get("context_management")
    manage = isinstance(management, dict) and management.get("manage_request") is True
    return manage or "session_control" in hint or all(_empty(before.get(name)) for name in _CONTENT)


def _empty(value: bytes | None) -> bool:
    return value is None or _decoded(value) in (None, "", [])


def fields(text: bytes | None) -> dict[str, bytes] | None:
    """Top level of a JSON object, values as they are written; None for anything else."""
    try:
        return None if text is None else {name: bytes(raw) for name, raw in _FIELDS.decode(text).items()}
    except (ValueError, RecursionError):
        return None


def _decoded(text: bytes | None) -> Any:
    try:
        return None if text is None else msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return ...


def _text(value: bytes | None) -> str:
    text = _decoded(value)
    return text if isinstance(text, str) else ""


def _short(value: bytes | None) -> str:
    return "nothing" if value is None else repr(value[:80])
