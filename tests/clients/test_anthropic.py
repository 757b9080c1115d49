"""The anthropic package."""

from __future__ import annotations

import json

import pytest

from kvpilot.stack.launch import Endpoints
from tests.clients.conftest import Client
from tests.clients.tools import SCHEMA, called
from tests.e2e.peers import Message, directory, eventually, session_chunks, words

pytestmark = pytest.mark.engine
SCRIPT = "with_anthropic.py"

LOOK = {"name": "look", "description": "Look at the list.", "input_schema": SCHEMA, "strict": True}
FORCED = {
    "tool_choice": {"type": "tool", "name": "look"},
    # Sampled, not greedy: left to itself the model writes blanks before the name for ever.
    "temperature": 1,
    "max_tokens": 2000,
}


def asked(tag: str) -> list[Message]:
    return [{"role": "user", "content": words(tag, 60)}]


def text(facts: Message) -> str:
    return "".join(block.get("text", "") for block in facts["content"])


def test_plain_and_streamed_replies_are_the_same(client: Client, stack: Endpoints, tag: str) -> None:
    given = {"system": words(f"{tag}sys", 20), "messages": asked(tag), "max_tokens": 8}
    plain = client.ask("plain", session=f"p-{tag}", **given)
    streamed = client.ask("stream", session=f"s-{tag}", **given)
    assert text(plain) == text(streamed) != ""
    assert plain["stop"] == streamed["stop"] == "max_tokens"
    assert plain["usage"]["output_tokens"] == streamed["usage"]["output_tokens"] == 8
    chunks = session_chunks(stack, f"p-{tag}")
    assert chunks == session_chunks(stack, f"s-{tag}") and len(chunks) >= 2
    eventually(lambda: all(tiers == {"l1", "l2"} for tiers in directory(stack, chunks)))
    assert {"message_start", "text", "content_block_stop", "message_stop"} <= set(streamed["kinds"])


@pytest.mark.parametrize("how", ["plain", "stream"])
def test_a_tool_call_and_its_result(client: Client, tag: str, how: str) -> None:
    session, messages = f"t-{tag}", asked(tag)
    first = client.ask(how, session=session, messages=messages, tools=[LOOK], **FORCED)
    (call,) = [block for block in first["content"] if block["type"] == "tool_use"]
    assert called(call["name"], json.dumps(call["input"]))
    assert first["stop"] == "tool_use"
    use = {"type": "tool_use", "id": call["id"], "name": "look", "input": call["input"]}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "The list is in order."}
    messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    answer = client.ask(
        how, session=session, messages=messages, tools=[LOOK], tool_choice={"type": "none"}, max_tokens=8
    )
    assert text(answer) and answer["stop"] == "max_tokens"


def test_tokens_are_counted(client: Client, tag: str) -> None:
    assert client.ask("count", messages=asked(tag)) > 9 * 60


def test_an_error_of_the_engine_is_the_packages_own(client: Client) -> None:
    assert client.ask("refused") == "NotFoundError"
