"""openJiuwen, MindIE's reading of it, and vLLM's RFC #52113: all of them ``agent_hint``."""

from __future__ import annotations

from typing import Any

from tests.hints.conformance.table import Row

IDS = {"session_id": "s1", "parent_session_id": "s0"}
REAL, SHORT, MINDIE = "1 openJiuwen [code]", "14 short form [code]", "14 MindIE [code]"
RFC = "2 RFC #52113 [ex]"
APART = "measures: which dialect is an agent_hint"


def hint(**more: Any) -> dict[str, Any]:
    return {"agent_hint": {**IDS, **more}}


def edits(*items: Any, manage: Any = True, **more: Any) -> dict[str, Any]:
    return hint(context_management={"manage_request": manage, "edits": list(items)}, **more)


def both(**more: Any) -> dict[str, Any]:
    """What a row with both ids expects."""
    return {"session": "s1", "parent": "s0", **more}


NO_MESSAGES: dict[str, Any] = {"messages": []}

OPENJIUWEN = [
    Row(REAL, "an ordinary call names session and parent", hint(), **both()),
    Row(REAL, "a root has itself as parent", hint(parent_session_id="s1"), session="s1"),
    Row(REAL, "team members have long ids with colons", {"agent_hint": {"session_id": "team:a:team:b:member:c"}}, session="team:a:team:b:member:c"),
    Row(REAL, "an ordinary call is forwarded", hint(context_management={"manage_request": False, "edits": []}), **both()),
    Row(REAL, "offload a session", {**edits({"type": "offload", "target": "session"}), **NO_MESSAGES}, **both(commands=["demote session"], manage=True)),
    Row(REAL, "prefetch a session", {**edits({"type": "prefetch", "target": "session"}), **NO_MESSAGES}, **both(commands=["prefetch session"], manage=True)),
    Row(REAL, "evict a session", {**edits({"type": "evict", "target": "session"}), **NO_MESSAGES}, **both(commands=["evict session"], manage=True)),
    Row(REAL, "evict a range of messages", edits({"type": "evict", "target": "messages", "start": 3, "end": 9}), **both(commands=["evict messages 3:9"], manage=True)),
    Row(REAL, "offload a range of messages", edits({"type": "offload", "target": "messages", "start": 0, "end": 1}), **both(commands=["demote messages 0:1"], manage=True)),
    Row(REAL, "prefetch a range of messages", edits({"type": "prefetch", "target": "messages", "start": 1, "end": 2}), **both(commands=["prefetch messages 1:2"], manage=True)),
    Row(REAL, "evict a range of tools", edits({"type": "evict", "target": "tools", "start": 0, "end": 2}), **both(commands=["evict tools 0:2"], manage=True)),
    Row(REAL, "a messages edit may be followed by a tools edit", edits({"type": "evict", "target": "messages", "start": 1, "end": 2}, {"type": "evict", "target": "tools", "start": 0, "end": 1}), **both(commands=["evict messages 1:2", "evict tools 0:1"], manage=True)),
    Row(REAL, "manage_request is a boolean when edits are there: a text is none", edits({"type": "evict"}, manage="true"), **both(dropped=["manage_request"])),
    Row(REAL, "manage_request is a boolean when edits are there: a number is none", edits({"type": "evict"}, manage=1), **both(dropped=["manage_request"])),
    Row(REAL, "edits need manage_request", hint(context_management={"edits": [{"type": "evict"}]}), **both(dropped=["manage_request"])),
    Row(REAL, "edits beside a request that is forwarded", edits({"type": "prefetch"}, manage=False), **both(commands=["prefetch session"])),
    Row(REAL, "a management request without edits is answered", edits(), **both(manage=True)),
    Row(REAL, "compaction evicts the compressor's own session", {"agent_hint": {"session_id": "o:compressor:dialogue", "parent_session_id": "o", "context_management": {"manage_request": True, "edits": [{"type": "evict", "target": "session"}]}}, "messages": []}, session="o:compressor:dialogue", parent="o", commands=["evict session"], manage=True),
    Row(REAL, "cache_salt and cache_sharing beside it change nothing", {**hint(), "cache_salt": "x", "cache_sharing": True}, **both()),
]  # fmt: skip

SHORT_FORM = [
    Row(SHORT, "parent_task_id is the parent session", {"agent_hint": {"session_id": "s1", "parent_task_id": "s0"}}, **both()),
    Row(SHORT, "action prefetch beside a request", {"agent_hint": {"session_id": "s1", "parent_task_id": "s0", "action": "prefetch"}}, **both(commands=["prefetch session"])),
    Row(SHORT, "action offload", {"agent_hint": {"session_id": "s1", "action": "offload"}}, session="s1", commands=["demote session"]),
    Row(SHORT, "action evict", {"agent_hint": {"session_id": "s1", "action": "evict"}}, session="s1", commands=["evict session"]),
    Row(SHORT, "without messages an action is a management request", {"agent_hint": {"session_id": "s1", "action": "evict"}, "messages": []}, session="s1", commands=["evict session"], manage=True),
    Row(SHORT, "an unknown action is dropped", {"agent_hint": {"session_id": "s1", "action": "pin"}}, session="s1", dropped=["action"]),
    Row(SHORT, "parent_session_id wins over parent_task_id", hint(parent_task_id="t"), **both()),
    Row(SHORT, "edits win over action", edits({"type": "prefetch"}, action="evict"), **both(commands=["prefetch session"], manage=True, dropped=["action"])),
]  # fmt: skip

PYMOTOR = [
    Row(MINDIE, "the body wins over headers", hint(), {"x-session-id": "h1", "x-parent-session-id": "h0"}, **both()),
    Row(MINDIE, "headers alone name session and parent", None, {"x-session-id": "h1", "x-parent-session-id": "h0"}, session="h1", parent="h0"),
    Row(MINDIE, "header names in any case", None, {"X-Session-ID": "h1", "X-PARENT-session-id": "h0"}, session="h1", parent="h0"),
    Row(MINDIE, "one id is used for both: session alone is a root", {"agent_hint": {"session_id": "s1"}}, session="s1"),
    Row(MINDIE, "one id is used for both: parent alone is the session", {"agent_hint": {"parent_session_id": "s0"}}, session="s0"),
    Row(MINDIE, "one id is used for both: header session alone", None, {"x-session-id": "h1"}, session="h1"),
    Row(MINDIE, "one id is used for both: header parent alone", None, {"x-parent-session-id": "h0"}, session="h0"),
    Row(MINDIE, "a parent from a header completes a session of the body", {"agent_hint": {"session_id": "s1"}}, {"x-parent-session-id": "h0"}, session="s1", parent="h0"),
    Row(MINDIE, "unknown fields are left for others", hint(vendor={"a": 1}), **both()),
    Row(MINDIE, "an empty id falls back to the header", {"agent_hint": {"session_id": ""}}, {"x-session-id": "h1"}, session="h1", dropped=["session_id"]),
    Row(MINDIE, "an id that is no text falls back to the header", {"agent_hint": {"session_id": 7}}, {"x-session-id": "h1"}, session="h1", dropped=["session_id"]),
    Row(MINDIE, "cache_control.ttl is an integer", hint(cache_control={"ttl": 90.7}), **both(retention="90 s")),
    Row(MINDIE, "cache_control.ttl that is no number is 300", hint(cache_control={"ttl": "long"}), **both(retention="300 s")),
    Row(MINDIE, "cache_control.ttl true is no number", hint(cache_control={"ttl": True}), **both(retention="300 s")),
    Row(MINDIE, "cache_control.ttl absent is 300", hint(cache_control={}), **both(retention="300 s")),
    Row(MINDIE, "cache_control.ttl is at least 60", hint(cache_control={"ttl": 1}), **both(retention="60 s")),
    Row(MINDIE, "cache_control.ttl is at most 3600", hint(cache_control={"ttl": 99999}), **both(retention="3600 s")),
    Row(MINDIE, "msg_offset inside messages", hint(cache_control={"ttl": 120, "msg_offset": 3}), **both(retention="120 s up to messages 3")),
    Row(MINDIE, "msg_offset behind messages drops all of cache_control", hint(cache_control={"ttl": 120, "msg_offset": 4}), **both(dropped=["msg_offset"])),
    Row(MINDIE, "msg_offset below 0 drops all of cache_control", hint(cache_control={"msg_offset": -1}), **both(dropped=["msg_offset"])),
    Row(MINDIE, "msg_offset that is no number drops all of cache_control", hint(cache_control={"msg_offset": "1"}), **both(dropped=["msg_offset"])),
    Row(MINDIE, "a client's block_offset is ignored beside msg_offset", hint(cache_control={"msg_offset": 1, "block_offset": 9}), **both(retention="300 s up to messages 1")),
    Row(MINDIE, "cache_control that is no object is dropped", hint(cache_control="ephemeral"), **both(dropped=["cache_control"])),
    Row(MINDIE, "an empty range is dropped, the others stay", edits({"type": "evict", "target": "messages", "start": 2, "end": 2}, {"type": "evict", "target": "messages", "start": 1, "end": 2}), **both(commands=["evict messages 1:2"], manage=True, dropped=["edits[0]"])),
    Row(MINDIE, "a range that ends before it starts is dropped", edits({"type": "evict", "target": "messages", "start": 3, "end": 2}), **both(manage=True, dropped=["half-open"])),
    Row(MINDIE, "a range below 0 is dropped", edits({"type": "evict", "target": "tools", "start": -1, "end": 2}), **both(manage=True, dropped=["half-open"])),
    Row(MINDIE, "a range without end is dropped", edits({"type": "evict", "target": "messages", "start": 1}), **both(manage=True, dropped=["half-open"])),
    Row(MINDIE, "a range in fractions is dropped", edits({"type": "evict", "target": "messages", "start": 0.0, "end": 2}), **both(manage=True, dropped=["half-open"])),
    Row(MINDIE, "a range of booleans is dropped", edits({"type": "evict", "target": "messages", "start": False, "end": True}), **both(manage=True, dropped=["half-open"])),
    Row(MINDIE, "a missing target means session", edits({"type": "offload"}), **both(commands=["demote session"], manage=True)),
    Row(MINDIE, "an unknown target is dropped", edits({"type": "evict", "target": "everything"}), **both(manage=True, dropped=["target"])),
    Row(MINDIE, "another type is invalid", edits({"type": "pin", "target": "session"}), **both(manage=True, dropped=["type"])),
    Row(MINDIE, "a missing type is invalid", edits({"target": "session"}), **both(manage=True, dropped=["type"])),
    Row(MINDIE, "an edit that is no object is dropped", edits("evict"), **both(manage=True, dropped=["not an object"])),
    Row(MINDIE, "edits that are no list are dropped, and what manages KV is answered all the same", hint(context_management={"manage_request": True, "edits": {"type": "evict"}}), **both(manage=True, dropped=["not a list"])),
    Row(MINDIE, "without messages a hint of which nothing is understood is answered with the reasons", {**hint(session_control={"type": "explode"}), **NO_MESSAGES}, **both(manage=True, dropped=["session_control"])),
    Row(MINDIE, "session_control start only declares", hint(session_control={"type": "start"}), **both()),
    Row(MINDIE, "session_control start without messages is answered", {**hint(session_control={"type": "start"}), **NO_MESSAGES}, **both(manage=True)),
    Row(MINDIE, "session_control pause offloads the session", hint(session_control={"type": "pause"}), **both(commands=["demote session"], signals=["suspend"], manage=True)),
    Row(MINDIE, "session_control resume prefetches the session", hint(session_control={"type": "resume"}), **both(commands=["prefetch session"], signals=["resume"], manage=True)),
    Row(MINDIE, "session_control stop evicts the session", hint(session_control={"type": "stop"}), **both(commands=["evict session"], signals=["end"], manage=True)),
    Row(MINDIE, "session_control compact evicts the session", hint(session_control={"type": "compact"}), **both(commands=["evict session"], signals=["compacted"], manage=True)),
    Row(MINDIE, "session_control of another type is dropped", hint(session_control={"type": "explode"}), **both(dropped=["session_control"])),
    Row(MINDIE, "session_control that is no object is dropped", hint(session_control="stop"), **both(dropped=["session_control"])),
    Row(MINDIE, "a valid session-wide management edit wins over session_control", edits({"type": "prefetch"}, session_control={"type": "stop"}), **both(commands=["prefetch session"], manage=True, dropped=["session_control"])),
    Row(MINDIE, "a broken context_management does not block session_control", hint(context_management=5, session_control={"type": "stop"}), **both(commands=["evict session"], signals=["end"], manage=True, dropped=["context_management"])),
    Row(MINDIE, "an invalid edit does not block session_control", edits({"type": "pin"}, session_control={"type": "resume"}), **both(commands=["prefetch session"], signals=["resume"], manage=True, dropped=["edits[0]"])),
    Row(MINDIE, "a malformed hint is dropped, the request goes on", {"agent_hint": "s1"}, dropped=["agent_hint"]),
    Row(MINDIE, "a hint that is a list is dropped", {"agent_hint": [1, 2]}, dropped=["agent_hint"]),
    Row(MINDIE, "a hint that is null is not there", {"agent_hint": None}),
    Row(MINDIE, "an empty hint says nothing", {"agent_hint": {}}),
    Row(MINDIE, "a management request without messages is answered all the same", {"agent_hint": {**IDS, "context_management": {"manage_request": True, "edits": [{"type": "evict"}]}}, "messages": None}, **both(commands=["evict session"], manage=True)),
    Row(MINDIE, "edits without any session id are dropped and answered", {"agent_hint": {"context_management": {"manage_request": True, "edits": [{"type": "evict"}]}}}, manage=True, dropped=["without a session id"]),
    Row(MINDIE, "edits of the body act on the session of a header", {"agent_hint": {"context_management": {"manage_request": True, "edits": [{"type": "evict"}]}}}, {"x-session-id": "h1"}, session="h1", commands=["evict session"], manage=True),
]  # fmt: skip

RFC_52113 = [
    Row(RFC, "retention up to a block", hint(cache_control={"type": "ephemeral", "ttl": 300.0, "block_offset": 12}), **both(retention="300 s up to blocks 12")),
    Row(RFC, "ttl is a float, taken as it is", hint(cache_control={"ttl": 0.5, "block_offset": 1}), **both(retention="0.5 s up to blocks 1")),
    Row(RFC, "ttl may be 0", hint(cache_control={"ttl": 0, "block_offset": 1}), **both(retention="0 s up to blocks 1")),
    Row(RFC, "ttl may be 3600", hint(cache_control={"ttl": 3600, "block_offset": 1}), **both(retention="3600 s up to blocks 1")),
    Row(RFC, "ttl above 3600 is the default, with a reason", hint(cache_control={"ttl": 3601, "block_offset": 1}), **both(retention="300 s up to blocks 1", dropped=["ttl"])),
    Row(RFC, "ttl below 0 is the default, with a reason", hint(cache_control={"ttl": -1, "block_offset": 1}), **both(retention="300 s up to blocks 1", dropped=["ttl"])),
    Row(RFC, "ttl that is no number is the default, with a reason", hint(cache_control={"ttl": "1", "block_offset": 1}), **both(retention="300 s up to blocks 1", dropped=["ttl"])),
    Row(RFC, "ttl is 300 by default", hint(cache_control={"block_offset": 1}), **both(retention="300 s up to blocks 1")),
    Row(RFC, "block_offset that is no position drops cache_control", hint(cache_control={"block_offset": -2}), **both(dropped=["block_offset"])),
    Row(RFC, "another type of cache_control is dropped", hint(cache_control={"type": "pinned", "block_offset": 1}), **both(dropped=["type"])),
    Row(RFC, "offload a range of blocks", edits({"type": "offload", "block_start": 4, "block_end": 9}, manage=False), **both(commands=["demote blocks 4:9"])),
    Row(RFC, "evict a range of blocks", edits({"type": "evict", "block_start": 0, "block_end": 1}, manage=False), **both(commands=["evict blocks 0:1"])),
    Row(RFC, "prefetch a range of blocks", edits({"type": "prefetch", "block_start": 0, "block_end": 8}, manage=False), **both(commands=["prefetch blocks 0:8"])),
    Row(RFC, "manage_request false is the default", hint(context_management={"edits": [{"type": "offload", "block_start": 4, "block_end": 9}]}), **both(commands=["demote blocks 4:9"])),
    Row(RFC, "manage_request true is answered here", edits({"type": "offload", "block_start": 4, "block_end": 9}), **both(commands=["demote blocks 4:9"], manage=True)),
    Row(RFC, "manage_request that is no boolean counts as false", edits({"type": "offload", "block_start": 4, "block_end": 9}, manage="yes"), **both(commands=["demote blocks 4:9"], dropped=["manage_request"])),
    Row(RFC, "block_end is exclusive: an empty range is dropped", edits({"type": "offload", "block_start": 4, "block_end": 4}, manage=False), **both(dropped=["half-open"])),
    Row(RFC, "a range without end is dropped", edits({"type": "offload", "block_start": 4}, manage=False), **both(dropped=["half-open"])),
    Row(RFC, "an unknown type is dropped", edits({"type": "share", "block_start": 4, "block_end": 5}, manage=False), **both(dropped=["type"])),
    Row(RFC, "an edit without a range is about the session", edits({"type": "prefetch"}, {"type": "evict", "block_start": 1, "block_end": 2}, manage=False), **both(commands=["prefetch session", "evict blocks 1:2"])),
    Row(RFC, "all is optional: no ids", {"agent_hint": {"cache_control": {"block_offset": 3}}}, retention="300 s up to blocks 3"),
]  # fmt: skip

TOLD_APART = [
    Row(APART, "block_offset is the RFC's", hint(cache_control={"ttl": 5.5, "block_offset": 0}), **both(retention="5.5 s up to blocks 0")),
    Row(APART, "msg_offset is openJiuwen's", hint(cache_control={"ttl": 5.5, "msg_offset": 0}), **both(retention="60 s up to messages 0")),
    Row(APART, "ids alone are openJiuwen's", hint(cache_control={"ttl": 5.5}), **both(retention="60 s")),
    Row(APART, "target is openJiuwen's, a block range beside it is dropped", edits({"type": "evict", "target": "messages", "start": 0, "end": 1}, {"type": "evict", "block_start": 0, "block_end": 1}), **both(commands=["evict messages 0:1"], manage=True, dropped=["blocks"])),
    Row(APART, "session_control is openJiuwen's", hint(session_control={"type": "start"}, cache_control={"ttl": 5, "block_offset": 2}), **both(retention="60 s")),
    Row(APART, "action and parent_task_id are the short form", {"agent_hint": {"session_id": "s1", "parent_task_id": "s0", "action": "prefetch", "cache_control": {"block_offset": 1}}}, **both(commands=["prefetch session"], retention="300 s")),
]  # fmt: skip

ROWS = [*OPENJIUWEN, *SHORT_FORM, *PYMOTOR, *RFC_52113, *TOLD_APART]
