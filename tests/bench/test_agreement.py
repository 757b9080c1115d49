"""What the comparison of simulator and real stack says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from kvpilot.bench.agreement import (
    LONGEST_CONTEXT,
    SCENARIOS,
    ModeRow,
    RealRun,
    Scenario,
    chosen,
    document,
    mode_row,
    plan,
    print_report,
    ranking,
)
from kvpilot.bench.lab import EngineHits
from kvpilot.replay.driver import TurnRow
from kvpilot.sim.stack import StackOutcome


def row(mode: str, real: int, simulated: int, scenario: str = "disk-bound") -> ModeRow:
    return ModeRow(scenario, mode, 10, 0, 2000, 2000, real, simulated, real // 2, simulated // 2, 0.5, 0.4)


def test_it_agrees_when_hits_are_close_and_the_same_mode_is_ahead() -> None:
    found = document([row("passive", 1000, 1010), row("kvpilot", 1200, 1190)])
    assert found["agrees"]
    assert found["rankings"] == {"disk-bound": {"real": "kvpilot", "simulated": "kvpilot", "agree": True}}
    assert [row["ratio"] for row in found["rows"]] == [1.01, 0.9917]


@pytest.mark.parametrize("simulated", [(1000, 980), (1000, 1250)], ids=["other order", "too many hits"])
def test_it_does_not_when_either_is_missing(simulated: tuple[int, int]) -> None:
    assert not document([row("passive", 1000, simulated[0]), row("kvpilot", 1200, simulated[1])])["agrees"]


def test_a_difference_below_a_hundredth_is_none() -> None:
    assert ranking({"passive": 1000, "kvpilot": 1009}) == "same"
    assert ranking({"passive": 1020, "kvpilot": 1000}) == "passive"
    assert ranking({"passive": 0, "kvpilot": 0}) == "same"


def test_requests_that_failed_are_counted_and_not_compared() -> None:
    turns = [
        TurnRow("s", "main", turn, "default", 0.0, 100, 95, 0, 64, 500.0, 900.0, status, error=error)
        for turn, (status, error) in enumerate([(200, None), (500, "no"), (200, None)])
    ]
    found = np.array([0, 64])
    made = mode_row(
        "x", "passive", RealRun((), tuple(turns), EngineHits(64, 64)), StackOutcome(found, found, found / 64)
    )
    assert (made.calls, made.failed, made.real_hits, made.prompt_tokens) == (3, 1, 128, 200)
    assert made.real_ttft == 0.5


def test_scenarios_are_chosen_by_name() -> None:
    assert [scenario.name for scenario in chosen("sub-agents, device-bound")] == [
        "device-bound",
        "sub-agents",
    ]
    assert chosen(None) == list(SCENARIOS.values())
    for wrong in ("nosuch", ""):
        with pytest.raises(ValueError, match="there are device-bound"):
            chosen(wrong)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_every_scenario_is_a_replay_of_a_minute_or_two(
    scenario: Scenario, traces_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPILOT_TRACES", str(traces_dir))
    calls = [call for session in plan(scenario, LONGEST_CONTEXT, "r") for call in session.calls]
    assert 60 <= len(calls) <= 200
    largest = max(call.hidden_tok + sum(m.tok for m in call.prompt) for call in calls)
    assert LONGEST_CONTEXT * 0.8 < largest < LONGEST_CONTEXT
    assert (scenario.name == "compaction") <= any(call.summarises for call in calls)
    assert (scenario.name == "sub-agents") <= (len({(call.hidden_id, call.agent) for call in calls}) > 12)


def test_the_table_says_where_they_disagree() -> None:
    console = Console(record=True, width=140)
    print_report(document([row("passive", 1000, 1000), row("kvpilot", 1200, 900)]), console)
    said = console.export_text()
    assert "0.750" in said
    assert "disk-bound: finds more, real: kvpilot, simulated: passive (DISAGREE)" in said
