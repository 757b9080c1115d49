"""Readers of recorded agents, on tiny files written here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvpilot.traces import TraceError, find_trace, named_traces, read_trace


def write_lines(path: Path, rows: list[Any]) -> Path:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def message(id: str, tok: int, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"id": id, "role": role, "tok": tok, **more}


def call(agent: str, at: float, keep: int, add: list[Any], reply: Any, **more: Any) -> dict[str, Any]:
    base = {"agent": agent, "t_request": at, "t_first": at + 1, "t_end": at + 2, "events": [], "keep": keep}
    return {**base, "add": add, "reply": reply, "usage": {}, **more}


def session(id: str, calls: list[Any], agents: list[Any] | None = None) -> dict[str, Any]:
    main = {"id": "main", "parent": None, "spawned_by": None, "calls": len(calls), "hidden_prefix_tok": 100}
    return {"source": "made", "session": id, "duration_s": 1, "agents": agents or [main], "calls": calls}


def test_a_prompt_is_what_was_kept_plus_what_was_added(tmp_path: Path) -> None:
    use = {"id": "t1", "name": "Bash", "program": "pytest", "timeout_ms": 5000, "arg_chars": 7}
    run = {"id": "t1", "name": "Bash", "duration_s": 3.5, "reported_s": None, "error": False}
    rows = [
        session(
            "s1",
            [
                call(
                    "main",
                    0,
                    0,
                    [message("a", 10)],
                    message("r1", 5, "assistant", calls=[use]),
                    tools=[run],
                    events=["human"],
                ),
                call("main", 9, 2, [message("b", 20, results=["t1"], tools=["Bash"])], message("r2", 6)),
                call("main", 20, 1, [message("c", 3)], message("r3", 1), events=["rewind"]),
            ],
        )
    ]
    [read] = read_trace(write_lines(tmp_path / "made.jsonl.gz", rows))
    prompts = [[m.id for m in prompt] for _, prompt in read.prompts()]
    assert prompts == [["a"], ["a", "r1", "b"], ["a", "c"]]
    first = read.calls[0]
    assert first.reply.calls[0].program == "pytest" and first.reply.calls[0].timeout_ms == 5000
    assert first.tools[0].duration_s == 3.5
    assert read.calls[1].add[0].results == ("t1",)
    assert read.largest_context == 100 + 10 + 5 + 20 + 6


def test_main_agents_share_a_hidden_prefix_and_sub_agents_have_their_own(tmp_path: Path) -> None:
    agents = [
        {"id": "main", "parent": None, "spawned_by": None, "calls": 0, "hidden_prefix_tok": 40},
        {"id": "sub1", "parent": "main", "spawned_by": "t1", "calls": 0, "hidden_prefix_tok": 30},
    ]
    rows = [session(id, [call("main", 0, 0, [], message("r", 1))], agents) for id in ("s1", "s2")]
    one, two = read_trace(write_lines(tmp_path / "made.jsonl.gz", rows))
    assert one.agent("main").hidden_id == two.agent("main").hidden_id
    assert len({a.hidden_id for s in (one, two) for a in s.agents}) == 3


def test_sub_agents_of_a_block_trace_and_the_head_traces_share(tmp_path: Path) -> None:
    def request(t: float, keep: int, new: list[list[int]]) -> dict[str, Any]:
        return {"t": t, "type": "n", "out": 7, "stop": "end_turn", "api_time": 2.0, "keep": keep, "new": new}

    def trace(id: str) -> dict[str, Any]:
        nested = {"type": "subagent", "t": 5.0, "agent_id": "a1", "tool_tokens": 64, "system_tokens": 0}
        nested["requests"] = [request(0.0, 0, [[50, 2]])]
        requests = [request(0.0, 0, [[1, 4]]), nested, request(9.0, 3, [[60, 1]])]
        return {"id": id, "block_size": 64, "tool_tokens": 100, "system_tokens": 28, "requests": requests}

    one, two = read_trace(write_lines(tmp_path / "kv.jsonl.gz", [trace("x"), trace("y")]))
    prompts = {(c.agent, c.t_request): [m.id for m in prompt] for c, prompt in one.prompts()}
    assert prompts["main", 9.0] == ["head:100:28:0", "head:100:28:1", "x:3", "x:60"]
    assert prompts["sub1", 5.0] == ["head:64:0:0", "x:51"]
    assert one.agent("sub1").parent == "main" and one.chunk_tokens == 64
    assert [m.id for _, p in two.prompts() for m in p][:3] == ["head:100:28:0", "head:100:28:1", "y:3"]


def test_mooncake_requests_are_sessions_of_one_call(tmp_path: Path) -> None:
    rows = [{"timestamp": 1500, "input_length": 1000, "output_length": 9, "hash_ids": [0, 7]}]
    [read] = read_trace(write_lines(tmp_path / "mooncake.jsonl.gz", rows))
    assert [(m.id, m.tok) for m in read.calls[0].add] == [("mooncake:0", 512), ("mooncake:7", 488)]
    assert read.calls[0].t_request == 1.5 and read.chunk_tokens == 512


def test_miniswe_prompts_come_back_word_for_word(tmp_path: Path) -> None:
    inputs = ["fix the bug", "fix the bug\n<output>no</output>", "fix the bug\n<output>no</output>\nagain"]
    rows = [
        {"timestamp": 1_000_000 * i, "input": text, "output": f"reply {i}", "session_id": "s"}
        for i, text in enumerate(inputs)
    ]
    [read] = read_trace(write_lines(tmp_path / "mini.jsonl.gz", rows))
    # The recording has no replies inside its prompts, so each prompt keeps only what came before the reply.
    assert ["".join(m.text or "" for m in prompt) for _, prompt in read.prompts()] == inputs
    assert [c.t_request for c in read.calls] == [0, 1, 2]


def test_tau_bench_turns_are_calls_with_real_tool_calls(tmp_path: Path) -> None:
    use = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"id": 1}'}}
    traj = [
        {"role": "system", "content": "policy"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [use]},
        {"role": "tool", "tool_call_id": "c1", "name": "find", "content": "found"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "bye"},
    ]
    path = tmp_path / "tau.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump([{"task_id": 3, "trial": 0, "reward": 1, "info": {}, "traj": traj}], file)
    [read] = read_trace(path)
    assert [[m.role for m in prompt] for _, prompt in read.prompts()] == [
        ["system", "user"],
        ["system", "user", "assistant", "tool"],
    ]
    assert read.calls[0].reply.calls[0].name == "find"
    assert [c.events for c in read.calls] == [("human",), ("tool",)]


@pytest.mark.parametrize(
    ("calls", "complaint"),
    [
        ([call("main", 0, 3, [], message("r", 1))], "keeps 3 of 0"),
        ([call("ghost", 0, 0, [], message("r", 1))], "unknown agent 'ghost'"),
        ([{"agent": "main"}], "missing required field"),
    ],
)
def test_what_is_wrong_names_file_and_line(tmp_path: Path, calls: list[Any], complaint: str) -> None:
    good = session("s0", [call("main", 0, 0, [], message("r", 1))])
    path = write_lines(tmp_path / "bad.jsonl.gz", [good, session("s1", calls)])
    with pytest.raises(TraceError, match=rf"bad\.jsonl\.gz, line 2: .*{complaint}"):
        list(read_trace(path))


def test_a_cut_off_file_is_an_error_not_a_shorter_trace(tmp_path: Path) -> None:
    rows = [
        session(str(i), [call("main", 0, 0, [message(f"m{i}", 1)], message("r", 1))]) for i in range(2000)
    ]
    path = write_lines(tmp_path / "cut.jsonl.gz", rows)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(TraceError, match=r"cut\.jsonl\.gz.*damaged"):
        list(read_trace(path))


def test_finding_traces(tmp_path: Path) -> None:
    (tmp_path / "sessions").mkdir()
    path = write_lines(tmp_path / "sessions" / "made.jsonl.gz", [])
    env = {"KVPILOT_TRACES": str(tmp_path)}
    assert find_trace("made", env) == find_trace("sessions/made", env) == find_trace(str(path), env) == path
    with pytest.raises(TraceError, match="no trace 'nope'"):
        find_trace("nope", env)
    (tmp_path / "other.jsonl").write_text('{"hello": 1}\n')
    with pytest.raises(TraceError, match="not a trace kvpilot knows"):
        list(read_trace(tmp_path / "other.jsonl"))


def test_traces_go_by_their_short_names_while_these_differ(tmp_path: Path) -> None:
    paths = [tmp_path / folder / f"{name}.jsonl" for folder, name in (("a", "x"), ("a", "y"), ("b", "x"))]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    ax, ay, bx = paths
    assert named_traces([str(tmp_path / "a"), str(ax)]) == {"x": ax, "y": ay}
    assert named_traces([str(tmp_path / "a"), str(bx)]) == {str(ax): ax, "y": ay, str(bx): bx}
