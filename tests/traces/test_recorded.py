"""The readers on the real recordings, where they are present (KVPILOT_TRACES, default ../shared/traces)."""

from __future__ import annotations

import pytest

from kvpilot.traces import find_trace, overlay, read_trace, traces_folder

pytestmark = [
    pytest.mark.traces,
    pytest.mark.skipif(not traces_folder().is_dir(), reason=f"no recorded traces in {traces_folder()}"),
]


@pytest.mark.parametrize(
    ("name", "sessions", "calls"),
    [
        ("sessions/agentcgroup", 119, 5396),
        ("sessions/agentv-codex", 13, 1547),
        ("blocks/kv-cache-tester", 440, 29611),
        ("blocks/mooncake-synthetic", 3993, 3993),
        ("text/miniswe", 20, 402),
        ("text/tau-bench-airline", 200, 2454),
    ],
)
def test_every_recorded_call_is_read(name: str, sessions: int, calls: int) -> None:
    counts = [len(session.calls) for session in read_trace(find_trace(name))]
    assert (len(counts), sum(counts)) == (sessions, calls)


def test_compactions_and_sub_agents_of_entire_cli() -> None:
    sessions = list(read_trace(find_trace("sessions/entire-cli")))
    assert sum(call.compacted for s in sessions for call in s.calls) == 58
    assert sum(agent.parent is not None for s in sessions for agent in s.agents) == 111
    assert len({s.agent("main").hidden_id for s in sessions}) == 1
    laid = overlay(sessions, 8, 1)
    assert len(laid.placed) == 8 and laid.window_s > 0
