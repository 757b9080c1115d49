"""Traffic that is recorded is a trace: what passed through comes back from the reader, without any text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpilot.coordinator import recorder as recording
from kvpilot.coordinator.recorder import Recorder
from kvpilot.domain import RequestFinished, SignalKind
from kvpilot.replay.plan import Hints, PlannedCall, ReplayOptions, plan_session
from kvpilot.replay.render import Conversation
from kvpilot.sim.compare import Options, compare
from kvpilot.traces import (
    ToolUse,
    TraceAgent,
    TraceCall,
    TraceError,
    TraceMessage,
    TraceSession,
    find_traces,
    read_trace,
)
from tests.coordinator.world import World


class Texts:
    """As many words as tokens, different for each id."""

    def text(self, text_id: str, tokens: int) -> str:
        return " ".join(f"secret-{text_id}-{n}" for n in range(max(1, tokens)))

    def count(self, text: str) -> int:
        return len(text.split())


def recorder(folder: Path, **limits: int) -> Recorder:
    return Recorder(folder, 256, limits.get("max_bytes", 10_000_000), limits.get("files", 3))


def message(text_id: str, role: str = "user", tok: int = 30, **more: Any) -> TraceMessage:
    return TraceMessage(id=text_id, role=role, tok=tok, **more)


def session(task: str = "ask", size: int = 50) -> TraceSession:
    """An agent that runs a program, starts a sub-agent, and has its context cleared."""
    shell = ToolUse("c1", "Bash", program="pytest", timeout_ms=60_000.0)
    starts = ToolUse("c2", "Task", subagent="agent")
    main = [
        TraceCall(
            "main", 0.0, 2.0, 0, (message(task, tok=size),), message("r1", "assistant", 40, calls=(shell,))
        ),
        TraceCall(
            "main",
            12.0,
            14.0,
            2,
            (message("t1", "tool", 300, results=("c1",)),),
            message("r2", "assistant", 60, calls=(starts,)),
        ),
        TraceCall(
            "main",
            40.0,
            41.0,
            4,
            (message("t2", "tool", 20, results=("c2",)),),
            message("r3", "assistant", 35),
        ),
        TraceCall("main", 200.0, 201.0, 1, (message("again", tok=25),), message("r4", "assistant", 31)),
    ]
    sub = [
        TraceCall("sub", 15.0, 20.0, 0, (message("look", tok=45),), message("s1", "assistant", 33)),
    ]
    agents = (
        TraceAgent("main", hidden_tok=500, hidden_id="rules"),
        TraceAgent("sub", parent="main", hidden_tok=200, hidden_id="sub-rules"),
    )
    calls = tuple(sorted([*main, *sub], key=lambda call: call.t_request))
    return TraceSession(source="made", id="s", agents=agents, calls=calls)


def play(world: World, traced: TraceSession, name: str) -> None:
    """The session as a gateway tells of it, with the tokens an engine would count."""
    planned = plan_session(traced, name, 1.0, ReplayOptions(hints=Hints.LIFECYCLE, max_reply=100_000))
    conversation, began = Conversation(Texts()), world.now  # type: ignore[arg-type]
    for call, recorded in zip(planned.calls, traced.calls, strict=True):
        messages = conversation.messages(call)
        world.now = began + recorded.t_request
        request = world.start(messages, planned.session_id(call.agent), parent=planned.parent_id(call.agent))
        world.now = began + recorded.t_end
        world.service.handle(_ended(world, request, call, recorded, conversation))


def _ended(
    world: World, request: str, call: PlannedCall, recorded: TraceCall, conversation: Conversation
) -> RequestFinished:
    prompt = call.hidden_tok + sum(m.tok for m in call.prompt)
    reply = conversation._message(call, recorded.reply)
    return RequestFinished(
        request,
        world.now,
        200,
        prompt_ids=json.dumps([7] * prompt).encode(),
        message=json.dumps(reply).encode(),
        prompt_token_count=prompt,
        completion_token_count=recorded.reply.tok,
    )


async def record(folder: Path, *traced: TraceSession, **limits: int) -> World:
    world = World()
    world.service.recorder = recorder(folder, **limits)
    for number, each in enumerate(traced):
        play(world, each, f"user@example.org/{number}")
    await world.service.recorder.flush()
    return world


def shape(call: TraceCall) -> tuple[Any, ...]:
    def of(message: TraceMessage) -> tuple[Any, ...]:
        uses = tuple(
            (use.name, use.program, use.timeout_ms, use.subagent is not None) for use in message.calls
        )
        return message.role, uses, len(message.results)

    return call.keep, tuple(map(of, call.add)), of(call.reply), call.reply.tok


def same_structure(read: TraceSession, was: TraceSession) -> None:
    assert [shape(call) for call in read.calls] == [shape(call) for call in was.calls]
    for (call, prompt), (old, old_prompt) in zip(read.prompts(), was.prompts(), strict=True):
        assert call.t_end - call.t_request == pytest.approx(old.t_end - old.t_request, abs=1e-3)
        tokens = read.agent(call.agent).hidden_tok + sum(m.tok for m in prompt)
        assert tokens == was.agent(old.agent).hidden_tok + sum(m.tok for m in old_prompt)
    starts = [call.t_request - read.calls[0].t_request for call in read.calls]
    assert starts == pytest.approx([c.t_request - was.calls[0].t_request for c in was.calls], abs=1e-3)


async def test_what_passed_through_comes_back_from_the_reader(tmp_path: Path) -> None:
    await record(tmp_path, session(), session())
    (file,) = find_traces(str(tmp_path))
    first, second = read_trace(file)
    for read in (first, second):
        same_structure(read, session())
        assert [(a.id, a.parent) for a in read.agents] == [("main", None), ("agent1", "main")]
        assert [run.duration_s for run in read.calls[0].tools] == [pytest.approx(10.0)]
    assert first.agents[0].hidden_id == second.agents[0].hidden_id != first.agents[1].hidden_id
    assert first.calls[0].add == second.calls[0].add, "the same text has the same id and length"
    assert [call.events for call in first.calls if call.agent == "main"] == [
        ("human",),
        ("tool",),
        ("tool",),
        ("human",),
    ]


async def test_nothing_that_was_said_is_in_it(tmp_path: Path) -> None:
    await record(tmp_path, session())
    (file,) = find_traces(str(tmp_path))
    raw = file.read_text()
    assert "Bash" in raw and "pytest" in raw
    for private in ("secret", "user@example.org", "default", "rules"):
        assert private not in raw
    assert file.stat().st_mode & 0o077 == 0


async def test_a_recording_can_be_simulated(tmp_path: Path) -> None:
    await record(tmp_path, *[session(f"task{n}", 2000) for n in range(10)])
    told: list[str] = []
    found = compare(
        find_traces(str(tmp_path)),
        Options(policies=("lru", "kvpilot", "belady"), pressures=(0.7,), window_s=10.0),
        told.append,
    )
    assert {row["policy"] for row in found["rows"]} == {"lru", "kvpilot", "belady"}


async def test_files_are_bounded_and_each_is_complete_in_itself(tmp_path: Path) -> None:
    world = await record(tmp_path, *[session() for _ in range(12)], max_bytes=3000, files=4)
    assert world.service.recorder is not None and world.service.recorder.dropped == 0
    files = find_traces(str(tmp_path))
    assert len(files) == 4
    for file in files:
        assert file.stat().st_size < 3000 + 1500
        sessions = list(read_trace(file))
        assert sessions
        for each in sessions:
            assert each.calls[0].keep == 0 and each.agents[0].hidden_tok > 0


async def test_hints_say_when_tools_finished(tmp_path: Path) -> None:
    world = World()
    world.service.recorder = recorder(tmp_path)
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "Bash"}}]}
    first = [{"role": "user", "content": "go"}]
    world.turn(first, "s", reply=call)
    world.now += 3.0
    world.signal("s", SignalKind.TOOL_FINISHED)
    world.now += 4.0
    world.turn([*first, call, {"role": "tool", "tool_call_id": "c", "content": "done"}], "s")
    await world.service.recorder.flush()
    (read,) = read_trace(*find_traces(str(tmp_path)))
    assert [run.duration_s for run in read.calls[0].tools] == [pytest.approx(3.0)]


async def test_a_full_disk_costs_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    (tmp_path / "file").touch()
    world.service.recorder = kept = recorder(tmp_path / "file")
    play(world, session(), "s")
    await kept.flush()
    assert kept.dropped == 6
    monkeypatch.setattr(recording, "MAX_BUFFER", 2000)
    world.service.recorder = kept = recorder(tmp_path / "later")
    for number in range(5):
        play(world, session(), f"s{number}")
    assert kept.dropped > 0 and kept._buffered <= 2000
    await kept.flush()
    play(world, session(), "last")
    await kept.flush()
    *_, last = (read for file in find_traces(str(tmp_path / "later")) for read in read_trace(file))
    assert last.calls[0].keep == 0


async def test_whatever_a_client_sends_is_recorded_or_left_out(tmp_path: Path) -> None:
    world = World()
    world.service.recorder = kept = recorder(tmp_path)
    odd: Sequence[Any] = [
        [{"role": "user"}, "text", None, 5],
        [{"role": ["x"], "content": {"a": 1}, "tool_calls": [3, {"function": []}]}],
        [],
        "no list",
    ]
    for messages in odd:
        request = world.start(messages, "s")  # type: ignore[arg-type]
        world.service.handle(RequestFinished(request, world.now, 200, message=b"no json"))
    world.service.handle(RequestFinished(world.start(odd[0], "t"), world.now, 500))  # type: ignore[arg-type]
    await kept.flush()
    (read,) = read_trace(*find_traces(str(tmp_path)))
    assert len(read.calls) == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"line":"kvpilot_recording","version":9}', "version 9"),
        (
            '{"line":"call","session":"s","agent":"a","at":1,"end":2,"head":"h","head_tok":1,"keep":3,"add":[],'
            '"reply":{"id":"r","role":"assistant","tok":1}}',
            "keeps 3 of 0",
        ),
        ('{"line":"what"}', "Invalid value"),
    ],
)
def test_a_damaged_recording_is_one_line(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"line":"kvpilot_recording"}\n' + line + "\n")
    with pytest.raises(TraceError, match=said) as refused:
        list(read_trace(file))
    assert "line 2" in str(refused.value) and "\n" not in str(refused.value)
