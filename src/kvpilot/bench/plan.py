"""How long a decision takes with very many sessions: ``kvpilot bench plan``.

Sessions of many tenants share system prompts and tools, each with a context of its own behind; disk holds all, host
memory a part. In each step some sessions call, others get their reply, a few end and others begin; then the planner
decides, from forecasts to moves, and the moves are carried out. A *reference* is a chunk of a session's context; chunks
of one run are one row.
Waits are drawn from kinds, as the curves of a hundred thousand sessions are learned elsewhere
(:class:`~kvpilot.forecast.waits.Waits`), and are looked up as in production.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from kvpilot import heap
from kvpilot.domain import Tier, ToolFacts
from kvpilot.forecast import prior
from kvpilot.forecast.features import Pause, pause_features
from kvpilot.forecast.waits import Waits
from kvpilot.plan.holdings import NOTHING, Holdings
from kvpilot.plan.layout import Layout
from kvpilot.plan.placement import Move, MoveKind, TierLimits, plan

_SYSTEM, _TOOLS = 40, 20
"""Chunks that all sessions of a tenant, and of a kind of agent, begin with."""
_SESSIONS_OF_KIND = 100
_KINDS = 10
_HOST_SHARE = 0.2
_CHANGES = 20
"""Sessions that call, and that get their reply, between two decisions."""
_ENDS = 2
"""Sessions that end, and that begin, between two decisions."""
_STEP_S = 0.05
_WARM_UP = 10
"""Decisions that are not counted: the first fills host memory and looks every session up."""
_TOOLS_RUN = ("Bash", "Edit", "Read", "Task", None)


def run_bench(
    sessions: int, references: int, decisions: int, seed: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The document. Times are those of one decision, wall and CPU, in milliseconds."""
    before = psutil.Process().memory_info().rss
    world = _World(sessions, references, seed)
    tell(f"{sessions:,} sessions, {world.references:,} chunk references, {world.holdings.runs:,} runs")
    for _ in range(_WARM_UP):
        world.step()
        world.carry_out(world.decide())
    wall, cpu, moved = [], [], 0
    with heap.settled():  # as in the coordinator
        for _ in range(decisions):
            world.step()
            began, began_cpu = time.perf_counter(), time.thread_time()
            moves = world.decide()
            wall.append(time.perf_counter() - began)
            cpu.append(time.thread_time() - began_cpu)
            moved += len(moves)
            world.carry_out(moves)
    return {
        "sessions": sessions,
        "references": world.references,
        "runs": world.holdings.runs,
        "decisions": decisions,
        "moves": moved,
        "wall_ms": _percentiles(wall),
        "cpu_ms": _percentiles(cpu),
        "columns_mb": round((world.holdings.nbytes + world.layout.nbytes) / 1e6),
        "memory_mb": round((psutil.Process().memory_info().rss - before) / 1e6),
    }


class _World:
    def __init__(self, sessions: int, references: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._now = 1e6
        self.holdings = Holdings()
        self.layout = Layout(self.holdings, (Tier.HOST, Tier.DISK))
        self._waits = Waits(prior.pauses())
        self._own = max(1, references // sessions - _SYSTEM - _TOOLS)
        self._kinds = [self._features(tool) for tool in _TOOLS_RUN]
        self._tools: list[int] = []
        """Runs that sessions of one kind have in common."""
        tools = NOTHING
        tenant, system = -1, NOTHING
        for session in range(sessions):
            if session % (_KINDS * _SESSIONS_OF_KIND) == 0:
                tenant += 1
                system = self._add(NOTHING, _SYSTEM, tenant)
            if session % _SESSIONS_OF_KIND == 0:
                tools = self._add(system, _TOOLS, tenant)
                self._tools.append(tools)
            self._begin(session, tools, self._now - float(self._random.exponential(200.0)))
        self._waits.tick(self._now)
        chunks = self.holdings.chunks
        own = int(chunks[self.holdings.rests_on[:sessions]].sum())
        self.references = own + sessions * (_SYSTEM + _TOOLS)
        total = int(chunks.sum())
        self._limits = (
            TierLimits(int(_HOST_SHARE * total), 40_000.0, drop_above=0.95, drop_to=0.9),
            TierLimits(2 * total, 4_000.0),
        )
        self._running: list[int] = []

    def step(self) -> None:
        """Some sessions call, others get their reply; some end, others begin."""
        self._now += _STEP_S
        self._waits.tick(self._now)
        for session in self._running:
            self.holdings.finish(session)
            self._wait(session, self._now)
        chosen = self._random.choice(self.holdings.contexts, _CHANGES + _ENDS, replace=False).tolist()
        self._running, ending = chosen[_ENDS:], chosen[:_ENDS]
        for session in self._running:
            run = int(self.holdings.rests_on[session])
            self._waits.end(session, self._now)
            self.holdings.begin(session)
            self.holdings.resize(run, int(self.holdings.chunks[run]) + 1)
            for tier in self.layout.tiers:
                for each in self.holdings.path(run):
                    self.layout.lies(each, tier, int(self.holdings.chunks[each]))
        for session in ending:
            run = int(self.holdings.rests_on[session])
            self._waits.drop(session)
            self.holdings.release(session)
            self.holdings.remove(run)
            self._begin(session, int(self._random.choice(self._tools)), self._now)

    def decide(self) -> list[Move]:
        changed = self._waits.changed(self._now)
        self.holdings.foresee(changed, self._waits.worths_of(changed))
        return plan(self.layout, self._limits, self._now)

    def carry_out(self, moves: list[Move]) -> None:
        for move in moves:
            self.layout.lies(move.run, move.tier, move.first if move.kind is MoveKind.DROP else move.end)

    def _begin(self, session: int, tools: int, since: float) -> None:
        size = max(1, int(self._random.poisson(self._own)))
        run = self._add(tools, size, int(self.holdings.tenant[tools]))
        self.holdings.rest(session, run)
        self.holdings.wish(session, kept=session % 20 == 0)
        self._wait(session, since)

    def _add(self, above: int, chunks: int, tenant: int) -> int:
        run = self.holdings.add(above, chunks, tenant)
        self.layout.lies(run, Tier.DISK, chunks)
        return run

    def _wait(self, session: int, since: float) -> None:
        self._waits.begin(session, self._kinds[int(self._random.integers(len(self._kinds)))], since)

    def _features(self, tool: str | None) -> list[str]:
        tools = [ToolFacts(tool)] if tool else []
        return pause_features(Pause(session="bench", tools=tools, reply_tokens=200))


def _percentiles(seconds: list[float]) -> dict[str, float]:
    values = np.percentile(np.array(seconds) * 1000, [50, 99, 100])
    return {name: round(float(value), 2) for name, value in zip(("p50", "p99", "max"), values, strict=True)}


def print_table(document: dict[str, Any], console: Console) -> None:
    """The document for people."""
    wall, cpu = document["wall_ms"], document["cpu_ms"]
    console.print(
        f"{document['sessions']:,} sessions, {document['references']:,} chunk references in {document['runs']:,} runs, "
        f"{document['decisions']:,} decisions with {document['moves']:,} moves:\n"
        f"a decision takes {wall['p50']} ms (p99 {wall['p99']}, longest {wall['max']}), "
        f"CPU {cpu['p50']} ms (p99 {cpu['p99']}); "
        f"memory {document['memory_mb']} MB, of it the planner's columns {document['columns_mb']} MB"
    )
