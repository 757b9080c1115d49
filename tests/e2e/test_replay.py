"""Recorded agents on the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpilot.replay.plan import Hints, ReplayOptions, choose_scale, plan_session
from kvpilot.replay.run import Where, replay_sessions
from kvpilot.replay.text import TextMaker
from kvpilot.stack.launch import Endpoints
from kvpilot.traces import read_trace

pytestmark = [pytest.mark.engine, pytest.mark.traces, pytest.mark.timeout(900)]

CALLS = 13
"""Enough for a compaction of this kind and two calls on the new context."""


def test_a_compaction_of_a_recorded_agent_is_gone_from_every_tier_within_five_seconds(
    stack: Endpoints, traces_dir: Path
) -> None:
    engine = stack.config.engine
    texts = TextMaker.load(engine.tokenizer)
    options = ReplayOptions(
        hints=Hints.LIFECYCLE, gap_scale=0.001, max_gap_s=1.0, max_calls=CALLS, max_reply=8
    )
    session = next(
        session
        for session in read_trace(traces_dir / "sessions" / "entire-cli.jsonl.gz", texts.count)
        if any(call.compacted for call in session.calls[2 : CALLS - 2])
    )
    scale = choose_scale([session], engine.max_model_len, options, texts.carries_tools)
    where = Where(
        stack.gateway_url, stack.control_url, engine.served_model_name, engine.tokenizer, engine.max_model_len
    )
    replayer, _ = replay_sessions(
        [plan_session(session, "recorded", scale, options)], where, "kvpilot", options, texts
    )
    assert [row.error for row in replayer.rows if row.error] == []
    assert replayer.compactions is not None
    rows = replayer.compactions.rows
    assert rows
    for row in rows:
        assert row.superseded_chunks > 0
        assert row.gone_after_s is not None and row.gone_after_s <= 5.0
        assert row.kept_chunks > 0
        assert row.cached_tokens >= 256 * row.kept_chunks - 256
