"""Planning a replay: order, pauses, lengths and hints, without any network."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.domain import SignalKind
from kvpilot.replay.plan import (
    COMPACT_INSTRUCTION,
    Hints,
    ReplayOptions,
    Wait,
    choose_scale,
    plan_overlay,
    plan_session,
    scaled_tokens,
)
from kvpilot.replay.text import MESSAGE_OVERHEAD
from kvpilot.traces import (
    ToolRun,
    ToolUse,
    TraceAgent,
    TraceCall,
    TraceMessage,
    TraceSession,
    overlay,
)


def user(id: str, tok: int, results: tuple[str, ...] = ()) -> TraceMessage:
    return TraceMessage(id=id, role="user", tok=tok, results=results)


def reply(id: str, tok: int, *tools: str) -> TraceMessage:
    calls = tuple(ToolUse(id=tool, name="Bash") for tool in tools)
    return TraceMessage(id=id, role="assistant", tok=tok, calls=calls)


def call(
    at: float,
    end: float,
    keep: int,
    add: list[TraceMessage],
    answer: TraceMessage,
    agent: str = "main",
    events: tuple[str, ...] = (),
    tools: tuple[ToolRun, ...] = (),
) -> TraceCall:
    return TraceCall(
        agent=agent,
        t_request=at,
        t_end=end,
        keep=keep,
        add=tuple(add),
        reply=answer,
        events=events,
        tools=tools,
    )


def session(*calls: TraceCall, agents: tuple[TraceAgent, ...] = ()) -> TraceSession:
    main = TraceAgent(id="main", hidden_tok=1000, hidden_id="hidden:made")
    return TraceSession(source="made", id="s", agents=(main, *agents), calls=calls)


TOOL = session(
    call(0, 10, 0, [user("a", 100)], reply("r1", 50, "t1"), tools=(ToolRun("t1", "Bash", 6.0),)),
    call(18, 20, 2, [user("b", 30, ("t1",))], reply("r2", 20)),
    call(120, 125, 4, [user("c", 10)], reply("r3", 5), events=("human",)),
)
EXACT = ReplayOptions(max_reply=10_000)


def test_pauses_are_scaled_and_cut_and_the_engine_takes_the_time_it_takes() -> None:
    options = ReplayOptions(gap_scale=0.5, max_gap_s=10)
    waits = [planned.waits for planned in plan_session(TOOL, "x", 1.0, options).calls]
    assert waits == [(), (Wait(0, 4.0),), (Wait(1, 10),)]


def test_life_cycle_hints_come_when_the_agent_knows() -> None:
    planned = plan_session(TOOL, "x", 1.0, EXACT).calls
    [tool], [human], [end] = (p.signals for p in planned)
    # The tool took 6 of the 8 seconds between reply and next request.
    assert (tool.kind, tool.after_s, tool.eta_s) == (SignalKind.TOOL_FINISHED, 6.0, 2.0)
    assert human.kind is SignalKind.WAITING_HUMAN and end.kind is SignalKind.END
    bare = plan_session(TOOL, "x", 1.0, ReplayOptions(hints=Hints.NONE)).calls
    assert not any(p.signals for p in bare)


def test_a_sub_agent_starts_with_its_parents_call_and_the_parent_waits_for_it() -> None:
    sub = TraceAgent(id="sub1", parent="main", spawned_by="t1", hidden_tok=500, hidden_id="hidden:own")
    recorded = session(
        call(0, 10, 0, [user("a", 1)], reply("r1", 1, "t1")),
        call(11, 15, 0, [user("sa", 1)], reply("sr1", 1), agent="sub1"),
        call(16, 19, 2, [user("sb", 1)], reply("sr2", 1), agent="sub1"),
        call(20, 22, 2, [user("b", 1, ("t1",))], reply("r2", 1)),
        agents=(sub,),
    )
    plan = plan_session(recorded, "x", 1.0, EXACT)
    assert [p.waits for p in plan.calls] == [
        (),
        (Wait(0, 1.0),),
        (Wait(1, 1.0),),
        (Wait(0, 10.0), Wait(2, 1.0)),
    ]
    assert (plan.session_id("sub1"), plan.parent_id("sub1")) == ("x:sub1", "x")
    assert (plan.session_id("main"), plan.parent_id("main")) == ("x", "x")
    assert plan.calls[1].hidden_id == "hidden:own" and plan.calls[1].hidden_tok == 500


def test_a_compaction_gets_its_summarising_call_in_the_gap_before() -> None:
    recorded = session(
        call(0, 10, 0, [user("a", 100)], reply("r1", 50)),
        call(40, 45, 0, [user("summary", 30), user("next", 5)], reply("r2", 9), events=("compact:auto",)),
    )
    first, summarising, after = plan_session(recorded, "x", 1.0, EXACT).calls
    assert [m.id for m in summarising.prompt] == ["a", "r1", COMPACT_INSTRUCTION.id]
    assert summarising.summarises and summarising.max_tokens == 30
    assert [m.id for m in after.prompt] == ["summary", "next"]
    assert summarising.waits == (Wait(0, 30.0),) and after.waits == (Wait(1, 0.0),)
    assert summarising.signals[0].kind is SignalKind.COMPACTED
    assert [p.turn for p in (first, summarising, after)] == [0, 1, 2]


@given(
    st.lists(st.tuples(st.integers(1, 60_000), st.integers(1, 4_000)), min_size=1, max_size=30),
    st.integers(1_000, 40_000),
)
def test_one_factor_fits_every_context_and_hardly_wastes_any(
    turns: list[tuple[int, int]], max_model_len: int
) -> None:
    calls, now = [], 0.0
    for index, (tok, out) in enumerate(turns):
        calls.append(call(now, now + 1, 2 * index, [user(f"u{index}", tok)], reply(f"r{index}", out)))
        now += 2
    recorded = session(*calls)
    scale = choose_scale([recorded], max_model_len, EXACT)
    plan = plan_session(recorded, "x", scale, EXACT)
    longest = 0
    for planned in plan.calls:
        tokens = planned.hidden_tok + sum(m.tok for m in planned.prompt) + planned.max_tokens
        longest = max(longest, tokens + (3 + len(planned.prompt)) * MESSAGE_OVERHEAD)
    assert longest <= max_model_len
    assert scale == 1.0 or longest > 0.9 * max_model_len - 2 * len(turns) - 64


@given(st.integers(1, 10**6), st.floats(1e-4, 1.0))
def test_lengths_are_rounded_up_and_never_vanish(tok: int, scale: float) -> None:
    assert scaled_tokens(tok, scale) >= 1
    assert tok * scale - 1e-6 <= scaled_tokens(tok, scale) < tok * scale + 1 + 1e-6


def test_a_context_that_cannot_fit_is_said() -> None:
    many = [user(f"m{i}", 1) for i in range(400)]
    with pytest.raises(ValueError, match="too many messages for a context of 1000 tokens"):
        choose_scale([session(call(0, 1, 0, many, reply("r", 1)))], 1000, EXACT)


def test_calls_per_session_can_be_limited_and_other_tenants_come_last() -> None:
    laid = overlay([TOOL, TOOL, TOOL], 3, 0, window_s=50)
    plans = plan_overlay(laid, 1.0, ReplayOptions(max_calls=2, gap_scale=0.1), "run", tenants=1)
    assert [len(plan.calls) for plan in plans] == [2, 2, 2]
    assert [plan.tenant for plan in plans] == ["default", "default", "other-1"]
    assert len({plan.id for plan in plans}) == 3
    assert all(p.start_s <= 5.0 for p in plans)
    assert all(p.calls[-1].signals[0].kind is SignalKind.END for p in plans)


def test_replies_are_capped_wherever_they_appear() -> None:
    plan = plan_session(TOOL, "x", 1.0, ReplayOptions(max_reply=8))
    assert [p.max_tokens for p in plan.calls] == [8, 8, 5]
    assert [m.tok for m in plan.calls[1].prompt] == [100, 8, 30]
    assert math.isinf(ReplayOptions().max_gap_s)
