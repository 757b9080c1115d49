"""What a policy may know of a run under ``hints=none`` and ``hints=lifecycle``.

``none`` is what a proxy sees: prompts without ids, replies with their tool calls, times. The conversations are then
those that the session book of production finds in them. ``lifecycle`` adds the true ids and the agents' signals.
Of block recordings a proxy is taken to see whose call it is; they have no tools, so the only signal is the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvpilot.domain import SessionRef, SignalKind
from kvpilot.eval.calls import SeenCall, seen_calls
from kvpilot.eval.playing import play
from kvpilot.replay.plan import Hints
from kvpilot.sessions.book import SessionBook, Started
from kvpilot.sim.workload import Ints, Workload
from kvpilot.traces import Overlay, TraceCall, TraceMessage


@dataclass(frozen=True, slots=True)
class SeenSignal:
    """A life-cycle hint about a context, at or after the end of its call ``call``."""

    at: float
    kind: SignalKind
    context: int
    call: int


@dataclass(frozen=True, slots=True)
class View:
    """``context``: of each call, the conversation it is seen to belong to. By conversation: ``session`` it is
    part of, and ``parent``, the conversation it was started by (-1: none known)."""

    hints: Hints
    context: Ints
    session: Ints
    parent: Ints
    signals: tuple[SeenSignal, ...]

    @property
    def contexts(self) -> int:
        return len(self.session)


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the policy sees it: ``prompt`` chunks, ``tip`` is the last node.

    System prompt and tools fill the first ``head`` of them; ``added`` are the messages behind the part that the
    conversation's prompt before had."""

    index: int
    at: float
    context: int
    session: int
    parent: int
    tip: int
    prompt: int
    head: int
    tokens: int
    added: tuple[TraceMessage, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """How a request ended. ``chunks``: full ones of prompt and reply; ``message.calls`` are its tool calls."""

    at: float
    tip: int
    chunks: int
    message: TraceMessage


def view_of(workload: Workload, laid: Overlay, hints: Hints) -> View:
    """The view of a workload compiled from ``laid``. ``none`` costs a pass of the session book over all calls."""
    if hints is Hints.NONE and not _has_blocks(workload):
        return _found(laid)
    true_parents = [-1 if agent.parent is None else agent.parent for agent in workload.agents]
    return View(
        hints=hints,
        context=workload.agent,
        session=np.array([agent.session for agent in workload.agents], dtype=np.int32),
        parent=np.array(true_parents, dtype=np.int32),
        signals=tuple(sorted(_signals(workload), key=lambda s: s.at)) if hints is Hints.LIFECYCLE else (),
    )


def _has_blocks(workload: Workload) -> bool:
    return any(message.role == "block" for call in workload.recorded[:1] for message in call.add[:1])


def _signals(workload: Workload) -> Iterable[SeenSignal]:
    by_agent: dict[int, list[int]] = {}
    for index, agent in enumerate(workload.agent.tolist()):
        by_agent.setdefault(agent, []).append(index)
    blocks = _has_blocks(workload)
    for agent, indices in by_agent.items():
        for index, following in itertools.pairwise(indices):
            if not blocks:
                end, begin = float(workload.end[index]), float(workload.begin[following])
                call, after = workload.recorded[index], workload.recorded[following]
                yield from _pause_signals(agent, index, call, after, end, max(end, begin))
        last = max(indices, key=lambda index: float(workload.end[index]))
        yield SeenSignal(float(workload.end[last]), SignalKind.END, agent, last)


def _pause_signals(
    agent: int, index: int, call: TraceCall, after: TraceCall, end: float, begin: float
) -> Iterable[SeenSignal]:
    """Between two calls of an agent: tools ended, a person is asked, a compaction is announced."""
    if call.reply.calls:
        longest = max((run.duration_s or 0.0 for run in call.tools), default=0.0)
        yield SeenSignal(min(end + longest, begin), SignalKind.TOOL_FINISHED, agent, index)
    elif "human" in after.events:
        yield SeenSignal(end, SignalKind.WAITING_HUMAN, agent, index)
    if after.compacted:
        yield SeenSignal((end + begin) / 2, SignalKind.COMPACTED, agent, index)


def _found(laid: Overlay) -> View:
    """Conversations as the session book finds them, each call told from what came before it."""
    finder = _Finder()
    contexts = finder.run(list(seen_calls(laid)))
    return View(
        hints=Hints.NONE,
        context=np.array(contexts, dtype=np.int32),
        session=np.array(finder.sessions, dtype=np.int32),
        parent=np.array(finder.parents, dtype=np.int32),
        signals=(),
    )


class _Finder:
    """Runs the session book; conversations and sessions get numbers in the order in which they are found."""

    def __init__(self) -> None:
        self._threads: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._first: dict[str, int] = {}
        self.sessions: list[int] = []
        self.parents: list[int] = []

    def run(self, calls: list[SeenCall]) -> list[int]:
        """The conversation of each recorded call, in order of their beginnings."""
        found = {
            index: self._number(started)
            for index, started, begins in play(calls, SessionBook(), lambda _: SessionRef(None))
            if begins and calls[index].recorded
        }
        return [found[index] for index in sorted(found, key=lambda i: (calls[i].begin, i))]

    def _number(self, started: Started) -> int:
        owner, session = started.thread.owner, str(started.session.key)
        if owner not in self._threads:
            self._threads[owner] = len(self._threads)
            self._first.setdefault(session, self._threads[owner])
            self.sessions.append(self._numbers.setdefault(session, len(self._numbers)))
            above = str(started.session.parent) if started.session.parent is not None else None
            self.parents.append(self._first.get(above, -1) if above is not None else -1)
        return self._threads[owner]
