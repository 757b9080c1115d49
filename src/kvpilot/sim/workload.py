"""Recorded sessions laid over one another, compiled for simulation: calls in time order over a tree of KV.

Contexts are paths in a prefix tree. A *chunk* is a full run of ``chunk_tokens`` tokens (a partial last one is no
chunk); it follows its content: equal token prefixes are the same chunk, whichever session or agent has them. A
*node* is a run of chunks that every context of the run has either whole or not at all, so a call's prompt is named
by its last node, and a call that goes on from the one before differs from it by a few nodes at the end.

Recordings of blocks do not tell the blocks of a reply: there replies add nothing to the context.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpilot.traces import Overlay, TraceAgent, TraceCall, TraceSession

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

ROOT = -1
"""The empty context."""
INSTANT_S = 1e-6
"""What a call takes at least: it ends after it began."""


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent context of the run; ``session`` and ``parent`` are indices (parent: an agent, or None)."""

    session: int
    parent: int | None
    recorded: TraceAgent


@dataclass(frozen=True, slots=True)
class Workload:
    """All calls of a run in order of their requests, over the tree of all KV. Times are seconds of the overlay.

    Tree (by node): ``parent`` (ROOT above the first), ``size`` in chunks, ``start`` = chunks in front of it.
    Calls: ``prompt_tip`` is the last node of the prompt's full chunks, ``context_tip`` that of prompt and reply
    (ROOT when there is none).
    """

    source: str
    chunk_tokens: int
    parent: Ints
    size: Ints
    start: Ints
    begin: Floats
    end: Floats
    agent: Ints
    prompt_tip: Ints
    context_tip: Ints
    prompt_tokens: npt.NDArray[np.int64]
    agents: tuple[Agent, ...]
    sessions: tuple[TraceSession, ...]
    recorded: tuple[TraceCall, ...]

    @property
    def calls(self) -> int:
        return len(self.begin)

    def depth(self, node: int) -> int:
        """Chunks of the context that ends with ``node``, in O(1)."""
        return 0 if node == ROOT else int(self.start[node] + self.size[node])

    def depths(self, tips: Ints) -> Ints:
        """``depth`` of each of ``tips``."""
        # ROOT is -1, the place behind the last node.
        return np.append(self.start + self.size, 0)[tips].astype(np.int32)

    @property
    def largest_context(self) -> int:
        """Chunks of the largest single context."""
        return int(self.depths(self.context_tip).max(initial=0))

    @property
    def distinct_chunks(self) -> int:
        return int(self.size.sum())

    def path(self, tip: int, above: int = ROOT) -> list[int]:
        """The nodes of the context that ends with ``tip``, first to last, from behind ``above`` on."""
        nodes = []
        parent = self.parent
        while tip not in (above, ROOT):
            nodes.append(tip)
            tip = int(parent[tip])
        return nodes[::-1]


def compile_workload(laid: Overlay) -> Workload:
    """The workload of an overlay. O(new messages and chunks), not O(prompt lengths)."""
    trie = _ChunkTrie()
    agents: list[Agent] = []
    index: dict[tuple[int, str], int] = {}
    contexts: list[_Context] = []
    rows: list[tuple[float, float, int, int, int, int, TraceCall]] = []
    for number, placed in enumerate(laid.placed):
        session = placed.session
        for recorded in session.agents:
            index[number, recorded.id] = len(agents)
            parent = index.get((number, recorded.parent)) if recorded.parent is not None else None
            agents.append(Agent(number, parent, recorded))
            contexts.append(_Context(trie, session.chunk_tokens, recorded))
        for call in session.calls:
            agent = index[number, call.agent]
            prompt_tip, context_tip, tokens = contexts[agent].call(call)
            begin = placed.start + call.t_request
            end = begin + max(INSTANT_S, call.t_end - call.t_request)
            rows.append((begin, end, agent, prompt_tip, context_tip, tokens, call))
    rows.sort(key=lambda row: row[0])
    cut_after = {row[3] for row in rows} | {row[4] for row in rows}
    node_of, parents, sizes, starts = trie.nodes(cut_after)
    begins, ends, of_agents, prompt_tips, context_tips, tokens_of, recorded_calls = (
        zip(*rows, strict=True) if rows else ((),) * 7
    )
    granularities = {placed.session.chunk_tokens for placed in laid.placed}
    if len(granularities) > 1:
        raise ValueError(f"recordings of different chunk sizes {sorted(granularities)} cannot share a cache")
    sources = dict.fromkeys(placed.session.source for placed in laid.placed)
    return Workload(
        source="+".join(sources),
        chunk_tokens=granularities.pop() if granularities else 256,
        parent=parents,
        size=sizes,
        start=starts,
        begin=np.array(begins, dtype=np.float64),
        end=np.array(ends, dtype=np.float64),
        agent=np.array(of_agents, dtype=np.int32),
        prompt_tip=_of(node_of, prompt_tips),
        context_tip=_of(node_of, context_tips),
        prompt_tokens=np.array(tokens_of, dtype=np.int64),
        agents=tuple(agents),
        sessions=tuple(placed.session for placed in laid.placed),
        recorded=tuple(recorded_calls),
    )


def _of(node_of: list[int], chunks: Iterable[int]) -> Ints:
    return np.array([ROOT if chunk == ROOT else node_of[chunk] for chunk in chunks], dtype=np.int32)


class _ChunkTrie:
    """Every distinct chunk of the run; a chunk's id is greater than its parent's."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self._ids: dict[tuple[int, object], int] = {}
        self._texts: dict[tuple[str, int | None], int] = {}

    def text(self, message_id: str, tok: int | None = None) -> int:
        """A number that stands for this text, or, without ``tok``, for the beginning of it and any longer one."""
        return self._texts.setdefault((message_id, tok), len(self._texts))

    def chunk(self, parent: int, content: object) -> int:
        """``content``: the texts that lie in the chunk, which after equal parents decide on all its tokens."""
        key = (parent, content)
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = len(self.parent)
            self.parent.append(parent)
        return found

    def nodes(self, cut_after: set[int]) -> tuple[list[int], Ints, Ints, Ints]:
        """Node of each chunk; parent, size and start of each node. Nodes end at forks and at ``cut_after``."""
        children = [0] * len(self.parent)
        for parent in self.parent:
            if parent != ROOT:
                children[parent] += 1
        node_of: list[int] = []
        parents: list[int] = []
        sizes: list[int] = []
        starts: list[int] = []
        for parent in self.parent:
            if parent != ROOT and children[parent] == 1 and parent not in cut_after:
                node = node_of[parent]
                sizes[node] += 1
            else:
                node = len(parents)
                above = node_of[parent] if parent != ROOT else ROOT
                parents.append(above)
                sizes.append(1)
                # The node above is complete: its last chunk is `parent`, whose children come later.
                starts.append(starts[above] + sizes[above] if above != ROOT else 0)
            node_of.append(node)
        as_ints = (np.array(values, dtype=np.int32) for values in (parents, sizes, starts))
        return (node_of, *as_ints)  # type: ignore[return-value]


class _Context:
    """One agent's context while it grows: texts with their ends in tokens, and the chunks they fill."""

    def __init__(self, trie: _ChunkTrie, chunk_tokens: int, agent: TraceAgent) -> None:
        self._trie, self._size = trie, chunk_tokens
        self._texts: list[int] = []
        self._begins_with: list[int] = []
        self._ends: list[int] = []
        self._chunks: list[int] = []
        self._hidden = 0
        self._blocks = False
        if agent.hidden_tok:
            self._hidden = 1
            self._append(agent.hidden_id, agent.hidden_tok)

    def call(self, call: TraceCall) -> tuple[int, int, int]:
        """Last chunk of the prompt, last chunk of prompt and reply, tokens of the prompt."""
        kept = self._hidden + call.keep
        del self._texts[kept:], self._begins_with[kept:], self._ends[kept:]
        tokens = self._ends[-1] if self._ends else 0
        del self._chunks[tokens // self._size :]
        for message in call.add:
            self._append(message.id, message.tok)
            self._blocks |= message.role == "block"
        self._fill()
        prompt_tip = self._chunks[-1] if self._chunks else ROOT
        tokens = self._ends[-1] if self._ends else 0
        if self._blocks:
            return prompt_tip, prompt_tip, tokens
        self._append(call.reply.id, call.reply.tok)
        self._fill()
        return prompt_tip, self._chunks[-1] if self._chunks else ROOT, tokens

    def _append(self, message_id: str, tok: int) -> None:
        self._texts.append(self._trie.text(message_id, tok))
        self._begins_with.append(self._trie.text(message_id))
        self._ends.append((self._ends[-1] if self._ends else 0) + tok)

    def _fill(self) -> None:
        """The chunks that have become full."""
        texts, ends, chunks, size = self._texts, self._ends, self._chunks, self._size
        total = ends[-1] if ends else 0
        tip = chunks[-1] if chunks else ROOT
        first = bisect_right(ends, len(chunks) * size)
        for stop in range((len(chunks) + 1) * size, total + 1, size):
            last = first
            while ends[last] < stop:
                last += 1
            # Of a text that fills the chunk to its end its length does not matter: a longer one begins like it.
            open_end = self._begins_with[last]
            content: object = open_end if first == last else (*texts[first:last], open_end)
            tip = self._trie.chunk(tip, content)
            chunks.append(tip)
            first = last + 1 if ends[last] == stop else last
