"""The versioned KV-hint envelope."""

from __future__ import annotations

from typing import Any

from tests.hints.conformance.table import Row

ENVELOPE = "3 KV-hint envelope [code]"
RFCS = "3 RFC #51428, #57103 [ex]"
HERE = {"x-session-id": "h1"}


def act(word: str, payload: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "action_id": "a-1",
        "action_type": word,
        "action_version": "1.0",
        "payload": payload or {},
        **more,
    }


def envelope(*actions: Any, **more: Any) -> dict[str, Any]:
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m-1", "actions": list(actions), **more}}


def here(body: dict[str, Any], **expected: Any) -> dict[str, Any]:
    return {"body": body, "headers": HERE, "session": "h1", **expected}


ROWS = [
    Row(ENVELOPE, "an envelope with an action", **here(envelope(act("kv.prefetch")), commands=["prefetch session"])),
    Row(ENVELOPE, "as kv_hint", **here({"kv_hint": envelope(act("kv.prefetch"))["kv_hints"]}, commands=["prefetch session"])),
    Row(ENVELOPE, "in kv_transfer_params.kv_hint (Dynamo's older bridge)", **here({"kv_transfer_params": {"kv_hint": envelope(act("kv.demote"))["kv_hints"]}}, commands=["demote session"])),
    Row(ENVELOPE, "two envelopes: the first counts", **here({**envelope(act("kv.demote")), "kv_transfer_params": {"kv_hint": envelope(act("kv.prefetch"))["kv_hints"]}}, commands=["demote session"], dropped=["more than one"])),
    Row(ENVELOPE, "another protocol version is ignored", **here(envelope(act("kv.prefetch"), protocol_version="0.2"), dropped=["protocol_version"])),
    Row(ENVELOPE, "no protocol version is ignored", **here({"kv_hints": {"actions": [act("kv.prefetch")]}}, dropped=["protocol_version"])),
    Row(ENVELOPE, "a version that is a number is ignored", **here(envelope(act("kv.prefetch"), protocol_version=0.1), dropped=["protocol_version"])),
    Row(ENVELOPE, "an unknown action is ignored, the others are done", **here(envelope(act("kv.teleport"), act("kv.demote", action_id="a-2")), commands=["demote session"], dropped=["action_type"])),
    Row(ENVELOPE, "kv.fetch is between engines and ignored here", **here(envelope(act("kv.fetch", {"source_control_endpoint": "tcp://10.0.0.7:5900", "block_hashes": [1], "mode": "copy"})), dropped=["action_type"])),
    Row(ENVELOPE, "another action version is ignored", **here(envelope(act("kv.prefetch", action_version="2.0")), dropped=["action_version"])),
    Row(ENVELOPE, "an action without a version is the first one's", **here({"kv_hints": {"protocol_version": "0.1", "actions": [{"action_type": "kv.prefetch"}]}}, commands=["prefetch session"])),
    Row(ENVELOPE, "a repeated action id is not executed twice", **here(envelope(act("kv.prefetch"), act("kv.demote")), commands=["prefetch session"], dropped=["repetition"])),
    Row(ENVELOPE, "a malformed envelope is dropped, the request goes on", **here({"kv_hints": [1]}, dropped=["kv_hints"])),
    Row(ENVELOPE, "actions that are no list are dropped", **here({"kv_hints": {"protocol_version": "0.1", "actions": {}}}, dropped=["not a list"])),
    Row(ENVELOPE, "an action that is no object is dropped", **here(envelope("kv.prefetch"), dropped=["not an object"])),
    Row(ENVELOPE, "a payload that is no object is dropped", **here(envelope(act("kv.prefetch", "session")), dropped=["payload"])),
    Row(ENVELOPE, "an action without a type is dropped", **here(envelope({"action_id": "a"}), dropped=["action_type"])),
    Row(ENVELOPE, "no actions are no hints", **here(envelope())),
    Row(ENVELOPE, "more than 16 actions: the first 16", **here(envelope(*[act("kv.prefetch", {"token_end": n + 1}, action_id=f"a{n}") for n in range(17)]), commands=[f"prefetch tokens 0:{n + 1}" for n in range(16)], dropped=["more than 16"])),
    Row(RFCS, "release", **here(envelope(act("kv.release")), commands=["evict session"])),
    Row(RFCS, "a session of its own", **here(envelope(act("kv.demote", {"session_id": "s9"})), commands=["demote session of s9"])),
    Row(RFCS, "a session of its own needs no other", envelope(act("kv.demote", {"session_id": "s9"})), commands=["demote session of s9"]),
    Row(RFCS, "a malformed session is not taken for the request's", **here(envelope(act("kv.release", {"session_id": 7})), dropped=["session_id", "its session"])),
    Row(RFCS, "without any session an action is dropped", envelope(act("kv.demote")), dropped=["without a session id"]),
    Row(RFCS, "no active request and nothing understood: answered here, with the reasons", {**envelope(act("kv.teleport")), "messages": []}, manage=True, dropped=["action_type"]),
    Row(RFCS, "no active request: answered here", {**envelope(act("kv.demote", {"session_id": "s9"})), "messages": []}, commands=["demote session of s9"], manage=True),
    Row(RFCS, "a half-open token range", **here(envelope(act("kv.demote", {"token_start": 256, "token_end": 512})), commands=["demote tokens 256:512"])),
    Row(RFCS, "a token range from the start", **here(envelope(act("kv.prefetch", {"token_end": 512})), commands=["prefetch tokens 0:512"])),
    Row(RFCS, "an empty token range is dropped", **here(envelope(act("kv.release", {"token_start": 5, "token_end": 5})), dropped=["half-open"])),
    Row(RFCS, "a token range without end is dropped", **here(envelope(act("kv.release", {"token_start": 5})), dropped=["half-open"])),
    Row(RFCS, "block hashes are unsigned 64-bit", **here(envelope(act("kv.prefetch", {"block_hashes": [1, 2**64 - 1]})), commands=["prefetch chunks 0000000000000001,ffffffffffffffff"])),
    Row(RFCS, "a block hash below 0 is dropped", **here(envelope(act("kv.prefetch", {"block_hashes": [-1]})), dropped=["block_hashes"])),
    Row(RFCS, "a block hash of more than 64 bits is dropped", **here(envelope(act("kv.prefetch", {"block_hashes": [2**64]})), dropped=["block_hashes"])),
    Row(RFCS, "no block hashes at all are dropped", **here(envelope(act("kv.prefetch", {"block_hashes": []})), dropped=["hashes"])),
    Row(RFCS, "chunk hashes in hex", **here(envelope(act("kv.release", {"chunk_hashes": ["ab", "-6e"]})), commands=["evict chunks ab,-6e"])),
    Row(RFCS, "chunk hashes that are no texts are dropped", **here(envelope(act("kv.release", {"chunk_hashes": [1]})), dropped=["chunk_hashes"])),
    Row(RFCS, "chunks need no session", envelope(act("kv.demote", {"chunk_hashes": ["ab"]})), commands=["demote chunks ab"]),
    Row(RFCS, "prefetch for later is an expectation", **here(envelope(act("kv.prefetch", {"eta_s": 30})), signals=["expected in 30 s"])),
    Row(RFCS, "prefetch for now", **here(envelope(act("kv.prefetch", {"eta_s": 0})), commands=["prefetch session"])),
    Row(RFCS, "an expectation of another session", **here(envelope(act("kv.prefetch", {"eta_s": 30, "session_id": "s9"})), signals=["expected in 30 s of s9"])),
    Row(RFCS, "a malformed eta means now, with a reason", **here(envelope(act("kv.prefetch", {"eta_s": "soon"})), commands=["prefetch session"], dropped=["eta_s"])),
    Row(RFCS, "an eta for a part of a session: not supported yet", **here(envelope(act("kv.prefetch", {"eta_s": 30, "token_end": 8})), dropped=["not supported yet"])),
    Row(RFCS, "retain", **here(envelope(act("kv.retain", {"ttl": 60})), retention="60 s")),
    Row(RFCS, "retain by default for 300 s", **here(envelope(act("kv.retain")), retention="300 s")),
    Row(RFCS, "retain with a priority", **here(envelope(act("kv.retain", {"ttl": 60, "priority": 80})), retention="60 s priority 80")),
    Row(RFCS, "a priority is bounded", **here(envelope(act("kv.retain", {"ttl": 60, "priority": 10**30})), retention="60 s priority 100")),
    Row(RFCS, "retain up to a token", **here(envelope(act("kv.retain", {"ttl": 60, "token_end": 512})), retention="60 s up to tokens 512")),
    Row(RFCS, "retain a range in the middle: not supported yet", **here(envelope(act("kv.retain", {"token_start": 1, "token_end": 2})), dropped=["not supported yet"])),
    Row(RFCS, "retain chunks: not supported yet", **here(envelope(act("kv.retain", {"chunk_hashes": ["ab"]})), dropped=["not supported yet"])),
    Row(RFCS, "retain another session", **here(envelope(act("kv.retain", {"ttl": 60, "session_id": "s9"})), signals=["retain 60 s of s9"])),
    Row(RFCS, "retain without a request", {**envelope(act("kv.retain", {"ttl": 60})), "messages": []}, HERE, session="h1", retention="60 s", signals=["retain 60 s"], manage=True),
    Row(RFCS, "a second retention of the same session is dropped", **here(envelope(act("kv.retain", {"ttl": 60}), act("kv.retain", {"ttl": 90}, action_id="b")), retention="60 s", dropped=["second retention"])),
    Row(RFCS, "an unbounded ttl is the default, with a reason", **here(envelope(act("kv.retain", {"ttl": 10**12})), retention="300 s", dropped=["ttl"])),
]  # fmt: skip
