"""langgraph and langchain-openai: a graph of a model and its tool."""

from __future__ import annotations

import pytest

from kvpilot.stack.launch import Endpoints
from tests.clients.conftest import Client
from tests.e2e.peers import directory, eventually, session_chunks, words

pytestmark = pytest.mark.engine
SCRIPT = "with_langgraph.py"


def test_plain_and_streamed_replies_are_the_same(client: Client, stack: Endpoints, tag: str) -> None:
    given = {"system": words(tag, 60), "text": "Go on."}
    plain = client.ask("plain", session=f"p-{tag}", **given)
    streamed = client.ask("stream", session=f"s-{tag}", **given)
    assert plain["content"] == streamed["content"] != ""
    assert streamed["chunks"] > 1
    assert plain["usage"]["input_tokens"] == streamed["usage"]["input_tokens"] > 9 * 60
    assert session_chunks(stack, f"p-{tag}") == session_chunks(stack, f"s-{tag}") != []


@pytest.mark.parametrize("streamed", [False, True])
def test_a_graph_runs_its_tool_and_goes_on(
    client: Client, stack: Endpoints, tag: str, streamed: bool
) -> None:
    session = f"t-{tag}"
    facts = client.ask("run", session=session, system=words(tag, 80), text="Look.", streamed=streamed)
    assert facts["types"] == ["system", "human", "ai", "tool", "ai"], facts["last"]
    assert len(facts["ran"]) == 1
    assert not streamed or facts["pieces"] > 1
    chunks = session_chunks(stack, session)
    assert len(chunks) >= 3
    eventually(lambda: all(tiers == {"l1", "l2"} for tiers in directory(stack, chunks)))
