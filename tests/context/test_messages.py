"""Content identity of conversations."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpilot.context.messages import common_prefix, message_hashes

messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=3)}),
    max_size=6,
)


def reordered(value: Any) -> Any:
    """The same JSON with every object's keys in another order."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(list(value))}
    return [reordered(item) for item in value] if isinstance(value, list) else value


@given(messages, messages)
def test_common_prefix_counts_tools_and_equal_leading_messages(
    a: list[dict[str, str]], b: list[dict[str, str]]
) -> None:
    equal = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        equal += 1
    one, two = message_hashes({"messages": a}), message_hashes({"messages": b})
    assert common_prefix(one, two) == 1 + equal


@given(messages)
def test_how_the_json_was_written_does_not_matter(conversation: list[dict[str, str]]) -> None:
    tools = [
        {"type": "function", "function": {"name": "ls", "parameters": {"a": 1, "b": [{"c": 1, "d": 2}]}}}
    ]
    body = {"tools": tools, "messages": conversation}
    again = json.loads(json.dumps(reordered(body), indent=3))
    assert message_hashes(body) == message_hashes(again)


def test_other_tools_are_another_conversation_but_no_tools_are_no_tools() -> None:
    chat = [{"role": "user", "content": "hi"}]
    plain = message_hashes({"messages": chat})
    assert message_hashes({"messages": chat, "tools": []}) == plain
    assert message_hashes({"messages": chat, "tools": None}) == plain
    other = message_hashes({"messages": chat, "tools": [{"type": "function", "function": {"name": "ls"}}]})
    assert common_prefix(plain, other) == 0
    assert message_hashes({}) == plain[:1]
