"""How much KV a run has live at once, which is what a tier's capacity is measured against."""

from __future__ import annotations

import math

from kvpilot.sim.events import Event, EventKind
from kvpilot.sim.outcome import Level
from kvpilot.sim.workload import ROOT, Workload


def working_set(workload: Workload, events: list[Event]) -> float:
    """Time mean, over the run, of the distinct chunks of all live contexts.

    A context is live from its first call (a session's first: that of its main agent) to the end of the last
    recorded call of its session. O(changed nodes) per event.
    """
    references = [0] * len(workload.size)
    parent, size = workload.parent.tolist(), workload.size.tolist()
    tips = [ROOT] * len(workload.agents)
    agents_of: dict[int, list[int]] = {}
    for number, agent in enumerate(workload.agents):
        agents_of.setdefault(agent.session, []).append(number)
    session_of = [workload.agents[agent].session for agent in workload.agent.tolist()]
    left = [0] * len(workload.sessions)
    for session in session_of:
        left[session] += 1
    distinct = 0

    def refer(tip: int, by: int, above: set[int]) -> None:
        nonlocal distinct
        while tip != ROOT and tip not in above:
            was = references[tip]
            references[tip] = was + by
            if was + by == 0:
                distinct -= size[tip]
            elif was == 0:
                distinct += size[tip]
            tip = parent[tip]

    def move(agent: int, tip: int) -> None:
        common = _common(workload, tips[agent], tip)
        above = {common}
        refer(tips[agent], -1, above)
        refer(tip, 1, above)
        tips[agent] = tip

    level = Level()
    latest = [-1] * len(workload.agents)
    for event in events:
        if event.kind is EventKind.SIGNAL:
            continue
        call = event.item
        caller = int(workload.agent[call])
        if event.kind is EventKind.REQUEST:
            latest[caller] = call
            move(caller, int(workload.prompt_tip[call]))
        else:
            if latest[caller] == call:
                move(caller, int(workload.context_tip[call]))
            left[session_of[call]] -= 1
            if not left[session_of[call]]:
                for each in agents_of[session_of[call]]:
                    move(each, ROOT)
        level.set(distinct, event.at)
    return level.mean


def capacity_for(working_set_chunks: float, pressure: float) -> int:
    """Chunks of a tier that is under ``pressure`` (working set ÷ capacity)."""
    return math.floor(working_set_chunks / pressure)


def _common(workload: Workload, a: int, b: int) -> int:
    """The last node that both paths have."""
    start, parent = workload.start, workload.parent
    while a != b:
        if a == ROOT or b == ROOT:
            return ROOT
        if start[a] >= start[b]:
            a = int(parent[a])
        else:
            b = int(parent[b])
    return a
