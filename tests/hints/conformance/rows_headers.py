"""Session ids that harnesses send in headers."""

from __future__ import annotations

from typing import Any

from tests.hints.conformance.table import Row

DYNAMO, CLAUDE, CODEX = "6 Dynamo [repo docs]", "6 Claude Code [repo docs]", "6 Codex [repo docs]"
OPENCODE, DEEPSEEK, AIPERF = (
    "6 OpenCode [repo docs]",
    "6 DeepSeek Harness [repo docs]",
    "6 AIPerf [repo docs]",
)
VLLM = "4 vLLM X-Session-ID [code]"
MIXED = "hints.registry: precedence"

D, C, K = "X-Dynamo-", "x-claude-code-", "x-deepseek-harness-"
UUID = "c31ac7cf-56a7-4c0a-b363-2b726377687d"
OLD_USER = f"user_{'e5' * 32}_account__session_{UUID}"
NEW_USER = f'{{"device_id": "3f4a", "account_uuid": "", "session_id": "{UUID}"}}'


def sent(headers: dict[str, str], **expected: Any) -> dict[str, Any]:
    return {"headers": headers, **expected}


ROWS = [
    Row(VLLM, "X-Session-ID", **sent({"X-Session-ID": "v"}, session="v")),
    Row(VLLM, "X-Vllm-Priority is the scheduler's", **sent({"X-Vllm-Priority": "3"})),
    Row(DYNAMO, "session", **sent({D + "Session-ID": "d"}, session="d")),
    Row(DYNAMO, "session and parent", **sent({D + "Session-ID": "d", D + "Parent-Session-ID": "p"}, session="d", parent="p")),
    Row(DYNAMO, "a parent of 256 characters is taken", **sent({D + "Session-ID": "d", D + "Parent-Session-ID": "p" * 256}, session="d", parent="p" * 256)),
    Row(DYNAMO, "a longer parent is dropped", **sent({D + "Session-ID": "d", D + "Parent-Session-ID": "p" * 257}, session="d", dropped=["longer"])),
    Row(DYNAMO, "Session-Final ends the session", **sent({D + "Session-ID": "d", D + "Session-Final": "true"}, session="d", signals=["end"])),
    Row(DYNAMO, "Session-Final in any case", **sent({D + "Session-ID": "d", D + "Session-Final": "True"}, session="d", signals=["end"])),
    Row(DYNAMO, "Session-Final false does not", **sent({D + "Session-ID": "d", D + "Session-Final": "false"}, session="d")),
    Row(DYNAMO, "Session-Final works with a harness's own id", **sent({C + "session-id": "c", D + "Session-Final": "true"}, session="c", signals=["end"])),
    Row(DYNAMO, "Session-Final without any session is dropped", **sent({D + "Session-Final": "true"}, dropped=["without a session id"])),
    Row(DYNAMO, "Session-Final without messages is answered here", {"messages": []}, **sent({D + "Session-ID": "d", D + "Session-Final": "true"}, session="d", signals=["end"], manage=True)),
    Row(DYNAMO, "the canonical id wins over a harness's own", **sent({D + "Session-ID": "d", C + "session-id": "c", C + "agent-id": "a"}, session="d")),
    Row(AIPERF, "X-Dynamo-Session-ID alone", **sent({"x-dynamo-session-id": "aiperf-1"}, session="aiperf-1")),
    Row(CLAUDE, "session", **sent({C + "session-id": "c"}, session="c")),
    Row(CLAUDE, "a sub-agent is a child of the session", **sent({C + "session-id": "c", C + "agent-id": "a"}, session="a", parent="c")),
    Row(CLAUDE, "a sub-agent of a sub-agent", **sent({C + "session-id": "c", C + "agent-id": "b", C + "parent-agent-id": "a"}, session="b", parent="a")),
    Row(CLAUDE, "an agent without a session", **sent({C + "agent-id": "a"}, session="a")),
    Row(CLAUDE, "an empty id is dropped", **sent({C + "session-id": " "}, dropped=["session-id"])),
    Row(CLAUDE, "older versions: the session in the user id", {"metadata": {"user_id": OLD_USER}}, session=UUID),
    Row(CLAUDE, "the session in a user id that is JSON", {"metadata": {"user_id": NEW_USER}}, session=UUID),
    Row(CLAUDE, "headers say more than the user id", {"metadata": {"user_id": OLD_USER}}, **sent({C + "session-id": "c", C + "agent-id": "a"}, session="a", parent="c")),
    Row(CLAUDE, "another header's id comes before the user id", {"metadata": {"user_id": OLD_USER}}, **sent({D + "Session-ID": "d"}, session="d")),
    Row(CLAUDE, "another user id names no session", {"metadata": {"user_id": "user_session_1", "session_id": "x"}}),
    Row(CLAUDE, "metadata that is anybody's is let be", {"metadata": ["x", 1]}),
    Row(CODEX, "thread-id", **sent({"thread-id": "t"}, session="t")),
    Row(CODEX, "thread-id wins over session-id", **sent({"thread-id": "t", "session-id": "s"}, session="t")),
    Row(CODEX, "session-id alone", **sent({"session-id": "s"}, session="s")),
    Row(CODEX, "the parent's thread", **sent({"thread-id": "t", "x-codex-parent-thread-id": "p"}, session="t", parent="p")),
    Row(CODEX, "a compaction", **sent({"thread-id": "t", "x-codex-turn-metadata": '{"request_kind": "compaction", "trigger": "auto"}'}, session="t", signals=["compacted"])),
    Row(CODEX, "another request kind is none", **sent({"thread-id": "t", "x-codex-turn-metadata": '{"request_kind": "turn"}'}, session="t")),
    Row(CODEX, "malformed metadata is dropped", **sent({"thread-id": "t", "x-codex-turn-metadata": "{"}, session="t", dropped=["turn-metadata"])),
    Row(CODEX, "metadata that is no object is dropped", **sent({"thread-id": "t", "x-codex-turn-metadata": "[]"}, session="t", dropped=["turn-metadata"])),
    Row(OPENCODE, "session and parent", **sent({"x-session-id": "o", "x-parent-session-id": "p"}, session="o", parent="p")),
    Row(DEEPSEEK, "session and parent", **sent({K + "session-id": "k", K + "parent-session-id": "p"}, session="k", parent="p")),
    Row(DEEPSEEK, "compact: 1", **sent({K + "session-id": "k", K + "compact": "1"}, session="k", signals=["compacted"])),
    Row(DEEPSEEK, "compact: 0 is none", **sent({K + "session-id": "k", K + "compact": "0"}, session="k")),
    Row(MIXED, "body before headers", {"agent_hint": {"session_id": "s1"}}, **sent({D + "Session-ID": "d"}, session="s1")),
    Row(MIXED, "agent_hint before other fields of the body", {"job_id": "j", "program_id": "p", "agent_hint": {"session_id": "s1"}}, session="s1"),
    Row(MIXED, "an agent runtime's field before the engine's", {"job_id": "j", "session_id": "b"}, session="j"),
    Row(MIXED, "a header's parent is not mixed into another id", {"agent_hint": {"session_id": "s1"}}, **sent({D + "Session-ID": "d", D + "Parent-Session-ID": "p"}, session="s1")),
    Row(MIXED, "two dialects that name the same session complete each other", {"session_id": "d"}, **sent({D + "Session-ID": "d", D + "Parent-Session-ID": "p"}, session="d", parent="p")),
    Row(MIXED, "signals of one dialect hold for the session of another", {"agent_hint": {"session_id": "s1"}}, **sent({D + "Session-Final": "true"}, session="s1", signals=["end"])),
    Row(MIXED, "ttl of one dialect, priority of another", {"cache_control": {"type": "ephemeral"}, "nvext": {"agent_hints": {"priority": 9}}}, retention="300 s priority 9"),
    Row(MIXED, "retention: the first dialect with a ttl", {"agent_hint": {"session_id": "s1", "cache_control": {"ttl": 120}}, "cache_control": {"type": "ephemeral", "ttl": "1h"}}, session="s1", retention="120 s"),
    Row(MIXED, "garbage in one dialect leaves the others alone", {"agent_hint": 1, "nvext": [], "kv_hints": "x", "job_id": "j"}, session="j", dropped=["kv_hints", "agent_hint", "nvext"]),
]  # fmt: skip
