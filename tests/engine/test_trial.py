"""vLLM's real scheduler with the plug-in, soaked in random work: nothing leaks, every hit holds what it should."""

from __future__ import annotations

import pytest

from kvpilot.bench.engine import cost, soak
from kvpilot.config import Config

pytestmark = pytest.mark.engine


def test_random_work_leaks_nothing_and_every_hit_holds_its_tokens(engine_config: Config) -> None:
    found = soak(engine_config, requests=1500, seed=3)
    assert found["requests"] >= 1500
    assert found["preempted"] > 10 and found["aborted"] > 10 and found["hits_checked"] > 1000
    assert found["slices_loaded"] > 10, "prefetches are part of it"


def test_a_step_costs_about_what_it_costs_without_the_plug_in(engine_config: Config) -> None:
    """A tripwire on a busy machine; the measurement is `kvpilot bench engine`."""
    without, with_hints = cost(engine_config, running=64, steps=384)
    assert without["ratio_of_medians"] < 1.15
    assert with_hints["ratio_of_medians"] < 1.3
