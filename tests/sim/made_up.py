"""Small sessions made up for tests of the simulator: agents of any shape over few texts, so that they share much."""

from __future__ import annotations

from hypothesis import strategies as st

from kvpilot.sim.one_tier import Pin, Scenario
from kvpilot.traces import Overlay, Placed, TraceAgent, TraceCall, TraceMessage, TraceSession

CHUNK = 4
"""Tokens; texts of up to 12 tokens make contexts of a few chunks."""


def message(text: int, role: str = "user") -> TraceMessage:
    """Text ``text``: its length follows from it, as the same id is the same text."""
    return TraceMessage(id=f"t{text}", role=role, tok=1 + 5 * text % 12)


_texts = st.integers(0, 9)


@st.composite
def sessions(draw: st.DrawFn, number: int = 0) -> TraceSession:
    """One agent's calls, which go on, go back, and break off; some at the same moment."""
    calls = []
    held, now = 0, 0.0
    for index in range(draw(st.integers(1, 6))):
        now += draw(st.sampled_from((0.0, 0.5, 3.0, 40.0)))
        keep = draw(st.one_of(st.just(held), st.integers(0, held)))
        add = tuple(message(text) for text in draw(st.lists(_texts, min_size=index == 0, max_size=3)))
        end = now + draw(st.sampled_from((0.0, 1.0, 5.0)))
        calls.append(
            TraceCall(
                agent="main",
                t_request=now,
                t_end=end,
                keep=keep,
                add=add,
                reply=message(draw(_texts), "assistant"),
            )
        )
        held = keep + len(add) + 1
        now = end
    agent = TraceAgent(id="main", hidden_tok=draw(st.sampled_from((0, 6, 11))), hidden_id="hidden")
    return TraceSession(
        source="made-up", id=f"s{number}", agents=(agent,), calls=tuple(calls), chunk_tokens=CHUNK
    )


@st.composite
def overlays(draw: st.DrawFn) -> Overlay:
    """A few sessions that start at different moments."""
    count = draw(st.integers(1, 6))
    starts = sorted(draw(st.sampled_from((0.0, 0.5, 1.0, 7.0, 30.0))) for _ in range(count))
    placed = tuple(Placed(draw(sessions(number)), start) for number, start in enumerate(starts))
    return Overlay(placed, window_s=30.0, gaps_cut=0)


def scenarios() -> st.SearchStrategy[Scenario]:
    return st.builds(Scenario, overlays(), st.sampled_from(list(Pin)))
