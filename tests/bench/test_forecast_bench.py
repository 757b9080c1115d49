"""``kvpilot bench forecast`` measures what the plan asks of forecasts."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run, kvpilot

__all__ = ["kvpilot"]


def test_every_query_is_timed(kvpilot: Run, tmp_path: Path) -> None:
    code, out, _ = kvpilot("bench", "forecast", "--conversations", "300", "--json", str(tmp_path / "f.json"))
    assert code == 0 and "what was learned takes" in out
    costs = json.loads((tmp_path / "f.json").read_text())["microseconds"]
    queries = ("forecast", "quantile", "chance within 30 s", "worth")
    assert all(costs[name] > 0.0 for name in queries)
