"""What is found without hints, scored on recordings."""

from __future__ import annotations

import pytest

from kvpilot.eval.inference import Ids, SourceScores, report, score_source
from kvpilot.traces import (
    ToolUse,
    TraceAgent,
    TraceCall,
    TraceError,
    TraceMessage,
    TraceSession,
    find_trace,
    read_trace,
)


def message(name: str, role: str = "user", calls: tuple[ToolUse, ...] = ()) -> TraceMessage:
    return TraceMessage(id=name, role=role, tok=100, calls=calls)


def session(name: str) -> TraceSession:
    """Two turns with a tool between, a sub-agent, a compaction after a person's pause."""
    bash, task = ToolUse(id="b", name="Bash"), ToolUse(id="t", name="Task", subagent="explore")

    def call(agent: str, at: float, keep: int, add: str, reply: TraceMessage, *events: str) -> TraceCall:
        return TraceCall(
            agent=agent,
            t_request=at,
            t_end=at + 1,
            keep=keep,
            add=(message(f"{name}:{add}"),),
            reply=reply,
            events=events,
        )

    def reply(text: str, *calls: ToolUse) -> TraceMessage:
        return message(f"{name}:{text}", "assistant", calls)

    return TraceSession(
        source="made",
        id=name,
        agents=(
            TraceAgent(id="main", hidden_id="main"),
            TraceAgent(id="sub1", parent="main", spawned_by="t", hidden_id=f"helper {name}"),
        ),
        calls=(
            call("main", 0, 0, "task", reply("r1", bash), "start", "human"),
            call("main", 2, 2, "result", reply("r2", task), "tool"),
            call("sub1", 3.2, 0, "order", reply("found"), "sub:start"),
            call("main", 5, 4, "report", reply("r3"), "tool"),
            call("main", 60, 0, "summary", reply("r4"), "human", "compact:auto"),
        ),
    )


@pytest.mark.parametrize("ids", list(Ids))
def test_everything_is_found_in_a_simple_recording(ids: Ids) -> None:
    scores = score_source([session(f"s{n}") for n in range(5)], seed=1, ids=ids)
    assert (scores.calls, scores.breaks, scores.subagents, scores.pauses) == (30, 5, 5, 15)
    assert (scores.prefix_break_f1, scores.wait_accuracy) == (1.0, 1.0)
    assert scores.sessions_f1 is not None and scores.subagent_f1 is not None
    # That ids rotate is known after three conversations have shown it.
    least = 1.0 if ids is Ids.NONE else 0.7
    assert scores.sessions_f1 >= least and scores.subagent_f1 >= least


def test_a_source_without_anything_to_find_is_not_averaged() -> None:
    some = SourceScores(1.0, None, None, 0.5, 1, 2, 0, 0, 2)
    other = SourceScores(0.5, 1.0, None, 1.0, 1, 2, 1, 0, 2)
    document = report({"a": some, "b": other}, 0, Ids.NONE)
    assert (document["sessions_f1"], document["prefix_break_f1"], document["subagent_f1"]) == (
        0.75,
        1.0,
        None,
    )
    assert set(document["by_source"]) == {"a", "b"}


@pytest.mark.parametrize("source", ["agentv-codex", "context-evaluator"])
@pytest.mark.parametrize("ids", list(Ids))
def test_recorded_agents_are_understood(source: str, ids: Ids) -> None:
    try:
        sessions = list(read_trace(find_trace(source)))
    except TraceError as error:
        pytest.skip(str(error))
    scores = score_source(sessions, seed=0, ids=ids)
    assert scores.sessions_f1 is not None and scores.sessions_f1 > 0.99
    assert scores.prefix_break_f1 == 1.0
    assert scores.subagent_f1 is None or scores.subagent_f1 > 0.85
    assert scores.wait_accuracy is not None and scores.wait_accuracy > 0.97
