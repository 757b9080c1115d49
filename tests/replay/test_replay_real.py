"""Replaying a recorded session on the real engine: its compaction frees what it left behind."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from kvpilot.bench.lab import Lab, lab
from kvpilot.domain import Tier
from kvpilot.replay.client import ChatResult, Gateway
from kvpilot.replay.driver import Replayer
from kvpilot.replay.plan import Hints, ReplayOptions, choose_scale, plan_session
from kvpilot.stack.launch import Endpoints
from kvpilot.traces import read_trace

pytestmark = [pytest.mark.engine, pytest.mark.traces]

COMPACTS_EARLY = "b67cb6d008d69d77"
"""A session of entire-cli whose tenth call comes after a compaction."""
CALLS = 11
MAX_TOKENS = 4096
GONE_WITHIN_S = 5.0


class Recording(Gateway):
    """Keeps every result with its prompt's tokens and the time it ended."""

    results: list[tuple[float, ChatResult]]

    async def chat(self, *args: Any, **kwargs: Any) -> ChatResult:
        result = await super().chat(*args, **{**kwargs, "token_ids": True})
        self.results.append((time.monotonic(), result))
        return result


async def test_a_compaction_frees_what_it_left_behind_and_keeps_the_prefix(
    stack: Endpoints, traces_dir: Path
) -> None:
    [recorded] = [
        s for s in read_trace(traces_dir / "sessions/entire-cli.jsonl.gz") if s.id == COMPACTS_EARLY
    ]
    options = ReplayOptions(gap_scale=0.02, max_gap_s=1.0, max_calls=CALLS, max_reply=16)
    async with lab(stack) as room:
        scale = choose_scale([recorded], MAX_TOKENS, options)
        plan = plan_session(recorded, f"compacts-{time.time_ns()}", scale, options)
        summarising = next(call.index for call in plan.calls if call.summarises)
        gateway = Recording(room.http, stack.gateway_url, room.gateway.model)
        gateway.results = []
        replayer = Replayer(gateway, room.control, room.texts, Hints.LIFECYCLE, salt=plan.id)
        await room.control.set_mode("kvpilot")
        running = asyncio.create_task(replayer.run([plan]))
        try:
            while len(gateway.results) <= summarising + 1:
                assert not running.done() or running.result() is None
                await asyncio.sleep(0.05)
            old = room.chunks(gateway.results[summarising][1].prompt_token_ids or ())
            ended, after = gateway.results[summarising + 1]
            kept = room.chunks(after.prompt_token_ids or ())
            superseded = [chunk for chunk in old if chunk not in set(kept)]
            assert len(superseded) >= 2 and len(superseded) < len(old)
            await _gone(room, superseded, ended + GONE_WITHIN_S)
            await running
        finally:
            running.cancel()
    assert [row.error for row in replayer.rows] == [None] * len(plan.calls)
    # The hidden prefix is what both contexts share: whole chunks of it hit right after the break and later.
    prefix = 256 * (plan.calls[0].hidden_tok // 256)
    assert after.cached_tokens >= prefix > 0
    assert gateway.results[-1][1].cached_tokens >= prefix


async def _gone(room: Lab, chunks: list[bytes], until: float) -> None:
    while True:
        held = await room.held(chunks)
        if not held[Tier.HOST] and not held[Tier.DISK]:
            return
        assert time.monotonic() < until, f"still held: {held} of {len(chunks)} superseded chunks"
        await asyncio.sleep(0.1)
