"""A replay as a recording: what the simulator is given must be what the engine saw."""

from __future__ import annotations

from kvpilot.domain import SignalKind
from kvpilot.replay.as_recorded import around, as_recorded
from kvpilot.replay.driver import TurnRow
from kvpilot.replay.plan import Hints, PlannedSession, ReplayOptions, plan_session
from kvpilot.sim.view import view_of
from kvpilot.sim.workload import compile_workload
from kvpilot.traces import ToolRun, ToolUse, TraceAgent, TraceCall, TraceMessage, TraceSession


def message(id: str, tok: int, role: str = "user", tool: bool = False) -> TraceMessage:
    return TraceMessage(id=id, role=role, tok=tok, calls=(ToolUse("t", "Bash"),) if tool else ())


def call(
    at: float, keep: int, add: list[TraceMessage], answer: TraceMessage, agent: str = "main", event: str = ""
) -> TraceCall:
    return TraceCall(
        agent=agent,
        t_request=at,
        t_end=at + 1,
        keep=keep,
        add=tuple(add),
        reply=answer,
        events=(event,) if event else (),
        tools=(ToolRun("t", "Bash", duration_s=3.0),) if answer.calls else (),
    )


AGENT = TraceSession(
    source="made-up",
    id="s",
    agents=(TraceAgent("main", hidden_tok=100, hidden_id="hidden"), TraceAgent("sub", parent="main")),
    calls=(
        call(0.0, 0, [message("ask", 500)], message("a0", 20, "assistant", tool=True)),
        call(5.0, 0, [message("task", 300)], message("b0", 20, "assistant"), agent="sub"),
        call(10.0, 2, [message("result", 400)], message("a1", 20, "assistant")),
        call(20.0, 0, [message("summary", 200)], message("a2", 20, "assistant"), event="compact:auto"),
    ),
)


def planned(id: str = "r-0") -> PlannedSession:
    return plan_session(AGENT, id, 0.5, ReplayOptions(max_reply=64))


def rows(session: PlannedSession, start: float = 0.0, took_ms: float = 500.0) -> list[TurnRow]:
    return [
        TurnRow(
            session.id,
            call.agent,
            call.turn,
            "default",
            start + 4.0 * call.index,
            0,
            0,
            0,
            0,
            1.0,
            took_ms,
            200,
        )
        for call in session.calls
    ]


def test_prompts_have_the_lengths_of_the_replay_with_its_template() -> None:
    session = planned()
    workload = compile_workload(as_recorded([session], rows(session)))
    expected = []
    for call in session.calls:
        hidden = call.hidden_tok + around("system") if call.hidden_tok else 0
        expected.append(hidden + sum(m.tok + around(m.role) for m in call.prompt))
    assert workload.prompt_tokens.tolist() == expected


def test_calls_come_and_go_when_they_were_played() -> None:
    session = planned()
    workload = compile_workload(as_recorded([session], rows(session, start=7.0)))
    assert workload.begin.tolist() == [7.0, 11.0, 15.0, 19.0, 23.0]
    assert (workload.end - workload.begin).round(6).tolist() == [0.5] * 5


def test_what_was_not_played_is_left_out() -> None:
    session = planned()
    assert len(as_recorded([session], rows(session)[:2]).calls()) == 2
    assert as_recorded([session], []).placed == ()


def test_a_conversation_goes_on_from_its_own_reply_and_breaks_off_at_its_compaction() -> None:
    session = planned()
    [placed] = as_recorded([session], rows(session)).placed
    main = [call for call in placed.session.calls if call.agent == "main"]
    # ask, reply | + result, reply | + instruction of the summarising call | the summary alone
    assert [call.keep for call in main] == [0, 2, 4, 0]
    assert [call.compacted for call in main] == [False, False, False, True]


def test_sessions_share_what_they_begin_with_but_not_what_the_engine_replied() -> None:
    sessions = [planned("r-0"), planned("r-1")]
    played = [*rows(sessions[0]), *rows(sessions[1], start=100.0)]
    first, second = (placed.session.calls for placed in as_recorded(sessions, played).placed)
    assert first[0].add == second[0].add
    assert first[0].reply.id != second[0].reply.id


def test_the_signals_of_the_plan_come_when_they_were_sent() -> None:
    session = planned()
    laid = as_recorded([session], rows(session))
    signals = view_of(compile_workload(laid), laid, Hints.LIFECYCLE).signals
    finished = [signal for signal in signals if signal.kind is SignalKind.TOOL_FINISHED]
    # Sent three seconds after the reply, which was complete half a second after the request.
    assert [signal.at for signal in finished] == [3.5]
    assert sum(signal.kind is SignalKind.END for signal in signals) == 2


def test_a_reply_whose_text_comes_back_shorter_is_another_message_from_then_on() -> None:
    session = planned()
    plan = rows(session)
    workload = compile_workload(as_recorded([session], plan))
    counted = []
    shorter = 0
    for row, call, tokens in zip(plan, session.calls, workload.prompt_tokens.tolist(), strict=True):
        # The first reply of the main agent comes back as four tokens less, up to the compaction.
        shorter = 4 if call.agent == "main" and call.turn in (1, 2) else 0
        counted.append(tokens + 4 - shorter)
        row.prompt_tokens = counted[-1]
    laid = as_recorded([session], plan)
    main = [call for call in laid.placed[0].session.calls if call.agent == "main"]
    assert [call.keep for call in main] == [0, 1, 4, 0]
    assert compile_workload(laid).prompt_tokens.tolist() == [tokens - 4 for tokens in counted]
