"""vLLM's own DRAM and disk tiers given out by sessions, in a real vLLM on the CPU platform, without a cache layer."""

from __future__ import annotations

from typing import Any

import pytest

from kvpilot.config import Config
from tests.engine.one_process import run_in_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000)]

WHOLE = 15 * 64
"""Tokens of the whole blocks of a context in ``in_process``."""


@pytest.fixture(scope="module")
def seen(engine_config: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_in_process("tiers_in_process.py", engine_config, tmp_path_factory.mktemp("plugin"))


def test_what_left_the_device_pool_is_read_back_with_the_same_answer(seen: dict[str, Any]) -> None:
    assert seen["read_back"] == {"cached": WHOLE, "in_pool": 0, "same": True, "tokens": 8}


def test_a_session_is_prefetched_from_dram_into_the_device_pool(seen: dict[str, Any]) -> None:
    scene = seen["prefetched"]
    assert (scene["outcome"]["status"], scene["outcome"]["loaded"]) == ("done", 15)
    assert scene["cached"] == WHOLE


def test_evicting_a_session_empties_dram_too(seen: dict[str, Any]) -> None:
    scene = seen["evicted"]
    assert (scene["outcome"]["status"], scene["outcome"]["dram"]) == ("done", 15)
    assert scene["cached"] == 0


def test_what_a_session_ends_with_is_not_stored(seen: dict[str, Any]) -> None:
    assert seen["what_a_session_ends_with_is_not_stored"] == {"not_stored": 15, "free": 0, "cached": 0}


def test_under_pressure_the_ended_session_goes_and_the_live_one_stays(seen: dict[str, Any]) -> None:
    assert seen["pressure"] == {"order": "sessions", "live": WHOLE, "ended": 0}


def test_where_vllms_own_order_lets_the_live_one_go(seen: dict[str, Any]) -> None:
    assert seen["pressure_stock"] == {"order": "LRUCachePolicy", "live": 0, "ended": 0}


def test_the_tiers_go_on_when_kvpilot_turns_itself_off(seen: dict[str, Any]) -> None:
    assert seen["turned_off"] == {"cached": WHOLE}


def test_no_memory_is_left_behind_however_the_engine_ends(seen: dict[str, Any]) -> None:
    assert seen["region"] == {"bytes": 200 * 64 * 4096, "named": False}


def test_an_error_of_kvpilots_leaves_the_tiers_to_vllm(seen: dict[str, Any]) -> None:
    assert seen["errors_inside"] == {"cached": [WHOLE, WHOLE], "order": "recency"}


def test_a_context_larger_than_dram_comes_from_disk_as_far_as_there_is_room(seen: dict[str, Any]) -> None:
    assert 0 < seen["disk"]["larger_than_dram"] <= 12 * 64
    assert seen["disk"]["same"]


def test_a_session_is_prefetched_from_disk_into_the_device_pool(seen: dict[str, Any]) -> None:
    outcome = seen["disk"]["prefetch"]
    assert (outcome["status"], outcome["loaded"]) == ("done", 9)
    assert seen["disk"]["small"] == 9 * 64


def test_evicting_a_session_deletes_its_files(seen: dict[str, Any]) -> None:
    outcome = seen["disk"]["evict"]
    assert (outcome["status"], outcome["dram"], outcome["disk"]) == ("done", 9, 9)
    assert seen["disk"]["evicted"] == 0


def test_the_disk_keeps_to_its_budget_also_with_what_an_earlier_run_left(seen: dict[str, Any]) -> None:
    assert seen["budget"] == {"first": {"chunks": 15, "room": 32}, "filled": 32, "files": 32}


def test_the_environment_adds_tiers_unless_a_flag_names_a_connector(seen: dict[str, Any]) -> None:
    assert seen["environment"]["chunks"] == 4096
    assert seen["environment"]["disk"] == [{"chunks": 0, "room": 8192}]
    assert seen["malformed_environment"] == {"connector": None, "cached": WHOLE}
