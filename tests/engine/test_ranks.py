"""Models split over several ranks: what a command says of each, whatever one of them does."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvpilot.bench.processes import free_port
from kvpilot.config import Config
from kvpilot.engine.commands import RankReport, RankState
from kvpilot.engine.ranks import Arrivals, Pulse, Rank, Ranks, complaint, judged
from tests.engine.one_process import run_in_process

WHOLE = 15
"""Whole blocks of a context in ``two_ranks_in_process``."""


def pulse(rank: int) -> tuple[Pulse, Rank]:
    address = f"tcp://127.0.0.1:{free_port()}"
    own = Pulse(rank)
    own.listen(address)
    return own, Rank(address, lambda: True)


def test_each_rank_says_how_it_is_and_one_that_does_not_is_named() -> None:
    (_, first), (busy, second) = pulse(0), pulse(1)
    go_on = threading.Event()
    working = threading.Thread(target=busy.during, args=(lambda: go_on.wait(10),))
    working.start()
    nobody = Rank(f"tcp://127.0.0.1:{free_port()}", lambda: True)
    dead = Rank(f"tcp://127.0.0.1:{free_port()}", lambda: False)
    time.sleep(0.05)
    reports = Ranks([first, second, nobody, dead]).ask()
    go_on.set()
    working.join()
    assert [report.state for report in reports] == ["ok", "ok", "silent", "dead"]
    assert reports[0].busy_s == 0 and reports[1].busy_s >= 0.05
    assert complaint(reports) == "rank 2 does not answer, rank 3 has died"
    assert Ranks([first, dead]).died() and not Ranks([first, nobody]).died()


def test_a_rank_is_late_when_others_are_done_and_not_when_all_work() -> None:
    done, long = RankReport(0), RankReport(1, busy_s=30.0)
    assert [report.state for report in judged([done, long])] == [RankState.OK, RankState.LATE]
    assert complaint(judged([RankReport(0, busy_s=30.0), long])) == ""


def test_a_load_is_noted_rank_by_rank() -> None:
    def said(*names: str, bad: tuple[int, ...] = ()) -> Any:
        told = SimpleNamespace(finished_recving=set(names), invalid_block_ids=set(bad))
        return SimpleNamespace(kv_connector_output=told)

    arrivals = Arrivals()
    arrivals.heard([said("load-1", "r7"), None], "load-")
    assert arrivals.of("load-1") == {0} and arrivals.of("r7") == set()
    arrivals.heard([said(), said("load-1", bad=(5,))], "load-")
    assert arrivals.take("load-1", {4, 5}) == {0}, "rank 1 could not fill block 5"
    assert arrivals.of("load-1") == set()


@pytest.fixture(scope="module")
def seen(engine_config: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    port = f"tcp://127.0.0.1:{free_port()}"
    folder = tmp_path_factory.mktemp("plugin")
    return run_in_process("two_ranks_in_process.py", engine_config, folder, KVPILOT_PORT=port)


@pytest.mark.engine
@pytest.mark.timeout(1000)
def test_a_prefetch_and_an_eviction_reach_both_ranks(seen: dict[str, Any]) -> None:
    scene = seen["reach_both"]
    outcome = scene["prefetched"]
    assert (outcome["id"], outcome["status"], outcome["confirmed"]) == ("mine", "done", WHOLE)
    assert outcome["loaded"] > 0
    assert [(rank["rank"], rank["loaded"]) for rank in outcome["ranks"]] == [
        (0, outcome["loaded"]),
        (1, outcome["loaded"]),
    ]
    assert scene["cached"] == WHOLE * 64
    assert (scene["evicted"]["status"], scene["cached_after"]) == ("done", 0)
    assert scene["same"], "what both ranks loaded is what they had computed"


@pytest.mark.engine
def test_a_rank_that_stands_still_is_named_and_what_it_was_told_is_done_later(seen: dict[str, Any]) -> None:
    scene = seen["slow"]
    outcome = scene["outcome"]
    assert (outcome["kind"], outcome["id"], outcome["status"]) == ("prefetch", "mine", "failed")
    assert "rank 1 does not answer" in outcome["reason"]
    assert [rank.get("state", "ok") for rank in outcome["ranks"]] == ["ok", "silent"]
    assert outcome["took_s"] < 10
    assert scene["after"]["active"] and not scene["after"]["prefetch"]["busy"]
    assert scene["cached"] == WHOLE * 64


@pytest.mark.engine
def test_a_rank_that_dies_is_named_and_nothing_hangs(seen: dict[str, Any]) -> None:
    scene = seen["killed"]
    assert scene["outcome"]["status"] == "failed"
    assert "rank 1 has died" in scene["outcome"]["reason"]
    assert [rank.get("state", "ok") for rank in scene["outcome"]["ranks"]][1] == "dead"
    assert scene["outcome"]["took_s"] < 10
    assert scene["error"] is not None and scene["took_s"] < 30
