"""Anthropic's and the Responses API's requests are the chats their conversations are."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpilot.context.anthropic import chat_messages
from kvpilot.context.conversation import content_hashes, head_length, named_replies, read_reply, read_request

CALL = {"type": "tool_use", "id": "toolu_0123456789abcdef", "name": "read", "input": {"path": "a", "n": 1}}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "terse."},
    ],
    "tools": [{"name": "read", "description": "d", "input_schema": {"properties": {}}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                CALL,
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": CALL["id"],
                    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
                },
                {"type": "text", "text": "and now?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "thinking": {"type": "disabled"},
}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": "I look.",
            "tool_calls": [
                {
                    "id": CALL["id"],
                    "type": "function",
                    "function": {"name": "read", "arguments": '{"path": "a", "n": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": CALL["id"], "content": "one\ntwo"},
        {"role": "user", "content": "and now?"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "read",
                "description": "d",
                "parameters": {"properties": {}, "type": "object"},
            },
        }
    ],
    "reasoning_effort": "none",
}
RESPONSES: dict[str, Any] = {
    "instructions": "Be terse.",
    "tools": [{"type": "function", "name": "read", "description": "d", "parameters": {}}],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "one"},
        {"role": "user", "content": "and now?"},
    ],
}


def read(path: str, body: Any) -> Any:
    return read_request(path, json.dumps(body).encode())


def test_a_messages_request_is_the_chat_vllm_makes_of_it() -> None:
    assert read("/v1/messages", MESSAGES) == CHAT


def test_a_responses_request_is_the_chat_vllm_makes_of_it() -> None:
    chat = read("/v1/responses", RESPONSES)
    assert [m["role"] for m in chat["messages"]] == ["system", "user", "assistant", "tool", "user"]
    assert chat["messages"][2] == {
        "role": "assistant",
        "reasoning": "hm",
        "content": "I look.",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "read", "arguments": "{}"}}],
    }
    assert chat["messages"][3] == {"role": "tool", "tool_call_id": "call_1", "content": "one"}
    assert chat["tools"][0]["function"]["name"] == "read"
    text = read("/v1/responses", {"input": "hi"})
    assert text["messages"] == [{"role": "user", "content": "hi"}]


def test_the_same_conversation_has_the_same_names_by_every_api() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    chat = {"messages": [{"role": "system", "content": "s"}, *messages]}
    blocks = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    names = [
        content_hashes(read("/v1/chat/completions", chat)),
        content_hashes(read("/v1/messages", {"system": "s", "messages": messages})),
        content_hashes(read("/v1/messages", {"system": "s", "messages": blocks})),
        content_hashes(read("/v1/responses", {"instructions": "s", "input": messages})),
    ]
    assert names[1:] == names[:1] * 3
    assert head_length(read("/v1/messages", {"system": "s", "messages": messages})) == 2


def test_moving_a_cache_mark_or_the_attribution_changes_no_name() -> None:
    other = copy.deepcopy(MESSAGES)
    other["system"][0]["text"] = "x-anthropic-billing-header: cch=2;"
    del other["system"][1]["cache_control"]
    other["messages"][0] = {
        "role": "user",
        "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
    }
    assert content_hashes(read("/v1/messages", other)) == content_hashes(read("/v1/messages", MESSAGES))
    other["messages"][0]["content"][0]["text"] = "ho"
    assert content_hashes(read("/v1/messages", other)) != content_hashes(read("/v1/messages", MESSAGES))


def test_a_reply_is_known_again_when_the_client_sends_it_back() -> None:
    (said,) = chat_messages({"role": "assistant", "content": MESSAGES["messages"][1]["content"]})
    reply = read_reply(json.dumps(said).encode())
    assert [tool.name for tool in reply.tools] == ["read"]
    assert reply.name is not None
    assert named_replies(read("/v1/messages", MESSAGES)) == [reply.name]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "source", "input", "name", "id", "output", "summary"]
            )
            | st.text(max_size=3),
            inner
            | st.sampled_from(
                ["user", "assistant", "system", "tool_use", "tool_result", "image", "reasoning", "message"]
            ),
            max_size=4,
        )
    ),
    max_leaves=20,
)
FIELDS = ("messages", "system", "tools", "thinking", "output_config", "input", "instructions", "reasoning")


@given(
    st.sampled_from(["/v1/messages", "/v1/responses"]), st.dictionaries(st.sampled_from(FIELDS), json_values)
)
def test_nothing_a_client_sends_is_an_error(path: str, body: dict[str, Any]) -> None:
    chat = read(path, body)
    assert all(isinstance(message, dict) for message in chat["messages"])
    assert len(content_hashes(chat)) == 1 + len(chat["messages"])
    named_replies(chat)
