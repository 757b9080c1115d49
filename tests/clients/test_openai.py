"""The openai package."""

from __future__ import annotations

import pytest

from kvpilot.stack.launch import Endpoints
from tests.clients.conftest import Client
from tests.clients.tools import FORCED, LOOK, called
from tests.e2e.peers import Message, control, directory, eventually, session_chunks, words

pytestmark = pytest.mark.engine
SCRIPT = "with_openai.py"


def asked(tag: str) -> list[Message]:
    return [{"role": "user", "content": words(tag, 120)}]


def test_plain_and_streamed_replies_are_the_same(client: Client, stack: Endpoints, tag: str) -> None:
    plain = client.ask("plain", session=f"p-{tag}", messages=asked(tag), max_tokens=8)
    streamed = client.ask("stream", session=f"s-{tag}", messages=asked(tag), max_tokens=8)
    assert plain["session"] == f"p-{tag}"
    assert plain["message"]["content"] == streamed["message"]["content"] != ""
    assert plain["finish"] == streamed["finish"] == "length"
    assert plain["prompt_tokens"] == streamed["prompt_tokens"] > 0
    assert streamed["chunks"] > 1
    chunks = session_chunks(stack, f"p-{tag}")
    assert chunks == session_chunks(stack, f"s-{tag}") != []
    eventually(lambda: all(tiers == {"l1", "l2"} for tiers in directory(stack, chunks)))


@pytest.mark.parametrize(("how", "then"), [("plain", "plain"), ("accumulate", "stream")])
def test_a_tool_call_and_its_result(client: Client, stack: Endpoints, tag: str, how: str, then: str) -> None:
    session, messages = f"t-{tag}", asked(tag)
    first = client.ask(how, session=session, messages=messages, tools=[LOOK], **FORCED)
    (call,) = first["message"]["tool_calls"]
    assert called(call["function"]["name"], call["function"]["arguments"])
    assert how == "plain" or "tool_calls.function.arguments.done" in first["kinds"]
    known = session_chunks(stack, session)
    call = {"id": call["id"], "type": "function", "function": call["function"]}
    messages += [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "The list is in order."},
    ]
    given = {"messages": messages, "tools": [LOOK], "tool_choice": "none", "max_tokens": 8}
    answer = client.ask(then, session=session, **given)
    assert answer["message"]["content"] and not answer["message"].get("tool_calls")
    eventually(lambda: control(stack, f"/sessions/{session}")["turns"] == 2)
    now = session_chunks(stack, session)
    assert now[: len(known) - 1] == known[:-1], "the context goes on"
    eventually(lambda: all(tiers == {"l1", "l2"} for tiers in directory(stack, now)))


@pytest.mark.parametrize("streamed", [False, True])
def test_responses(client: Client, stack: Endpoints, tag: str, streamed: bool) -> None:
    answer = client.ask("responses", session=f"r-{tag}", text=words(tag, 60), streamed=streamed)
    assert answer["text"] and answer["input_tokens"] > 9 * 60
    chunks = session_chunks(stack, f"r-{tag}")
    assert len(chunks) >= 2
    eventually(lambda: all(tiers == {"l1", "l2"} for tiers in directory(stack, chunks)))


def test_an_error_of_the_engine_is_the_packages_own(client: Client) -> None:
    assert client.ask("refused") == "NotFoundError"
