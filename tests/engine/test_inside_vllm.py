"""The plug-in in a real vLLM, in one process, without a server or a cache layer: whose blocks are reused first."""

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
    return run_in_process("in_process.py", engine_config, tmp_path_factory.mktemp("plugin"))


def test_an_unknown_version_of_vllm_is_left_alone(seen: dict[str, Any]) -> None:
    assert seen["wrong_version"] == {"patched": False}


def test_a_scheduler_named_by_a_flag_is_left_alone(seen: dict[str, Any]) -> None:
    assert seen["explicit_flag"] == {"kvpilot": False, "hit": [0, WHOLE]}


def test_sessions_outlive_strangers(seen: dict[str, Any]) -> None:
    assert seen["sessions_outlive_strangers"] == {"session": WHOLE, "stranger": 0, "free": 64}


def test_what_was_superseded_goes_first(seen: dict[str, Any]) -> None:
    assert seen["superseded_goes_first"] == {"superseded": 0, "other": WHOLE}


def test_demoted_sessions_go_before_live_ones_and_retained_ones_last(seen: dict[str, Any]) -> None:
    scene = seen["demoted_before_live_retained_last"]
    assert [(o["status"], o["confirmed"]) for o in scene["outcomes"]] == [("done", 15), ("done", 15)]
    assert scene["outcomes"][0]["id"] == "d1"
    assert scene["hits"] == {"retained": WHOLE, "demoted": 0}


def test_protection_never_keeps_a_request_from_its_blocks(seen: dict[str, Any]) -> None:
    assert seen["a_request_gets_what_it_needs"] == {"tokens": 4, "free": 64}


def test_evicting_a_session_leaves_what_another_one_needs(seen: dict[str, Any]) -> None:
    scene = seen["evicted_is_gone_but_not_what_others_need"]
    assert scene["outcome"]["status"] == "clipped"
    assert (scene["outcome"]["confirmed"], scene["outcome"]["skipped"]) == (4, 4)
    assert scene["e1"] == 4 * 64 and scene["e2"] == 8 * 64
    assert scene["again"]["status"] == "missing"


def test_a_range_of_a_context_is_evicted(seen: dict[str, Any]) -> None:
    scene = seen["a_range_is_evicted"]
    assert (scene["outcome"]["status"], scene["outcome"]["confirmed"]) == ("done", 5)
    assert scene["left"] == 5 * 64


def test_commands_that_make_no_sense_get_a_clear_answer(seen: dict[str, Any]) -> None:
    scene = seen["malformed"]
    assert "kind" in scene["kind"]["detail"]
    assert scene["unknown"]["status"] == "missing" and "not known" in scene["unknown"]["reason"]
    assert scene["prefetch"]["status"] == "rejected" and "no connector" in scene["prefetch"]["reason"]


def test_a_reset_of_the_prefix_cache_leaves_nothing_kept(seen: dict[str, Any]) -> None:
    assert seen["reset"] == {"done": True, "free": 64, "plain": 64}


def test_an_error_of_kvpilots_turns_it_off_and_fails_no_request(seen: dict[str, Any]) -> None:
    scene = seen["an_error_inside_turns_it_off"]
    assert "made to fail" in scene["off"]
    assert scene["hits"] == [0, WHOLE] and scene["free"] == 64
