"""The coordinator's state as the planner sees it, kept up as things happen.

What has changed is told: runs and contexts by the reference table, chunks by the residency view, waits by the
forecasts, all else of a conversation by whoever changes it (``CoordinatorService.changed``). So a plan costs what
happened since the last one, O(chunks of the runs that changed + contexts touched · their runs), and not what there is;
the picture is the one that would be made anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator

import numpy as np

from kvpilot.context.chunks import HASH_BYTES
from kvpilot.coordinator.service import CoordinatorService
from kvpilot.domain import Space, Tier
from kvpilot.plan.exchange import Floats, Ints
from kvpilot.plan.holdings import NOTHING, Holdings
from kvpilot.plan.layout import Layout
from kvpilot.sessions.book import Thread
from kvpilot.sessions.references import Node

HOST, DISK = 0, 1
"""Rows of ``layout``'s tiers."""


class Picture:
    """One follower of a service; :meth:`close` it when it is not looked at any more, as what it is told is kept."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service
        self.holdings = Holdings()
        self.layout = Layout(self.holdings, (Tier.HOST, Tier.DISK))
        self.tenants: dict[str, int] = {}
        """Their numbers in the holdings."""
        self.orphans: dict[Space, dict[bytes, None]] = {}
        """Chunks in host memory that no live context holds."""
        self.arriving = 0
        """Chunks that are being brought into host memory."""
        self.running: set[str] = set()
        """Conversations of which a request runs."""
        self._rows: dict[Node, int] = {}
        self._nodes: dict[int, tuple[Space, Node]] = {}
        """By row."""
        self._contexts: dict[str, int] = {}
        """By conversation, its number in the holdings; and the other way round:"""
        self._owners: dict[int, str] = {}
        self._resting: dict[int, set[str]] = {}
        """By row, the conversations that end with it."""
        self._tenant_of: dict[Space, int] = {}
        self._expiring: list[tuple[float, str]] = []
        """When to look at a conversation again, as its wish to be kept may have ended; the soonest first, each once."""
        self._awaited: set[str] = set()
        """Those in it."""
        self._busy: set[int] = set()
        self._sure = False
        self._changes = service.references.follow()
        self._moved = service.residency.follow()
        self._touched = service.follow()
        for space, chunks in service.residency.resident(Tier.HOST):
            self._moved.update((space, chunk) for chunk in chunks)
        service.forecasts.news(service.clock())
        worths = service.forecasts.worths(service.clock())
        self.holdings.foresee(np.arange(len(worths)), worths)

    def close(self) -> None:
        self._service.references.unfollow(self._changes)
        self._service.residency.unfollow(self._moved)
        self._service.unfollow(self._touched)

    # ------------------------------------------------------------ what is asked of it

    def settle(self, now: float, recent: Collection[str] = ()) -> None:
        """Take in what has happened. ``recent``: conversations acted upon a moment ago, which are left alone."""
        nodes, owners = dict(self._changes.nodes), list(self._changes.owners)
        moved, touched = list(self._moved), list(self._touched)
        for taken in (self._changes.nodes, self._changes.owners, self._moved, self._touched):
            taken.clear()
        self._forget([owner for owner in owners if owner not in self._service.references])
        live = [owner for owner in owners if owner in self._service.references]
        for owner in live:
            self._name_tenant(owner)
        stale = self._take_runs(nodes)
        stale |= self._take_chunks(nodes, moved)
        for row in sorted(stale):
            self._read(row)
        for owner in live:
            self._rest(owner)
        self._clear_away(nodes)
        while self._expiring and self._expiring[0][0] <= now:
            touched.append(heapq.heappop(self._expiring)[1])
            self._awaited.discard(touched[-1])
        for owner in {**dict.fromkeys(live), **dict.fromkeys(touched)}:
            if owner in self._contexts:
                self._describe(owner, now)
        self.holdings.foresee(*self._service.forecasts.news(now))
        self._leave_alone(recent)

    def chunks(self, row: int) -> list[bytes]:
        """Chunks of the run, head first."""
        return self._nodes[row][1].chunks()

    def space(self, row: int) -> Space:
        return self._nodes[row][0]

    def holders(self, row: int) -> set[str]:
        """Who holds the run. O(runs and contexts behind it)."""
        out = set(self._resting.get(row, ()))
        for behind in self.holdings.behind(row):
            out |= self._resting.get(behind, set())
        return out

    def tip(self, owner: str) -> int:
        """The row with which a conversation's context ends; NOTHING where it has none."""
        context = self._contexts.get(owner)
        return NOTHING if context is None else int(self.holdings.rests_on[context])

    def threads(self) -> Iterator[Thread]:
        """The conversations that hold something."""
        for owner in self._contexts:
            if (thread := self._service.book.thread(owner)) is not None:
                yield thread

    def leaving(self) -> tuple[Ints, Floats]:
        """The contexts [n] that could be demoted, as something of them lies in host memory and nothing of them runs,
        and their own worths [n]. O(contexts · runs of a context)."""
        holdings, n = self.holdings, self.holdings.contexts
        there = np.zeros(n, dtype=bool)
        contexts = np.flatnonzero(holdings.rests_on[:n] != NOTHING)
        rows = holdings.rests_on[contexts]
        idle = holdings.running[rows] == 0
        contexts, rows = contexts[idle], rows[idle]
        found = contexts
        while len(rows):
            there[contexts] |= self.layout.here[HOST, rows] > 0
            rows = holdings.above[rows]
            on = rows != NOTHING
            contexts, rows = contexts[on], rows[on]
        found = found[there[found]]
        return found, holdings.foreseen[found]

    def copy_host(self, layout: Layout) -> None:
        """Tell another layout of the same runs what lies in host memory. O(runs) in looking through two columns."""
        n = self.holdings.runs
        here = self.layout.here[HOST, :n]
        for row in np.flatnonzero(layout.here[layout.tiers.index(Tier.HOST), :n] != here).tolist():
            layout.lies(row, Tier.HOST, int(here[row]))

    def owner(self, context: int) -> str:
        """Who has this number in the holdings."""
        return self._owners[context]

    def context(self, owner: str) -> int | None:
        """The conversation's number in the holdings; None while it holds nothing."""
        return self._contexts.get(owner)

    # ------------------------------------------------------------ runs

    def _take_runs(self, nodes: dict[Node, Space]) -> set[int]:
        """Rows as the runs are now, predecessors first; those that are to be read."""
        rows = set()
        for node in sorted((node for node in nodes if node.refs), key=lambda node: node.end):
            space = nodes[node]
            parent = node.parent
            above = NOTHING if parent is None else self._rows.get(parent, NOTHING)
            size = len(node.hashes) // HASH_BYTES
            row = self._rows.get(node)
            if row is None:
                row = self._rows[node] = self.holdings.add(above, size, self._tenant_of.get(space, 0))
                self._nodes[row] = (space, node)
            else:
                self.holdings.move(row, above)
                self.holdings.resize(row, size)
            rows.add(row)
        return rows

    def _clear_away(self, nodes: dict[Node, Space]) -> None:
        """Runs that are gone, tail first."""
        for node in sorted((node for node in nodes if not node.refs), key=lambda node: -node.end):
            row = self._rows.pop(node, None)
            if row is not None:
                self.holdings.remove(row)
                del self._nodes[row]
                self._resting.pop(row, None)

    def _take_chunks(self, nodes: dict[Node, Space], moved: list[tuple[Space, bytes]]) -> set[int]:
        """Orphans as they are now; the rows of chunks that moved."""
        service = self._service
        rows = set()
        sure = service.residency.absence_is_certain(Tier.DISK)
        if sure != self._sure:
            self._sure = sure
            rows |= set(self._nodes)
        by_space: dict[Space, list[bytes]] = {}
        for space, chunk in moved:
            by_space.setdefault(space, []).append(chunk)
        for space, chunks in by_space.items():
            for node in service.references.nodes_with(space, chunks):
                rows.add(self._rows[node])
        for node, space in nodes.items():
            by_space.setdefault(space, []).extend(node.chunks())
        for space, chunks in by_space.items():
            orphans = self.orphans.setdefault(space, {})
            for chunk, held in zip(chunks, service.references.holders(space, chunks), strict=True):
                if not held and Tier.HOST in service.residency.tiers(space, chunk):
                    orphans[chunk] = None
                else:
                    orphans.pop(chunk, None)
            if not orphans:
                del self.orphans[space]
        return rows

    def _read(self, row: int) -> None:
        """Where the run lies."""
        space, node = self._nodes[row]
        chunks, residency = node.chunks(), self._service.residency
        host = residency.prefix(space, chunks, Tier.HOST)
        self.layout.lies(row, Tier.HOST, host)
        # A chunk that is only above counts as one below too: what is behind it can be loaded all the same.
        rest = chunks[host:]
        below = host + residency.prefix(space, rest) if self._sure and rest else len(chunks)
        self.layout.lies(row, Tier.DISK, below)

    # ------------------------------------------------------------ conversations

    def _name_tenant(self, owner: str) -> None:
        """Of whom the space of this conversation is: a space has the salt of one tenant."""
        if (thread := self._service.book.thread(owner)) is not None:
            tenant = self.tenants.setdefault(thread.session[0], len(self.tenants))
            self._tenant_of.setdefault(self._service.references.space(owner), tenant)

    def _forget(self, owners: list[str]) -> None:
        """What they held, they hold no more."""
        for owner in owners:
            context = self._contexts.pop(owner, None)
            if context is not None:
                self._resting.get(int(self.holdings.rests_on[context]), set()).discard(owner)
                self.holdings.release(context)
                del self._owners[context]
                self.running.discard(owner)

    def _rest(self, owner: str) -> None:
        if self._service.book.thread(owner) is None:
            return
        context = self._service.forecasts.number(owner)
        node = self._service.references.tip(owner)
        row = NOTHING if node.parent is None else self._rows[node]
        known = self._contexts.get(owner)
        if known is not None:
            self._resting.get(int(self.holdings.rests_on[known]), set()).discard(owner)
        self._contexts[owner], self._owners[context] = context, owner
        self.holdings.rest(context, row)
        if row != NOTHING:
            self._resting.setdefault(row, set()).add(owner)

    def _describe(self, owner: str, now: float) -> None:
        """What is to be known of the conversation besides its KV."""
        service, holdings, context = self._service, self.holdings, self._contexts[owner]
        thread = service.book.thread(owner)
        session = service.book.sessions.get(thread.session) if thread is not None else None
        if thread is None or session is None:
            return
        kept = thread.keep_until > now
        if kept and owner not in self._awaited:
            self._awaited.add(owner)
            heapq.heappush(self._expiring, (thread.keep_until, owner))
        holdings.wish(context, kept, thread.priority)
        announced = session.expected_at is not None and service.forecasts.of(owner, now) is None
        holdings.announce(context, float(session.expected_at or 0.0) if announced else np.nan)
        holdings.decline(context, service.sent_down.get(owner) == thread.turns)
        if thread.in_flight and owner not in self.running:
            self.running.add(owner)
            holdings.begin(context)
        elif not thread.in_flight and owner in self.running:
            self.running.discard(owner)
            holdings.finish(context)

    def _leave_alone(self, recent: Collection[str]) -> None:
        """Marks what is acted upon, or was a moment ago. O(runs of those conversations)."""
        busy: set[int] = set()
        coming: set[int] = set()
        for owner in {*recent, *self._service.tasks.busy_owners()}:
            rows = set(self.holdings.path(self.tip(owner)))
            busy |= rows
            thread = self._service.book.thread(owner)
            session = self._service.book.sessions.get(thread.session) if thread is not None else None
            if session is not None and session.expected_at is not None and owner not in self.running:
                coming |= rows
        for row in self._busy - busy:
            self.layout.mark(row, False)
        for row in busy:
            self.layout.mark(row, True)
        self._busy = busy
        here = self.layout.here[:, sorted(coming)]
        self.arriving = int((here[DISK] - here[HOST]).sum())
