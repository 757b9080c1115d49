"""What a forecast costs, in CPU time of one core: each operation over many conversations, µs apiece."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvpilot.domain import ToolFacts
from kvpilot.forecast import Forecaster
from kvpilot.forecast.calibration import Intervals
from kvpilot.forecast.memory import pack

TURNS = 3
"""Requests of each conversation, so that there is something to know of it."""
TOOLS = (
    ToolFacts("Bash", program="pytest … tail", timeout_s=120.0),
    ToolFacts("Read"),
    ToolFacts("Task", agent=True),
    ToolFacts("Bash", program="git diff"),
)


def measure(conversations: int) -> dict[str, Any]:
    """``microseconds`` by operation; size of what was learned in bytes."""
    forecaster = Forecaster(intervals=Intervals())
    owners = range(conversations)
    now = 1e9

    def begin(owner: int) -> None:
        forecaster.request(
            owner, now, session=f"t/s{owner % 97}", conversation=f"c{owner}", child=False, added_tokens=300
        )

    def end(owner: int) -> None:
        forecaster.reply(owner, now, [TOOLS[owner % len(TOOLS)]], 200)

    costs: dict[str, float] = {}
    for _ in range(TURNS):
        costs["request begins"] = _each(begin, owners)
        now += 2.0
        costs["reply ends"] = _each(end, owners)
        now += 3.0
    found = [forecaster.forecast(owner, now) for owner in owners]
    waits = [forecast for forecast in found if forecast is not None]
    costs["forecast"] = _each(lambda owner: forecaster.forecast(owner, now), owners)
    costs["quantile"] = _each(lambda n: waits[n].quantile(0.25), range(len(waits)))
    costs["chance within 30 s"] = _each(lambda n: waits[n].within(30.0), range(len(waits)))
    costs["worth"] = _each(lambda owner: forecaster.worth(owner, now), owners)
    costs["worths of all"] = _each(lambda n: forecaster.worths(now + n), range(100))
    return {
        "conversations": conversations,
        "microseconds": {name: round(cost, 1) for name, cost in costs.items()},
        "memory_bytes": len(msgspec.msgpack.encode(pack(forecaster))),
    }


def _each(work: Callable[[int], object], over: range) -> float:
    began = time.process_time()
    for item in over:
        work(item)
    return (time.process_time() - began) / max(1, len(over)) * 1e6


def print_table(document: Mapping[str, Any], console: Console) -> None:
    """The document for people."""
    table = Table(title=f"forecasts of {document['conversations']} conversations")
    table.add_column("operation")
    table.add_column("µs", justify="right")
    for name, cost in document["microseconds"].items():
        table.add_row(name, f"{cost:.1f}")
    console.print(table)
    console.print(f"what was learned takes {document['memory_bytes'] / 1e6:.1f} MB in the store")
