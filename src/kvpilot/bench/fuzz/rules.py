"""What a gateway may do with a request, written down a second time, from the documentation.

A request the engine would have got without kvpilot reaches it; its body is the client's up to the changes named
here; its reply comes back as the engine would have written it. Every function returns what is wrong, or "".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvpilot.bench.fuzz.cases import CHAT, Case
from kvpilot.bench.fuzz.engine import Received, answer
from kvpilot.gateway.other_apis import MESSAGES, RESPONSES
from kvpilot.hints.values import as_index

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OFF = (None, b"null", b"false")
_OWN_HEADERS = (b"accept-encoding", b"x-session-id", b"authorization", b"host", b"content-length")
_CONTENT = ("messages", "prompt", "prompt_embeds", "input")
_CLEARED = "[Old tool result content cleared]"
_THOUGHTS = ("thinking", "redacted_thinking")
_USES, _THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
_REPORT = re.compile(rb',"context_management":\{"applied_edits":\[[^]]*\]\}')


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
    return wrong_body(case.body, outcome.received.body, tenant, case.path)


def wrong_body(sent: bytes, received: bytes, tenant: str | None = None, path: str = CHAT) -> str:
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
        edited = path == MESSAGES and _may_be_edited(name, before, after)
        if old != new and not edited and not _may_change(name, old, new, tenant):
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


def _may_be_edited(name: str, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> bool:
    """Whether the client's context edits may have made a field what it is now."""
    management = _decoded(before.get("context_management"))
    edits = management.get("edits") if isinstance(management, dict) else None
    if name not in ("messages", "context_management") or not isinstance(edits, list):
        return False
    ours = [edit for edit in edits if isinstance(edit, dict) and edit.get("type") in (_USES, _THINKING)]
    left = [edit for edit in edits if edit not in ours]
    if _decoded(after.get("context_management")) != ({**management, "edits": left} if left else None):
        return False
    if name == "context_management":
        return True
    was, now = _decoded(before.get("messages")), _decoded(after.get("messages"))
    if not isinstance(was, list) or not isinstance(now, list) or len(was) != len(now):
        return False
    kept = _kept_uses(ours, was)
    thoughts_may_go = any(edit.get("type") == _THINKING for edit in ours)
    return all(_only_cleared(*pair, kept, thoughts_may_go) for pair in zip(was, now, strict=True))


def _kept_uses(edits: list[Any], messages: list[Any]) -> frozenset[str] | None:
    """Ids of the newest tool uses, which no edit may clear; None when it may clear none at all."""
    keeps: list[int | None] = []
    for edit in edits:
        keep = edit.get("keep")
        if edit.get("type") == _USES and keep is None:
            keeps.append(3)
        elif edit.get("type") == _USES and isinstance(keep, dict) and keep.get("type") == "tool_uses":
            keeps.append(as_index(keep.get("value")))
    whole = [keep for keep in keeps if keep is not None]
    said = [
        message for message in messages if isinstance(message, dict) and message.get("role") == "assistant"
    ]
    uses = [str(block.get("id")) for message in said for block in _blocks(message, "tool_use")]
    return frozenset(uses[max(0, len(uses) - min(whole)) :]) if whole else None


def _only_cleared(was: Any, now: Any, kept: frozenset[str] | None, thoughts_may_go: bool) -> bool:
    """Whether a message lost nothing but old tool results, inputs and thoughts."""
    if was == now:
        return True
    if (
        not isinstance(was, dict)
        or not isinstance(now, dict)
        or {**was, "content": 0} != {**now, "content": 0}
    ):
        return False
    before, after = was["content"], now.get("content")
    if not isinstance(before, list) or not isinstance(after, list):
        return False
    if len(after) < len(before) and thoughts_may_go:
        before = [b for b in before if isinstance(b, dict) and b.get("type") not in _THOUGHTS]
    return len(before) == len(after) and all(
        old == new or _may_be_cleared(old, new, kept) for old, new in zip(before, after, strict=True)
    )


def _may_be_cleared(old: Any, new: Any, kept: frozenset[str] | None) -> bool:
    if kept is None or not isinstance(old, dict):
        return False
    if old.get("type") == "tool_result":
        return str(old.get("tool_use_id")) not in kept and new == {**old, "content": _CLEARED}
    return old.get("type") == "tool_use" and str(old.get("id")) not in kept and new == {**old, "input": {}}


def _blocks(message: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    return [block for block in blocks if isinstance(block, dict) and block.get("type") == kind]


def _wrong_headers(case: Case, received: Received) -> str:
    expected = [(name.lower(), value) for name, value in case.headers]
    kept = [item for item in received.headers if item[0] not in _OWN_HEADERS]
    if kept != [item for item in expected if item[0] not in _OWN_HEADERS]:
        return "headers differ"
    return ""


def _wrong_reply(case: Case, outcome: Outcome) -> str:
    before = fields(case.body)
    assert outcome.received is not None
    if case.path in (MESSAGES, RESPONSES):
        after = fields(outcome.received.body)
        cleared = (before or {}).get("messages") != (after or {}).get("messages")
        if cleared != (b'"applied_edits":[{' in outcome.reply):
            return "edits are not reported"
        reply = _REPORT.sub(b"", outcome.reply) if case.path == MESSAGES else outcome.reply
        told = answer(outcome.received.body, case.path).text
        return "" if reply == told else "the reply is not the engine's"
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
