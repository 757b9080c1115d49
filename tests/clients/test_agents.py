"""The openai-agents package: an agent that calls a tool and goes on with its result."""

from __future__ import annotations

import pytest

from kvpilot.stack.launch import Endpoints
from tests.clients.conftest import Client
from tests.e2e.peers import directory, eventually, session_chunks, words

pytestmark = pytest.mark.engine
SCRIPT = "with_agents.py"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_answers(client: Client, tag: str, streamed: bool) -> None:
    given = {"instructions": words(tag, 30), "text": "Go on.", "tool": False, "streamed": streamed}
    facts = client.ask("run", api="chat", session=f"p-{tag}", **given)
    assert facts["output"] and facts["requests"] == 1
    assert not streamed or "raw_response_event" in facts["events"]


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_runs_its_tool_and_goes_on(
    client: Client, stack: Endpoints, tag: str, streamed: bool
) -> None:
    given = {"instructions": words(tag, 80), "text": "Look.", "tool": True, "streamed": streamed}
    facts = client.ask("run", api="chat", session=f"t-{tag}", **given)
    assert facts["ran"] and facts["requests"] == 2
    assert (facts["items"][0], facts["items"][-1]) == ("tool_call_item", "message_output_item")
    assert "tool_call_output_item" in facts["items"]
    assert facts["output"] != "The list is in order."
    chunks = session_chunks(stack, f"t-{tag}")
    assert len(chunks) >= 3
    eventually(lambda: all(tiers == {"l1", "l2"} for tiers in directory(stack, chunks)))


@pytest.mark.parametrize("streamed", [False, True])
def test_by_responses_an_agent_runs_its_tool(client: Client, tag: str, streamed: bool) -> None:
    given = {"instructions": words(tag, 30), "text": "Look.", "tool": True, "streamed": streamed}
    facts = client.ask("run", api="responses", session=f"r-{tag}", **given)
    assert facts["ran"] and facts["requests"] == 1
    assert "The list is in order." in facts["output"]
