"""openJiuwen's package, unmodified: its model client with affinity on and its KV-cache runtime."""

from __future__ import annotations

import pytest

from kvpilot.stack.launch import Endpoints
from tests.clients.conftest import Client
from tests.clients.tools import FORCED, LOOK, called
from tests.e2e.peers import (
    Message,
    control,
    directory,
    engine_requests,
    eventually,
    session_chunks,
    words,
)

pytestmark = pytest.mark.engine
SCRIPT = "with_openjiuwen.py"


def conversation(tag: str, n: int = 250) -> list[Message]:
    return [
        {"role": "system", "content": words(f"{tag}sys", 60)},
        {"role": "user", "content": words(f"{tag}a", n)},
        {"role": "assistant", "content": words(f"{tag}b", 60)},
        {"role": "user", "content": words(f"{tag}c", 60)},
    ]


def begun(
    stack: Endpoints, client: Client, session: str, messages: list[Message], **given: object
) -> list[str]:
    """A first turn; the session's chunks once all are in host memory and on disk."""
    client.ask("invoke", session=session, messages=messages, **given)
    chunks = session_chunks(stack, session)
    where(stack, chunks, {"l1", "l2"})
    return chunks


def where(stack: Endpoints, chunks: list[str], tiers: set[str]) -> None:
    eventually(lambda: all(found == tiers for found in directory(stack, chunks)))


def manage(client: Client, action: str, session: str, **given: object) -> None:
    facts = client.ask("manage", action=action, session=session, **given)
    assert facts["done"] is True
    assert facts["seconds"] < facts["budget"]


def last_action(stack: Endpoints, session: str) -> Message:
    newest: Message = control(stack, f"/actions?session={session}&limit=1")["actions"][0]
    settled: Message = control(stack, f"/actions/{newest['id']}?wait=20")
    return settled


def test_calls_plain_and_streamed_belong_to_the_session(client: Client, stack: Endpoints, tag: str) -> None:
    assert client.ask("supports")
    messages = conversation(tag)
    plain = client.ask("invoke", session=f"root-{tag}", messages=messages)
    streamed = client.ask("stream", session=f"child-{tag}", parent=f"root-{tag}", messages=messages)
    assert plain["content"] == streamed["content"] != ""
    assert streamed["chunks"] > 1
    assert session_chunks(stack, f"root-{tag}") == session_chunks(stack, f"child-{tag}") != []
    assert control(stack, f"/sessions/child-{tag}")["parent"] == f"root-{tag}"


@pytest.mark.parametrize("how", ["invoke", "stream"])
def test_tool_calls_come_back_as_the_package_reads_them(client: Client, tag: str, how: str) -> None:
    messages = [{"role": "user", "content": tag}]
    reply = client.ask(how, session=f"t-{tag}", messages=messages, tools=[LOOK], **FORCED)
    (call,) = reply["calls"]
    assert called(call["name"], call["arguments"])


def test_a_session_is_offloaded_prefetched_and_evicted(client: Client, stack: Endpoints, tag: str) -> None:
    session = f"s-{tag}"
    chunks = begun(stack, client, session, conversation(tag))
    taken = engine_requests(stack)
    manage(client, "offload", session)
    where(stack, chunks, {"l2"})
    manage(client, "prefetch", session)
    where(stack, chunks, {"l1", "l2"})
    manage(client, "evict", session)
    where(stack, chunks, set())
    assert engine_requests(stack) == taken, "management never reaches the engine"


def test_a_range_of_messages_is_offloaded_prefetched_and_evicted(
    client: Client, stack: Endpoints, tag: str
) -> None:
    session, messages = f"m-{tag}", conversation(tag)
    chunks = begun(stack, client, session, messages)
    held = {"messages": messages, "msg_start": 1, "msg_end": 2}
    manage(client, "offload", session, target="messages", **held)
    moved = eventually(
        lambda: [c for c, t in zip(chunks, directory(stack, chunks), strict=True) if t == {"l2"}]
    )
    assert 250 * 9 // 256 <= len(moved) <= 250 * 9 // 256 + 2, "the message's chunks, no others"
    kept = [chunk for chunk in chunks if chunk not in moved]
    assert all(tiers == {"l1", "l2"} for tiers in directory(stack, kept))
    manage(client, "prefetch", session, target="messages", **held)
    where(stack, chunks, {"l1", "l2"})
    manage(client, "evict", session, target="messages", **held)
    where(stack, moved, set())
    assert all(directory(stack, kept))


def test_a_range_of_tools_is_offloaded_prefetched_and_evicted(
    client: Client, stack: Endpoints, tag: str
) -> None:
    session = f"f-{tag}"
    tools = [
        {**LOOK, "function": {**LOOK["function"], "name": f"look_{n}", "description": words(f"{tag}{n}", 80)}}
        for n in range(3)
    ]
    messages = conversation(tag)
    chunks = begun(stack, client, session, messages, tools=tools)
    held = {"messages": messages, "tools": tools, "tools_start": 1, "tools_end": 2}
    manage(client, "offload", session, target="tools", **held)
    moved = eventually(
        lambda: [c for c, t in zip(chunks, directory(stack, chunks), strict=True) if t == {"l2"}]
    )
    assert 80 * 9 // 256 <= len(moved) <= 80 * 9 // 256 + 2, "the tool's chunks, no others"
    manage(client, "prefetch", session, target="tools", **held)
    where(stack, chunks, {"l1", "l2"})
    manage(client, "evict", session, target="tools", **held)
    where(stack, moved, set())
    assert all(directory(stack, [chunk for chunk in chunks if chunk not in moved]))


def test_messages_and_tools_go_in_one_action(client: Client, stack: Endpoints, tag: str) -> None:
    """What the package sends when an agent's window changed and its tools too."""
    session, messages = f"b-{tag}", conversation(tag)
    tools = [{**LOOK, "function": {**LOOK["function"], "description": words(tag, 100)}}]
    chunks = begun(stack, client, session, messages, tools=tools)
    manage(
        client,
        "evict",
        session,
        target="messages",
        messages=messages,
        msg_start=1,
        msg_end=4,
        include_tools=True,
        tools=tools,
        tools_start=0,
        tools_end=1,
    )
    eventually(lambda: sum(map(bool, directory(stack, chunks))) <= 3)


def test_a_window_that_was_never_sent_is_no_error(client: Client, stack: Endpoints, tag: str) -> None:
    session, messages = f"n-{tag}", conversation(tag)
    chunks = begun(stack, client, session, messages)
    other = conversation(f"{tag}x")
    manage(client, "evict", session, target="messages", messages=other, msg_start=1, msg_end=2)
    assert last_action(stack, session)["status"] == "missing"
    manage(client, "evict", f"unknown-{tag}")
    assert all(directory(stack, chunks))


def test_the_runtime_suspends_prepares_and_releases(client: Client, stack: Endpoints, tag: str) -> None:
    session = f"r-{tag}"
    client.ask("turn", session=session, messages=conversation(tag))
    chunks = session_chunks(stack, session)
    where(stack, chunks, {"l1", "l2"})
    assert client.ask("suspend", session=session)
    where(stack, chunks, {"l2"})
    assert client.ask("prepare", session=session)
    where(stack, chunks, {"l1", "l2"})
    assert client.ask("release", session=session)
    where(stack, chunks, set())
