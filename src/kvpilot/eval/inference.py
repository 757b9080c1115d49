"""``kvpilot eval inference``: sessions, breaks, sub-agents and pauses found without hints, scored against recordings.

The session book that serves the coordinator is given what a proxy sees: prompts and replies, no session ids, or ids
that are new for every request. Scores are F1 and accuracy, micro-averaged over a source (a trace file):

* ``sessions_f1``: over all pairs of calls, "are of the same agent context" (through compactions);
* ``prefix_break_f1``: calls whose context does not go on from the one before;
* ``subagent_f1``: over sub-agents, started by the right parent;
* ``wait_accuracy``: over pauses, told at their beginning: a tool's or a person's.

A score is None where the source has nothing to find and nothing was found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvpilot.domain import SessionRef, SessionState
from kvpilot.eval.calls import AgentKey, SeenCall, seen_calls
from kvpilot.eval.playing import play
from kvpilot.sessions.book import Change, SessionBook, SessionKey, Started
from kvpilot.traces import TraceSession, overlay


class Ids(StrEnum):
    """What requests say about their session."""

    NONE = "none"
    ROTATING = "rotating"


class Scores(msgspec.Struct, frozen=True):
    sessions_f1: float | None
    prefix_break_f1: float | None
    subagent_f1: float | None
    wait_accuracy: float | None


class SourceScores(Scores, frozen=True):
    sessions: int
    calls: int
    breaks: int
    subagents: int
    pauses: int


def score_source(
    sessions: Sequence[TraceSession], seed: int, ids: Ids, count: int | None = None
) -> SourceScores:
    """One source: ``count`` of its sessions (default all) laid over one another. Raises TraceError."""
    laid = overlay(sessions, count or len(sessions), seed)
    calls = list(seen_calls(laid))
    found = _Run(calls, ids)
    subagents = {call.agent for call in calls if call.parent is not None}
    return SourceScores(
        sessions_f1=_pairs_f1(zip((call.agent for call in calls), found.owners, strict=True)),
        prefix_break_f1=_f1(
            sum(call.breaks and broken for call, broken in zip(calls, found.broken, strict=True)),
            sum(call.breaks for call in calls),
            sum(found.broken),
        ),
        subagent_f1=_f1(found.right_parents(), len(subagents), found.children()),
        wait_accuracy=found.right_waits / found.waits if found.waits else None,
        sessions=len(laid.placed),
        calls=len(calls),
        breaks=sum(call.breaks for call in calls),
        subagents=len(subagents),
        pauses=found.waits,
    )


def report(sources: dict[str, SourceScores], seed: int, ids: Ids) -> dict[str, Any]:
    """The means over the sources where there is something to score, and each source's own scores."""
    names = Scores.__struct_fields__
    return {
        **{name: _mean(getattr(scores, name) for scores in sources.values()) for name in names},
        "seed": seed,
        "ids": ids.value,
        "by_source": {name: msgspec.to_builtins(scores) for name, scores in sources.items()},
    }


def print_table(document: dict[str, Any], console: Console) -> None:
    """The document for people."""
    names = Scores.__struct_fields__
    table = Table(title=f"found without hints (session ids: {document['ids']}, seed {document['seed']})")
    for column in ("source", "calls", *names):
        table.add_column(column, justify="left" if column == "source" else "right")
    for source, scores in document["by_source"].items():
        table.add_row(source, str(scores["calls"]), *(_shown(scores[name]) for name in names))
    table.add_row("mean", "", *(_shown(document[name]) for name in names), style="bold")
    console.print(table)


def _shown(score: float | None) -> str:
    return "–" if score is None else f"{score:.4f}"


class _Run:
    """All calls, in the order of their beginnings and ends, through a session book."""

    def __init__(self, calls: Sequence[SeenCall], ids: Ids) -> None:
        self._calls = calls
        self._book = SessionBook()
        self._ids = ids
        self._first_agent: dict[SessionKey, AgentKey] = {}
        """Found session → the agent whose call began it."""
        self._started: list[Started | None] = [None] * len(calls)
        self._person_next: dict[AgentKey, bool] = {}
        self.waits = self.right_waits = 0
        for index, started, begins in play(calls, self._book, self._ref):
            if begins:
                self._begun(index, started)
            else:
                self._ended(index, started)
        self.owners = [started.thread.owner for started in self._started if started is not None]
        self.broken = [started.change is Change.BROKEN for started in self._started if started is not None]

    def _ref(self, index: int) -> SessionRef:
        return SessionRef(f"request-{index}" if self._ids is Ids.ROTATING else None)

    def _begun(self, index: int, started: Started) -> None:
        call = self._calls[index]
        if call.after_person is not None and call.agent in self._person_next:
            self.waits += 1
            self.right_waits += call.after_person == self._person_next.pop(call.agent)
        self._started[index] = started
        self._first_agent.setdefault(started.session.key, call.agent)

    def _ended(self, index: int, started: Started) -> None:
        call = self._calls[index]
        if call.recorded:
            self._person_next[call.agent] = started.session.state is not SessionState.WAITING_TOOL

    def children(self) -> int:
        return sum(session.parent is not None for session in self._book.sessions.values())

    def right_parents(self) -> int:
        parents = {call.agent: call.parent for call in self._calls}
        right = 0
        for key, agent in self._first_agent.items():
            found = self._book.sessions[key].parent
            right += (
                found is not None
                and parents[agent] is not None
                and (self._first_agent.get(found) == parents[agent])
            )
        return right


def _pairs_f1(labels: Iterable[tuple[AgentKey, str]]) -> float | None:
    both = Counter(labels)
    true: Counter[AgentKey] = Counter()
    found: Counter[str] = Counter()
    for (agent, owner), number in both.items():
        true[agent] += number
        found[owner] += number
    return _f1(_pairs(both.values()), _pairs(true.values()), _pairs(found.values()))


def _pairs(sizes: Iterable[int]) -> int:
    return sum(size * (size - 1) // 2 for size in sizes)


def _f1(right: int, true: int, found: int) -> float | None:
    return 2 * right / (true + found) if true + found else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
