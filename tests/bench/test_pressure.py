"""Recorded agents on an engine whose pool is too small: what is played, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvpilot.bench.pressure import (
    PressureOptions,
    bench_pressure,
    lanes_of,
    played,
    summarise,
    totals,
    verdict,
)
from kvpilot.config import Config
from kvpilot.engine.played import Agents, Call, Outcome, Row, Run, WorkingSet, text
from kvpilot.replay.plan import PlannedCall, PlannedSession, ReplayOptions, Wait
from kvpilot.traces import TraceMessage

BLOCK = 4


def call(index: int, agent: str, prompt: list[TraceMessage], reply: str, **more: bool) -> PlannedCall:
    waits = (Wait(index - 1, 0.5),) if index else ()
    said = TraceMessage(id=reply, role="assistant", tok=3)
    return PlannedCall(index, agent, index, waits, tuple(prompt), said, "system", 8, 3, **more)


def test_a_session_is_told_of_its_parent_its_compaction_and_its_end() -> None:
    user = TraceMessage(id="u", role="user", tok=5)
    reply = TraceMessage(id="r0", role="assistant", tok=3)
    session = PlannedSession(
        "s",
        "default",
        "source",
        1.5,
        (
            call(0, "main", [user], "r0"),
            call(1, "sub", [user], "r1"),
            call(2, "main", [user, reply], "summary", summarises=True),
            call(3, "main", [user], "r3"),
        ),
        {"sub": "main"},
    )
    made = played(session)
    assert [(c.session, c.parent) for c in made.calls] == [("s", "s"), ("s:sub", "s"), ("s", "s"), ("s", "s")]
    assert made.calls[2].pieces == (("system", 8), ("u", 5), ("r0", 3))
    assert [c.supersedes for c in made.calls] == [False, False, False, True]
    assert [c.last for c in made.calls] == [False, True, False, True]


def test_in_a_lane_one_session_follows_another() -> None:
    user = TraceMessage(id="u", role="user", tok=5)
    one = PlannedSession("s", "default", "source", 0.0, (call(0, "main", [user], "r0"),))
    made = lanes_of([[one, one], [one]], 3.0)
    assert [(session.start_s, session.after) for session in made] == [(0.0, None), (0.0, 0), (1.5, None)]


def test_a_prompt_holds_what_was_really_replied_and_only_that_can_be_found_again() -> None:
    agents = Agents(Run("lru", 8, 0, BLOCK, 64, ()))
    first = Call("s", "s", (), (("u", 6),), "r", 3)
    second = Call("s", "s", ((0, 0.0),), (("u", 6), ("r", 3), ("v", 2)), "r2", 3)
    prompt = agents.prompt(first)
    assert prompt == text("u", 6) == text("u", 9)[:6]
    assert agents.reusable(agents.blocks(prompt), len(prompt)) == 0
    agents.had(agents.blocks([*prompt, 7, 8]))
    agents.replied(first, [7, 8, 9])
    later = agents.prompt(second)
    assert later[6:9] == [7, 8, 9]
    assert agents.reusable(agents.blocks(later), len(later)) == 8
    assert agents.reusable(agents.blocks(later[:8]), 8) == BLOCK, "the last token is always computed"
    other = agents.prompt(msgspec.structs.replace(second, session="other"))
    assert other[6:9] == text("r", 3), "another agent's reply is not this one's"


def test_a_working_set_counts_shared_blocks_once_and_only_while_somebody_lives() -> None:
    held = WorkingSet()
    held.holds("a", [b"1", b"2"], 0.0)
    held.holds("b", [b"1", b"3"], 1.0)
    held.holds("a", [], 2.0)
    held.holds("b", [], 4.0)
    assert held.mean == pytest.approx((2 + 3 + 2 * 2) / 4)


def test_hits_are_a_share_of_what_could_be_found() -> None:
    rows = (Row(0, 0, 0.0, 0.2, 100, 0, 0), Row(0, 1, 1.0, 0.1, 120, 96, 64))
    told = totals(Outcome(rows, 2.0, 5.0))
    assert told["hit_rate"] == 1.0 and told["reusable_tokens"] == 64
    assert told["ttft_ms"] == {"p50": 150.0, "p90": 190.0}


def test_a_gain_is_one_that_every_round_shows() -> None:
    assert verdict([0.1, 0.05, 0.2]) == "gain"
    assert verdict([-0.1, -0.05]) == "loss"
    assert verdict([0.1, -0.01, 0.2]) == "neutral" == verdict([0.005, 0.004])

    def run(policy: str, rate: float, p50: float) -> dict[str, object]:
        ttft = {"p50": p50, "p90": 2 * p50}
        return {
            "pressure": 2.0,
            "reached": 2.0,
            "policy": policy,
            "blocks": 9,
            "hit_rate": rate,
            "ttft_ms": ttft,
        }

    rounds = [
        {"runs": [run("kvpilot", 0.9, 50.0), run("lru", 0.6, 100.0), run("arc", 0.95, 40.0)]}
        for _ in range(3)
    ]
    [row] = summarise(rounds, [2.0])
    assert row["kvpilot_against"]["lru"]["verdict"] == "gain"
    assert row["kvpilot_against"]["lru"]["ttft_p90"]["median"] == 0.5
    assert row["kvpilot_against"]["arc"]["verdict"] == "loss"


@pytest.mark.engine
@pytest.mark.traces
@pytest.mark.timeout(900)
def test_recorded_agents_are_played_on_the_real_engine_by_every_policy(
    engine_config: Config, traces_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPILOT_TRACES", str(traces_dir))
    options = PressureOptions(
        pressures=(2.0,),
        rounds=1,
        lanes=4,
        calls=6,
        context=1024,
        replay=ReplayOptions(gap_scale=0.01, max_gap_s=0.1, max_reply=4),
    )
    document = bench_pressure(engine_config, "m4x256", ["agentcgroup"], options, lambda line: None)
    [one] = document["traces"][0]["rounds"]
    assert one["roomy"]["hit_rate"] > 0.95, "with room for everything all is found that can be"
    assert {run["policy"] for run in one["runs"]} == {"kvpilot", "lru", "arc"}
    for run in one["runs"]:
        assert run["reusable_tokens"] > 0 and 0 < run["hit_rate"] <= 1
        assert run["ttft_ms"]["p90"] >= run["ttft_ms"]["p50"] > 0
