"""Fields that engines, routers and agent runtimes take: SGLang, Dynamo, verl, agent-infer and others."""

from __future__ import annotations

from typing import Any

from tests.hints.conformance.table import NOW, Row

BODY_ID = "4, 5 body session_id [code]"
SGLANG = "5 SGLang agent_hints #24656 [ex]"
NVEXT = "6 Dynamo nvext [repo docs]"
VERL, INFER = "7 verl uni-agent", "7 agent-infer"
THUNDER, CONTINUUM, EVOKE = "7 ThunderAgent", "7 Continuum", "7 evoke"


def verl(**hint: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"agent_hint": {"schema_version": 1, "trajectory_id": "t", **hint}}}


def infer(value: Any) -> dict[str, Any]:
    return {"vllm_xargs": {"agentic_context": value}}


def sglang(**hints: Any) -> dict[str, Any]:
    return {"agent_hints": {"workflow_id": "w", "agent_id": "a", **hints}}


def evoke(**hint: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"evoke": {"evoke_session": "e", **hint}}}


ROWS = [
    Row(BODY_ID, "session_id in the body", {"session_id": "b1"}, session="b1"),
    Row(BODY_ID, "it wins over headers", {"session_id": "b1"}, {"x-session-id": "h1"}, session="b1"),
    Row(BODY_ID, "parents of another id are not mixed in", {"session_id": "b1"}, {"x-session-id": "h1", "x-parent-session-id": "h0"}, session="b1"),
    Row(BODY_ID, "a number is no id", {"session_id": 5}, dropped=["session_id"]),
    Row(BODY_ID, "null is not there", {"session_id": None}),
    Row(BODY_ID, "too long an id is dropped", {"session_id": "x" * 257}, dropped=["session_id"]),
    Row(BODY_ID, "an id of 256 characters is taken", {"session_id": "x" * 256}, session="x" * 256),
    Row(BODY_ID, "line breaks in an id are dropped", {"session_id": "a\r\nb"}, dropped=["unprintable"]),
    Row(BODY_ID, "priority in the body is the scheduler's, not the cache's", {"priority": 5}),
    Row(SGLANG, "an agent in a workflow is a session", sglang(), session="w:a"),
    Row(SGLANG, "a workflow alone", {"agent_hints": {"workflow_id": "w"}}, session="w"),
    Row(SGLANG, "an agent alone", {"agent_hints": {"agent_id": "a"}}, session="a"),
    Row(SGLANG, "steps are not sessions", sglang(step_id="7", parent_step_id="6"), session="w:a"),
    Row(SGLANG, "cache_ttl_ms keeps", sglang(cache_ttl_ms=30000), session="w:a", retention="30 s"),
    Row(SGLANG, "reuse_hint keep with a ttl", sglang(reuse_hint="keep", cache_ttl_ms=30000), session="w:a", retention="30 s"),
    Row(SGLANG, "reuse_hint keep alone keeps for 300 s", sglang(reuse_hint="keep"), session="w:a", retention="300 s"),
    Row(SGLANG, "reuse_hint neutral keeps nothing", sglang(reuse_hint="neutral", cache_ttl_ms=30000), session="w:a"),
    Row(SGLANG, "reuse_hint discard goes first", sglang(reuse_hint="discard"), session="w:a", retention="0 s priority -100"),
    Row(SGLANG, "another reuse_hint is dropped", sglang(reuse_hint="pin"), session="w:a", dropped=["reuse_hint"]),
    Row(SGLANG, "a malformed ttl is dropped", sglang(cache_ttl_ms="1"), session="w:a", dropped=["cache_ttl_ms"]),
    Row(SGLANG, "shared_prefix_hash is only read", sglang(shared_prefix_hash="ff"), session="w:a"),
    Row(SGLANG, "hints that are no object are dropped", {"agent_hints": 1}, dropped=["agent_hints"]),
    Row(NVEXT, "agent_hints.priority ranks what is kept", {"nvext": {"agent_hints": {"priority": 5}}}, retention="0 s priority 5"),
    Row(NVEXT, "a malformed priority is dropped", {"nvext": {"agent_hints": {"priority": "high"}}}, dropped=["priority"]),
    Row(NVEXT, "strict_priority, osl and speculative_prefill are only read", {"nvext": {"agent_hints": {"strict_priority": 1, "osl": 100, "speculative_prefill": True}}}),
    Row(NVEXT, "token_data, extra_fields and backend_instance_id change nothing", {"nvext": {"token_data": [1], "extra_fields": ["x"], "backend_instance_id": 3}}),
    Row(NVEXT, "latency_sensitivity is gone", {"nvext": {"agent_hints": {"latency_sensitivity": 1.0}}}, dropped=["latency_sensitivity"]),
    Row(NVEXT, "cache_control is gone", {"nvext": {"cache_control": {"type": "ephemeral"}}}, dropped=["cache_control"]),
    Row(NVEXT, "session_control is gone", {"nvext": {"session_control": {"type": "stop"}}}, dropped=["session_control"]),
    Row(NVEXT, "agent_hints that are no object are dropped", {"nvext": {"agent_hints": []}}, dropped=["agent_hints"]),
    Row(VERL, "a trajectory is a session", verl(), session="t"),
    Row(VERL, "kv_priority ranks", verl(kv_priority=65), session="t", retention="0 s priority 65"),
    Row(VERL, "lease_until is a unix time", verl(lease_until=NOW + 120), session="t", retention="120 s"),
    Row(VERL, "lease and priority together", verl(lease_until=NOW + 120, kv_priority=65), session="t", retention="120 s priority 65"),
    Row(VERL, "a lease that is over keeps nothing", verl(lease_until=NOW - 1), session="t"),
    Row(VERL, "a lease is at most a day", verl(lease_until=NOW * 1000), session="t", retention="86400 s"),
    Row(VERL, "a malformed lease is dropped", verl(lease_until="tomorrow"), session="t", dropped=["lease_until"]),
    Row(VERL, "tools_available is only read", verl(tools_available=True), session="t"),
    Row(VERL, "another schema_version is ignored", verl(schema_version=2), dropped=["schema_version"]),
    Row(VERL, "it is not openJiuwen's agent_hint", {**verl(), "agent_hint": {"session_id": "s1"}}, session="s1"),
    Row(VERL, "other kv_transfer_params change nothing", {"kv_transfer_params": {"kv_load_tiers": []}}),
    Row(INFER, "a program is a session", infer({"program_id": "p", "parent_program_id": "q"}), session="p", parent="q"),
    Row(INFER, "without a program the session", infer({"session_id": "s", "agent_id": "a"}), session="s"),
    Row(INFER, "program before session", infer({"program_id": "p", "session_id": "s", "task_id": "k"}), session="p"),
    Row(INFER, "a JSON string", infer('{"program_id": "p"}'), session="p"),
    Row(INFER, "a JSON string of more than 16 KiB is dropped", infer('{"program_id": "p", "x": "' + "y" * 16384 + '"}'), dropped=["larger"]),
    Row(INFER, "a string that is no JSON is dropped", infer("{p"), dropped=["not valid JSON"]),
    Row(INFER, "a list is dropped", infer([]), dropped=["not an object"]),
    Row(INFER, "absent is not there", {"vllm_xargs": {"other": 1}}),
    Row(INFER, "blocks_parent, expected_resume and agent_role are only read", infer({"program_id": "p", "blocks_parent": True, "expected_resume": False, "agent_role": "coder"}), session="p"),
    Row(THUNDER, "program_id is a session", {"program_id": "p", "docker_ids": ["d"]}, session="p"),
    Row(CONTINUUM, "job_id is a session", {"job_id": "j"}, session="j"),
    Row(CONTINUUM, "is_last_step ends it", {"job_id": "j", "is_last_step": True}, session="j", signals=["end"]),
    Row(CONTINUUM, "is_last_step false does not", {"job_id": "j", "is_last_step": False}, session="j"),
    Row(CONTINUUM, "this_func_call and last_func_call are only read", {"job_id": "j", "this_func_call": "a", "last_func_call": "b"}, session="j"),
    Row(CONTINUUM, "is_last_step without a job is not its", {"is_last_step": True}),
    Row(EVOKE, "evoke_session is a session", evoke(), session="e"),
    Row(EVOKE, "priority ranks", evoke(priority=7, source_type="rag"), session="e", retention="0 s priority 7"),
    Row(EVOKE, "what is no object is dropped", {"kv_transfer_params": {"evoke": 1}}, dropped=["evoke"]),
]  # fmt: skip
