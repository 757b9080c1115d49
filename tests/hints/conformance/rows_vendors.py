"""Anthropic's and OpenAI's prompt caching."""

from __future__ import annotations

from typing import Any

from tests.hints.conformance.table import Row

ANTHROPIC, OPENAI = "8 Anthropic [code: SDK]", "9 OpenAI [code: SDK]"

EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def block(mark: Any = None, text: str = "t") -> dict[str, Any]:
    return {"type": "text", "text": text, **({} if mark is None else {"cache_control": mark})}


def said(*marks: Any) -> list[dict[str, Any]]:
    """One message per mark."""
    return [{"role": "user", "content": [block(mark)]} for mark in marks]


def edits(*items: Any) -> dict[str, Any]:
    return {"context_management": {"edits": list(items)}}


def point(ttl: str | None = None, **more: Any) -> list[dict[str, Any]]:
    mark = {"mode": "explicit", **({} if ttl is None else {"ttl": ttl}), **more}
    return [{"role": "system", "content": [{"type": "text", "text": "t", "prompt_cache_breakpoint": mark}]}]


TOOL_USES = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "input_tokens", "value": 100000},
    "keep": {"type": "tool_uses", "value": 3},
    "clear_at_least": {"type": "input_tokens", "value": 20000},
    "exclude_tools": ["memory"],
    "clear_tool_inputs": False,
}
TWO_HOURS = {"type": "ephemeral", "ttl": "2h"}

ROWS = [
    Row(ANTHROPIC, "a mark at the top level marks all of it", {"cache_control": EPHEMERAL}, retention="300 s"),
    Row(ANTHROPIC, "ttl 5m", {"cache_control": {"type": "ephemeral", "ttl": "5m"}}, retention="300 s"),
    Row(ANTHROPIC, "ttl 1h", {"cache_control": HOUR}, retention="3600 s"),
    Row(ANTHROPIC, "another ttl is 5m, with a reason", {"cache_control": TWO_HOURS}, retention="300 s", dropped=["ttl"]),
    Row(ANTHROPIC, "a ttl that is a number is 5m, with a reason", {"cache_control": {"type": "ephemeral", "ttl": 300}}, retention="300 s", dropped=["ttl"]),
    Row(ANTHROPIC, "another type is dropped", {"cache_control": {"type": "forever"}}, dropped=["type"]),
    Row(ANTHROPIC, "a mark that is no object is dropped", {"cache_control": "ephemeral"}, dropped=["not an object"]),
    Row(ANTHROPIC, "null is no mark", {"cache_control": None}),
    Row(ANTHROPIC, "a mark on a block of a message", {"messages": said(None, EPHEMERAL, None)}, retention="300 s up to messages 1"),
    Row(ANTHROPIC, "the last mark bounds", {"messages": said(HOUR, None, EPHEMERAL)}, retention="3600 s up to messages 2"),
    Row(ANTHROPIC, "a mark on a system block", {"system": [block(EPHEMERAL)]}, retention="300 s up to messages -1"),
    Row(ANTHROPIC, "a mark on a tool", {"tools": [{"name": "a", "cache_control": HOUR}]}, retention="3600 s up to messages -1"),
    Row(ANTHROPIC, "tools, then system, then messages", {"tools": [{"name": "a", "cache_control": HOUR}], "system": [block(HOUR)], "messages": said(EPHEMERAL)}, retention="3600 s up to messages 0"),
    Row(ANTHROPIC, "a longer ttl behind a shorter is dropped", {"messages": said(EPHEMERAL, HOUR)}, retention="300 s up to messages 0", dropped=["longer ttl"]),
    Row(ANTHROPIC, "at most 4 marks", {"messages": said(*[EPHEMERAL] * 5)}, retention="300 s up to messages 3", dropped=["more than 4"]),
    Row(ANTHROPIC, "a system that is a text has no marks", {"system": "you are"}),
    Row(ANTHROPIC, "a text that speaks of cache_control is no mark", {"messages": [{"role": "user", "content": '{"cache_control": {"type": "ephemeral"}}'}]}),
    Row(ANTHROPIC, "a malformed mark drops itself alone", {"messages": said({"type": 1}, EPHEMERAL)}, retention="300 s up to messages 1", dropped=["type"]),
    Row(ANTHROPIC, "marks and the top level together", {"cache_control": EPHEMERAL, "messages": said(HOUR, None)}, retention="3600 s"),
    Row(ANTHROPIC, "max_tokens 0 warms", {"cache_control": HOUR, "max_tokens": 0}, retention="3600 s", warm=True),
    Row(ANTHROPIC, "max_tokens 0 without marks is somebody else's", {"max_tokens": 0}),
    Row(ANTHROPIC, "max_tokens above 0 does not warm", {"cache_control": HOUR, "max_tokens": 1}, retention="3600 s"),
    Row(ANTHROPIC, "clear_tool_uses", edits(TOOL_USES), edits=["clear_tool_uses from 100000 input_tokens keep 3 tool_uses at least 20000 not memory"]),
    Row(ANTHROPIC, "clear_tool_uses with inputs", edits({"type": "clear_tool_uses_20250919", "clear_tool_inputs": True}), edits=["clear_tool_uses inputs too"]),
    Row(ANTHROPIC, "clear_tool_uses with the inputs of some tools", edits({"type": "clear_tool_uses_20250919", "clear_tool_inputs": ["write"]}), edits=["clear_tool_uses inputs of write too"]),
    Row(ANTHROPIC, "clear_tool_inputs that is neither drops the edit", edits({"type": "clear_tool_uses_20250919", "clear_tool_inputs": 5}), dropped=["clear_tool_inputs"]),
    Row(ANTHROPIC, "clear_tool_uses that keeps all", edits({"type": "clear_tool_uses_20250919", "keep": "all"}), edits=["clear_tool_uses keep 0 all"]),
    Row(ANTHROPIC, "a keep in another unit drops the edit", edits({"type": "clear_tool_uses_20250919", "keep": {"type": "thinking_turns", "value": 50}}), dropped=["keep.type"]),
    Row(ANTHROPIC, "a trigger in another unit drops the edit", edits({"type": "clear_tool_uses_20250919", "trigger": {"type": "tokens", "value": 100000}}), dropped=["trigger.type"]),
    Row(ANTHROPIC, "clear_at_least in another unit drops the edit", edits({"type": "clear_tool_uses_20250919", "clear_at_least": {"type": "tool_uses", "value": 5}}), dropped=["clear_at_least.type"]),
    Row(ANTHROPIC, "exclude_tools that is no list drops the edit", edits({"type": "clear_tool_uses_20250919", "exclude_tools": "memory"}), dropped=["exclude_tools"]),
    Row(ANTHROPIC, "clear_thinking has no trigger", edits({"type": "clear_thinking_20251015", "trigger": {"type": "input_tokens", "value": 1}}), dropped=["trigger"]),
    Row(ANTHROPIC, "clear_thinking", edits({"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}), edits=["clear_thinking keep 2 thinking_turns"]),
    Row(ANTHROPIC, "clear_thinking that keeps all", edits({"type": "clear_thinking_20251015", "keep": "all"}), edits=["clear_thinking keep 0 all"]),
    Row(ANTHROPIC, "compact", edits({"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 150000}, "instructions": None, "pause_after_compaction": False}), edits=["compact from 150000 input_tokens"]),
    Row(ANTHROPIC, "edits keep their order", edits({"type": "clear_thinking_20251015"}, {"type": "clear_tool_uses_20250919"}), edits=["clear_thinking", "clear_tool_uses"]),
    Row(ANTHROPIC, "an unknown edit is dropped alone", edits({"type": "clear_images_2030"}, {"type": "clear_thinking_20251015"}), edits=["clear_thinking"], dropped=["type"]),
    Row(ANTHROPIC, "an edit that is no object is dropped", edits(1), dropped=["not an object"]),
    Row(ANTHROPIC, "a malformed trigger drops the edit alone", edits({"type": "compact_20260112", "trigger": 5}, {"type": "clear_thinking_20251015"}), edits=["clear_thinking"], dropped=["trigger"]),
    Row(ANTHROPIC, "a list (the Responses API's) is not this dialect", {"context_management": []}, dropped=["context_management"]),
    Row(ANTHROPIC, "diagnostics change nothing", {"diagnostics": {"previous_message_id": "msg_1"}}),
    Row(OPENAI, "prompt_cache_key is no session", {"prompt_cache_key": "tenant-1"}),
    Row(OPENAI, "options with a ttl", {"prompt_cache_options": {"ttl": "30m"}}, retention="1800 s"),
    Row(OPENAI, "options without a ttl", {"prompt_cache_options": {"mode": "explicit"}}, retention="300 s"),
    Row(OPENAI, "a malformed ttl is the default, with a reason", {"prompt_cache_options": {"ttl": "soon"}}, retention="300 s", dropped=["ttl"]),
    Row(OPENAI, "a ttl is at most a day here", {"prompt_cache_options": {"ttl": "99d"}}, retention="86400 s"),
    Row(OPENAI, "a breakpoint with a ttl", {"messages": point("12h")}, retention="43200 s up to messages 0"),
    Row(OPENAI, "a breakpoint and explicit options: the longer ttl, up to the breakpoint", {"messages": point("12h"), "prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}, retention="43200 s up to messages 0"),
    Row(OPENAI, "without explicit mode a breakpoint bounds nothing", {"messages": point("10m"), "prompt_cache_options": {"ttl": "30m"}}, retention="1800 s"),
    Row(OPENAI, "a breakpoint in Responses' input", {"input": point("1h")}, retention="3600 s up to messages 0"),
    Row(OPENAI, "a breakpoint of another mode is dropped", {"messages": point(mode="auto")}, dropped=["mode"]),
    Row(OPENAI, "a breakpoint that is no object is dropped", {"messages": [{"role": "user", "content": [{"prompt_cache_breakpoint": 1}]}]}, dropped=["mode"]),
    Row(OPENAI, "look-back of 80 breakpoints", {"messages": point() * 81}, retention="300 s up to messages 80", dropped=["more than 80"]),
    Row(OPENAI, "prompt_cache_retention in_memory (deprecated)", {"prompt_cache_retention": "in_memory"}, retention="300 s"),
    Row(OPENAI, "prompt_cache_retention 24h (deprecated)", {"prompt_cache_retention": "24h"}, retention="86400 s"),
    Row(OPENAI, "another prompt_cache_retention is dropped", {"prompt_cache_retention": "1y"}, dropped=["prompt_cache_retention"]),
    Row(OPENAI, "prompt_cache_retention null is not there", {"prompt_cache_retention": None}),
    Row(OPENAI, "options win over prompt_cache_retention", {"prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "10m"}}, retention="600 s"),
    Row(OPENAI, "options that are no object are dropped", {"prompt_cache_options": "explicit"}, dropped=["prompt_cache_options"]),
]  # fmt: skip
