"""What the running stack says of itself: why KV is where it is, and what passed through."""

from __future__ import annotations

import json
import urllib.request

import pytest

from kvpilot.stack.launch import Endpoints
from kvpilot.traces import TraceSession, find_traces, read_trace
from tests.cli.conftest import Run, kvpilot
from tests.e2e.peers import chat, control, eventually, session_chunks, words

__all__ = ["kvpilot"]

pytestmark = pytest.mark.engine


def test_a_session_and_its_chunks_are_explained(stack: Endpoints, kvpilot: Run) -> None:
    chat(stack, [{"role": "user", "content": words("explained", 120)}], "explained")
    chunks = session_chunks(stack, "explained")
    (conversation,) = control(stack, "/explain/sessions/explained")["conversations"]
    assert conversation["chunks"] == len(chunks)
    assert conversation["forecast"]["waits_for"] == "person"
    assert 0.0 < conversation["forecast"]["within"]["600s"] <= 1.0
    assert conversation["worth"] > 0.0
    (found,) = control(stack, f"/explain/chunks/{chunks[-1]}")["spaces"]
    assert [c["session"] for c in found["held_by"]] == ["explained"]
    for target in ("explained", chunks[0]):
        code, out, _ = kvpilot("explain", target, "--control", stack.control_url)
        assert code == 0 and "waits for: person" in out
    metrics = urllib.request.urlopen(f"{stack.control_url}/metrics").read().decode()
    assert "kvpilot_forecast_pauses_total" in metrics


def test_what_passed_through_is_a_trace(stack: Endpoints) -> None:
    first = {"role": "user", "content": words("recorded", 100)}
    reply = chat(stack, [first], "written-down", ignore_eos=True)["choices"][0]["message"]["content"]
    grown = [first, {"role": "assistant", "content": reply}, {"role": "user", "content": "and then?"}]
    usage = [chat(stack, grown, "written-down", max_tokens=n, ignore_eos=True)["usage"] for n in (5, 6)]
    folder = stack.config.coordinator.record

    def recorded() -> TraceSession | None:
        for file in find_traces(folder):
            for session in read_trace(file):
                if [call.reply.tok for call in session.calls] == [4, 5, 6]:
                    return session
        return None

    session: TraceSession = eventually(recorded)
    assert [(call.keep, len(call.add)) for call in session.calls] == [(0, 1), (2, 1), (3, 0)]
    lengths = [
        session.agent(call.agent).hidden_tok + sum(m.tok for m in prompt)
        for call, prompt in session.prompts()
    ]
    assert lengths[1:] == [used["prompt_tokens"] for used in usage]
    assert "entry" not in "".join(file.read_text() for file in find_traces(folder))
    assert json.dumps("written-down") not in "".join(file.read_text() for file in find_traces(folder))
