"""How recorded contexts become chunks."""

from __future__ import annotations

from hypothesis import given, settings
from tests.sim.made_up import CHUNK, overlays

from kvpilot.sim.events import events
from kvpilot.sim.working_set import working_set
from kvpilot.sim.workload import compile_workload
from kvpilot.traces import Overlay, Placed, TraceAgent, TraceCall, TraceMessage, TraceSession


def _tokens(hidden: TraceAgent, messages: tuple[TraceMessage, ...]) -> list[tuple[str, int]]:
    texts = [(hidden.hidden_id, hidden.hidden_tok), *((m.id, m.tok) for m in messages)]
    return [(text, i) for text, tok in texts for i in range(tok)]


@given(laid=overlays())
@settings(max_examples=100)
def test_equal_prefixes_and_nothing_else_are_the_same_chunks(laid: Overlay) -> None:
    workload = compile_workload(laid)
    contexts = []
    for placed in laid.placed:
        for call, prompt in placed.session.prompts():
            tokens = _tokens(placed.session.agents[0], prompt)
            whole = tokens + [(call.reply.id, i) for i in range(call.reply.tok)]
            contexts.append((placed.start + call.t_request, tokens, whole))
    contexts.sort(key=lambda row: row[0])
    content: dict[tuple[int, int], tuple[tuple[str, int], ...]] = {}
    for index, (begin, tokens, whole) in enumerate(contexts):
        assert workload.begin[index] == begin
        assert workload.prompt_tokens[index] == len(tokens)
        for tip, text in ((workload.prompt_tip[index], tokens), (workload.context_tip[index], whole)):
            assert workload.depth(int(tip)) == len(text) // CHUNK
            for node in workload.path(int(tip)):
                for chunk in range(workload.start[node], workload.start[node] + workload.size[node]):
                    prefix = tuple(text[: (chunk + 1) * CHUNK])
                    assert content.setdefault((node, int(chunk)), prefix) == prefix
    assert len(set(content.values())) == len(content) == workload.distinct_chunks


def _agent(start: float, *calls: tuple[float, float, int], session: str = "s") -> Placed:
    """Calls as (request, end, tokens the prompt adds); every session has texts of its own."""
    made = tuple(
        TraceCall(
            agent="main",
            t_request=begin,
            t_end=end,
            keep=2 * turn,
            add=(TraceMessage(f"{session}{turn}", "user", added),),
            reply=TraceMessage(f"{session}r{turn}", "assistant", CHUNK),
        )
        for turn, (begin, end, added) in enumerate(calls)
    )
    return Placed(TraceSession("made-up", session, (TraceAgent("main"),), made, chunk_tokens=CHUNK), start)


def test_the_working_set_is_what_is_live_over_time() -> None:
    # 10 chunks for 10 s, then 11 until the second call at 20 s, then 16, at its end 17 for no time: it is the last.
    laid = Overlay((_agent(0.0, (0.0, 10.0, 10 * CHUNK), (20.0, 40.0, 5 * CHUNK)),), 0.0, 0)
    workload = compile_workload(laid)
    assert working_set(workload, events(workload)) == (10 * 10 + 11 * 10 + 16 * 20) / 40


def test_what_two_live_contexts_share_counts_once() -> None:
    one = _agent(0.0, (0.0, 10.0, 8 * CHUNK), session="s")
    workload = compile_workload(Overlay((one, one), 0.0, 0))
    assert working_set(workload, events(workload)) == 8
