"""The engine's own device pool, where vLLM runs kvpilot's plug-in: what it holds, and what is ordered there.

Proxy only, with a cache layer, and with the plug-in are three depths of one thing: the plug-in is looked for again and
again, may come later and may go. While it is away nothing is ordered, and everything else goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from kvpilot.backends.base import BackendError, TimedOut
from kvpilot.backends.engine_plugin import EngineState
from kvpilot.domain import Space, TokenArray
from kvpilot.engine.commands import MAX_TTL_S, EngineCommand, EngineOutcome, Kind
from kvpilot.ingest.residency import Residency
from kvpilot.sessions.references import ReferenceTable, Released
from kvpilot.sessions.thread import Thread

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""How often an engine that has the plug-in, or is not there, is asked for its state."""
ABSENT_S = 30.0
"""How often one that has answered without it."""
STATE_S = 30.0
ORDER_S = 30.0
"""How long the outcome of an order is waited for."""
MAX_ORDERS = 1000
"""Orders that wait; of more the oldest are given up, they only were wishes."""
RETRY_S = 2.0
"""A context is not brought into the pool again sooner; each time in vain, or displaced again, doubles it …"""
MAX_DOUBLINGS = 2
"""… so often."""


class Plugin(Protocol):
    """An engine's plug-in, as :class:`kvpilot.backends.engine_plugin.EnginePlugin` speaks to it."""

    async def state(self, timeout_s: float) -> EngineState | None: ...

    async def command(self, command: EngineCommand, timeout_s: float) -> EngineOutcome: ...


class Device:
    """``plugin`` None: there is none and never will be. Orders are carried out one after the other; what becomes of
    them is counted, nothing waits for them."""

    def __init__(
        self,
        plugin: Plugin | None,
        residency: Residency,
        references: ReferenceTable,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._plugin = plugin
        self._residency = residency
        self._references = references
        self._clock = clock
        self._orders: asyncio.Queue[EngineCommand] = asyncio.Queue()
        self._digests: dict[str, tuple[tuple[int, ...], list[list[bytes]]]] = {}
        self._tried: dict[str, tuple[int, int, float]] = {}
        """By conversation: at which of its turns it was brought last, how often at that turn, and when."""
        self.state: EngineState | None = None
        """What the plug-in said last; None while there is none."""
        self._absent = False
        """The engine has answered, and has none."""
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """Orders and prefetches by kind and what became of them."""

    # ------------------------------------------------------------ what is there

    @property
    def active(self) -> bool:
        """Whether orders are carried out."""
        return self.state is not None and self.state.active

    @property
    def prefetches(self) -> bool:
        """Whether contexts can be brought into the pool, and it is known what lies there."""
        return self.state is not None and self.state.prefetches and self.state.events

    @property
    def pool_tokens(self) -> int:
        """Size of the pool; 0 while it is not known."""
        return self.state.blocks.get("total", 0) * self.state.block_tokens if self.state is not None else 0

    def resident(self, thread: Thread) -> int:
        """Leading tokens of the thread's context that lie in the pool. O(its blocks there)."""
        owner, space = thread.owner, thread.space
        pools = self._residency.pools_of(space)
        stamp = (thread.mapped_turn, self._references.length(owner), *(pool.block_size for pool in pools))
        known = self._digests.get(owner)
        if known is None or known[0] != stamp:
            tokens = self._references.tokens(owner)
            known = self._digests[owner] = (stamp, [pool.digests(tokens) for pool in pools])
        found = (pool.held(space.salt, space.adapter, own) for pool, own in zip(pools, known[1], strict=True))
        return max(found, default=0)

    def displaced(self, session: str, space: Space) -> int:
        """Tokens that the session lost to others in the pool since its last request, as the engine said last."""
        state = self.state
        found = state.displaced if state is not None else ()
        mine = (each.blocks for each in found if (each.salt, each.session) == (space.salt, session))
        return sum(mine) * (state.block_tokens if state is not None else 0)

    def resting(self, thread: Thread) -> bool:
        """Whether the thread's context was brought a moment ago, or in vain: it is left alone for a while."""
        turn, times, at = self._tried.get(thread.owner, (-1, 0, 0.0))
        return turn == thread.turns and self._clock() - at < RETRY_S * 2 ** min(times - 1, MAX_DOUBLINGS)

    def forget(self, owner: str) -> None:
        """The conversation is over."""
        self._digests.pop(owner, None)
        self._tried.pop(owner, None)

    # ------------------------------------------------------------ what is ordered

    def gave_up(self, session: str, released: Released) -> None:
        """A session's context ended, or lost its tail: nobody needs what was released."""
        context = released.context
        if context is not None and released.chunks and self.state is not None:
            # A block that others share only the beginning of is nobody else's.
            block = max(1, self.state.block_tokens)
            start = (len(context) - released.tokens) // block * block
            self._order(Kind.EVICT, session, released.space, context, start=start)

    def ended(self, session: str, space: Space) -> None:
        """A session ended; what it gave up was told before. What others need of it is theirs alone now."""
        self._order(Kind.DEMOTE, session, space)

    def sent_down(self, session: str, space: Space, tokens: TokenArray | None = None, start: int = 0) -> None:
        """The session (of its context ``tokens`` what lies behind ``start``) is not expected soon."""
        self._order(Kind.DEMOTE, session, space, tokens, start=start)

    def kept(self, session: str, space: Space, seconds: float) -> None:
        """Somebody wants the session kept for so long."""
        if seconds > 0:
            self._order(Kind.RETAIN, session, space, ttl_s=min(seconds, MAX_TTL_S))

    def _order(
        self, kind: Kind, session: str, space: Space, tokens: TokenArray | None = None, **fields: float
    ) -> None:
        if not self.active:
            return
        if self._orders.qsize() >= MAX_ORDERS:
            self.outcomes[self._orders.get_nowait().kind.value, "shed"] += 1
            self._orders.task_done()
        self._orders.put_nowait(_command(kind, session, space, tokens, **fields))

    async def prefetch(
        self, session: str, thread: Thread, tokens: TokenArray, eta_s: float | None, timeout_s: float
    ) -> EngineOutcome:
        """Bring the thread's context up to ``tokens`` into the pool; its next request is expected in ``eta_s``
        seconds. What was ordered before comes first: it may make the room. Counts are the engine's blocks. Raises
        BackendError."""
        if self._plugin is None:
            raise BackendError("the engine has no plug-in")
        turn, times, _ = self._tried.get(thread.owner, (-1, 0, 0.0))
        turn, times = thread.turns, times + 1 if turn == thread.turns else 1
        try:
            await self._orders.join()
            command = _command(Kind.PREFETCH, session, thread.space, tokens, eta_s=eta_s)
            return await self._carry_out(self._plugin, command, timeout_s)
        finally:
            self._tried[thread.owner] = (turn, times, self._clock())

    async def _carry_out(self, plugin: Plugin, command: EngineCommand, timeout_s: float) -> EngineOutcome:
        try:
            outcome = await plugin.command(command, timeout_s)
        except BackendError as error:
            self.outcomes[command.kind.value, type(error).__name__] += 1
            raise
        self.outcomes[command.kind.value, outcome.status.value] += 1
        return outcome

    # ------------------------------------------------------------ for ever

    async def run(self) -> None:
        """Look for the plug-in and carry out orders, for ever."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._look())
            both.create_task(self._work())

    async def _look(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(ABSENT_S if self._absent else LOOK_S)

    async def look(self) -> None:
        """Ask the engine once what it has. What changes is logged once."""
        if self._plugin is None:
            return
        was = self.active
        try:
            self.state, why = await self._plugin.state(STATE_S), "the engine has none"
        except TimedOut as error:
            why = str(error)  # It is busy: an engine answers between its steps.
        except BackendError as error:
            self.state, why = None, str(error)
            self._absent = False
        else:
            self._absent = self.state is None
        if self.active and not was:
            how = "" if self.prefetches else "; no connector or no KV events: nothing is brought into it"
            log.info("the engine has kvpilot's plug-in: its device pool is steered, too%s", how)
        elif was and not self.active:
            why = self.state.reason if self.state is not None else why
            log.warning("the engine's plug-in is gone, going on without: %s", why)

    async def _work(self) -> None:
        while True:
            command = await self._orders.get()
            try:
                if self._plugin is None or not self.active:
                    self.outcomes[command.kind.value, "shed"] += 1
                else:
                    await self._carry_out(self._plugin, command, ORDER_S)
            except BackendError as error:
                log.debug("%s of %s in the device pool: %s", command.kind, command.session, error)
            finally:
                self._orders.task_done()


def _command(
    kind: Kind, session: str, space: Space, tokens: TokenArray | None, **fields: float | None
) -> EngineCommand:
    told = {name: value for name, value in fields.items() if value is not None}
    ids = tuple(tokens.tolist()) if tokens is not None else ()
    return EngineCommand(kind, session=session, salt=space.salt, tokens=ids, **told)  # type: ignore[arg-type]
