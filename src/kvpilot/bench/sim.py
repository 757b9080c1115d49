"""How fast the simulator is: calls a minute of each policy on one core, and its memory.

CPU time of one thread, so other work on the machine hardly counts. Code is compiled (where numba is installed) before
it is measured. ``view`` is the session book finding the conversations for ``hints=none``, once for all policies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from kvpilot.replay.plan import Hints
from kvpilot.sim.jit import COMPILED
from kvpilot.sim.one_tier import Scenario
from kvpilot.sim.policies import POLICIES
from kvpilot.sim.working_set import capacity_for
from kvpilot.traces import TraceSession, overlay, read_trace, trace_name

_WARM_UP_SESSIONS = 3


def run_bench(
    path: Path,
    policies: Sequence[str],
    pressure: float,
    sessions: int | None,
    rounds: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The document. ``sessions`` None: all. Of ``rounds`` the fastest counts. Raises TraceError."""
    tell(f"{trace_name(path)}: reading")
    recorded = list(read_trace(path))
    count = min(sessions or len(recorded), len(recorded))
    _warm_up(recorded, policies)
    before = psutil.Process().memory_info().rss
    preparing, scenario = _timed(lambda: _prepared(recorded, count))
    finding, _ = _timed(lambda: scenario.events(Hints.NONE))
    scenario.events(Hints.LIFECYCLE)
    workload = scenario.workload
    capacity = capacity_for(scenario.working_set, pressure)
    speeds = {}
    for name in policies:
        run = partial(POLICIES[name].run, scenario, capacity, Hints.LIFECYCLE)
        taken = min(_timed(run)[0] for _ in range(rounds))
        speeds[name] = round(workload.calls / taken * 60)
        tell(f"{name}: {speeds[name]:,} calls a minute")
    return {
        "source": trace_name(path),
        "sessions": count,
        "calls": workload.calls,
        "prompt_chunks": int(workload.depths(workload.prompt_tip).sum()),
        "capacity_chunks": capacity,
        "pressure": pressure,
        "compiled": COMPILED,
        "prepare_s": round(preparing, 2),
        "view_s": round(finding, 2),
        "calls_per_minute": speeds,
        "memory_mb": round((psutil.Process().memory_info().rss - before) / 1e6),
    }


def _prepared(recorded: list[TraceSession], count: int) -> Scenario:
    """A scenario with all that runs share."""
    scenario = Scenario(overlay(recorded, count, seed=1))
    _ = scenario.working_set, scenario.reusable, scenario.next_uses
    return scenario


def _warm_up(recorded: list[TraceSession], policies: Sequence[str]) -> None:
    few = sorted(recorded, key=lambda session: len(session.calls))[:_WARM_UP_SESSIONS]
    scenario = _prepared(few, len(few))
    for name in policies:
        POLICIES[name].run(scenario, scenario.workload.largest_context + 1, Hints.LIFECYCLE)


def _timed(do: Callable[[], Any]) -> tuple[float, Any]:
    began = time.thread_time()
    result = do()
    return max(1e-9, time.thread_time() - began), result


def print_table(document: dict[str, Any], console: Console) -> None:
    """The document for people."""
    table = Table(
        title=f"{document['source']}: {document['calls']:,} calls, {document['prompt_chunks']:,} chunks of prompts, "
        f"pressure {document['pressure']:g}, {'compiled' if document['compiled'] else 'without numba'}"
    )
    table.add_column("policy")
    table.add_column("calls a minute", justify="right")
    for name, speed in document["calls_per_minute"].items():
        table.add_row(name, f"{speed:,}")
    console.print(table)
    console.print(
        f"once for all of them: {document['prepare_s']} s to lay out, {document['view_s']} s to find conversations; "
        f"memory {document['memory_mb']} MB"
    )
