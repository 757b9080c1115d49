"""Carries actions out on a cache layer and finds out what really happened.

An evicted chunk is looked for again several times afterwards: engines store asynchronously, so a store that was
under way can bring a chunk back after it was deleted. What a dead cache layer kept from being evicted is tried
again when it returns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpilot.backends.base import Backend, BackendError, DropResult, NotReady, PrefetchResult
from kvpilot.coordinator.actions import ActionLog, Work
from kvpilot.domain import OutcomeStatus, Space, Tier, TokenArray
from kvpilot.ingest.residency import Residency
from kvpilot.sessions.references import ReferenceTable

log = logging.getLogger(__name__)

CONFIRM_S = 4.0
"""How long an action waits for the directory (which lags about a second) to show its effect."""
CONFIRM_STEP_S = 0.25
STORE_WAIT_S = 5.0
"""How long a demotion waits for an asynchronous store to reach the tier below."""
PREFETCH_TIMEOUT_S = 60.0
ROOM_WAIT_S = 8.0
"""How long a prefetch goes on trying when host memory has no room: LMCache makes some once a second."""
RETRY_S = 5.0
POSTPONE_S = 1.0
RETRY_FOR_S = 900.0
MAX_PARALLEL = 4
REACHED = (Tier.HOST, Tier.DISK)
"""Tiers an eviction empties; the engine's own device pool is its own business."""


@dataclass(slots=True)
class Watch:
    """Dead chunks to look for again at ``times`` (monotonic seconds, soonest first)."""

    space: Space
    chunks: tuple[bytes, ...]
    times: list[float]
    give_up: float


@dataclass(slots=True)
class ExecutorStats:
    late_stores_removed: int = 0
    backend_errors: Counter[str] = field(default_factory=Counter)


class Executor:
    """``on_change`` is called when tiers changed, so that the residency view is refreshed soon. ``unmapped``
    tells whether a request runs whose chunks nobody holds yet: chunks that came back may be its own."""

    def __init__(
        self,
        backend: Backend,
        residency: Residency,
        references: ReferenceTable,
        actions: ActionLog,
        recheck_s: Sequence[float],
        on_change: Callable[[], None],
        unmapped: Callable[[Space], bool] = lambda space: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self._residency = residency
        self._references = references
        self._actions = actions
        self._recheck_s = tuple(recheck_s)
        self._on_change = on_change
        self._unmapped = unmapped
        self._clock = clock
        self._slots = asyncio.Semaphore(MAX_PARALLEL)
        self._watches: list[Watch] = []
        self.stats = ExecutorStats()

    # ------------------------------------------------------------ evict

    async def evict(self, action_id: str, work: Work) -> None:
        """Drop from every tier those chunks of ``work`` that no live session references *now*."""
        dead, live = self._split(work)
        if not dead:
            self._close(
                action_id, OutcomeStatus.DONE, skipped=live, reason="all still referenced" if live else ""
            )
            return
        try:
            async with self._slots:
                before = await self._located(work.space, dead)
                again, dead = dead, tuple(self._unheld(work.space, dead))
                live += len(again) - len(dead)
                remaining = await self._drop_until_gone(work.space, dead)
        except BackendError as error:
            self._failed(action_id, error)
            self._watch(work.space, dead, retry=True)
            return
        self._watch(work.space, dead, retry=bool(remaining))
        gone = 0 if remaining is None else len(dead) - len(remaining)
        dropped = Counter(tier.value for tiers in before or () for tier in tiers)
        if remaining is None:
            status, reason = OutcomeStatus.CLIPPED, "deleted, not confirmed: the directory did not answer"
        elif remaining:
            status, reason = OutcomeStatus.CLIPPED, f"{len(remaining)} chunks in use; tried again later"
        else:
            status, reason = OutcomeStatus.DONE, ""
        self._close(action_id, status, confirmed=gone, skipped=live, reason=reason, tiers=dict(dropped))

    def _split(self, work: Work) -> tuple[tuple[bytes, ...], int]:
        dead = tuple(self._unheld(work.space, work.chunks))
        return dead, len(work.chunks) - len(dead)

    async def _locate(self, space: Space, chunks: Sequence[bytes]) -> list[frozenset[Tier]]:
        """Where the chunks are by the directory, or, while it is known to have missed things, by the view
        that also remembers what the layer itself reported."""
        now = self._clock()
        found = await self._backend.locate(space, chunks)
        self._residency.observe(space, chunks, found, now)
        if self._directory_knows_all():
            return found
        return [self._residency.tiers(space, chunk) for chunk in chunks]

    def _directory_knows_all(self) -> bool:
        return all(self._residency.absence_is_certain(tier) for tier in REACHED)

    async def _located(self, space: Space, chunks: Sequence[bytes]) -> list[frozenset[Tier]] | None:
        try:
            return await self._locate(space, chunks)
        except BackendError as error:
            self._count(error)
            return None

    async def _drop_until_gone(self, space: Space, chunks: tuple[bytes, ...]) -> list[bytes] | None:
        """Delete, look until the directory agrees, delete once more what is left; returns what still remains,
        None when the directory did not answer."""
        left: list[bytes] = self._unheld(space, chunks)
        for last in (False, True):
            await self._drop(space, left, REACHED)
            try:
                left = await self._wait_gone(space, left, REACHED, CONFIRM_S / 2)
            except BackendError as error:
                self._count(error)
                if last:
                    return None
                continue
            left = self._unheld(space, left)
            if not left:
                break
        return left

    def _unheld(self, space: Space, chunks: Sequence[bytes]) -> list[bytes]:
        """Those that no live context references at this moment: it takes time to get here, and contexts return."""
        holders = self._references.holders(space, chunks)
        return [chunk for chunk, n in zip(chunks, holders, strict=True) if n == 0]

    async def _wait_gone(
        self, space: Space, chunks: Sequence[bytes], tiers: Sequence[Tier], within_s: float
    ) -> list[bytes]:
        """Wait until the directory shows the chunks in none of ``tiers``; returns those that remain.

        While the directory is known to have missed things it may list for ever what is gone, so in the end
        what the layer itself reported outweighs it.
        """
        deadline = time.monotonic() + within_s
        left = list(chunks)
        silent: BackendError | None = None
        while left and time.monotonic() < deadline:
            await asyncio.sleep(CONFIRM_STEP_S)
            try:
                listed = await self._backend.locate(space, left)
            except BackendError as error:
                silent = error  # it may be back in a moment: it is asked again until the time is over
                continue
            silent = None
            self._residency.observe(space, left, listed, self._clock())
            shown = [places | self._residency.tiers(space, c) for c, places in zip(left, listed, strict=True)]
            left = [c for c, places in zip(left, shown, strict=True) if not places.isdisjoint(tiers)]
        if silent is not None:
            raise silent
        if left and not self._directory_knows_all():
            left = [c for c in left if not self._residency.tiers(space, c).isdisjoint(tiers)]
        return left

    async def _drop(self, space: Space, chunks: Sequence[bytes], tiers: Sequence[Tier]) -> DropResult:
        result = await self._backend.drop(space, chunks, tiers)
        for error in result.errors:
            self.stats.backend_errors[error[:80]] += 1
        if not result.skipped and not result.errors:
            for tier in tiers:
                self._residency.observe_tier(space, chunks, tier, False, self._clock())
        self._on_change()
        return result

    # ------------------------------------------------------------ demote

    async def demote(self, action_id: str, work: Work, limit: int | None = None) -> None:
        """Drop from host memory what disk holds readable, last chunk first; ``limit`` bounds the chunks."""
        chunks = list(work.chunks[-limit:] if limit is not None else work.chunks)
        try:
            async with self._slots:
                safe, only_host = await self._confirmed_below(work.space, chunks)
                if safe:
                    await self._drop(work.space, safe, (Tier.HOST,))
                left = len(await self._wait_gone(work.space, safe, (Tier.HOST,), CONFIRM_S))
        except BackendError as error:
            self._failed(action_id, error)
            return
        gone = len(safe) - left
        reasons = []
        if only_host:
            reasons.append(f"{only_host} chunks are not on disk yet")
        if left:
            reasons.append(f"{left} chunks in use")
        status = OutcomeStatus.CLIPPED if reasons else OutcomeStatus.DONE
        record = self._actions.get(action_id)
        skipped = (record.skipped if record else 0) + len(chunks) - len(safe) - only_host
        tiers = {Tier.HOST.value: gone}
        self._close(
            action_id, status, confirmed=gone, skipped=skipped, reason="; ".join(reasons), tiers=tiers
        )

    async def _confirmed_below(self, space: Space, chunks: Sequence[bytes]) -> tuple[list[bytes], int]:
        """Chunks that are in host memory and on disk, and how many are only in host memory even after a wait."""
        deadline = time.monotonic() + STORE_WAIT_S
        while True:
            placed = await self._locate(space, chunks)
            safe = [c for c, t in zip(chunks, placed, strict=True) if Tier.HOST in t and Tier.DISK in t]
            only_host = sum(Tier.HOST in t and Tier.DISK not in t for t in placed)
            if not only_host or time.monotonic() > deadline:
                return safe, only_host
            await asyncio.sleep(2 * CONFIRM_STEP_S)

    # ------------------------------------------------------------ prefetch

    async def prefetch(self, action_id: str, work: Work, tokens: TokenArray) -> None:
        """Bring the context's leading ``len(work.chunks)`` chunks into host memory; done when they are there."""
        try:
            async with self._slots:
                result = await self._load(work, tokens[: len(work.chunks) * self._backend.chunk_size])
        except NotReady as error:
            self._count(error)
            self._close(action_id, OutcomeStatus.REJECTED, reason=str(error))
            return
        except BackendError as error:
            self._failed(action_id, error)
            return
        if result.complete:
            # All is known: a look at the directory now would only take time from the request that follows.
            self._residency.observe_tier(work.space, work.chunks, Tier.HOST, True, self._clock())
        else:
            self._on_change()
        status = OutcomeStatus.DONE if result.complete else OutcomeStatus.CLIPPED
        reason = (
            "" if result.complete else f"{result.total - result.found} chunks are nowhere, or found no room"
        )
        tiers = {Tier.HOST.value: result.found}
        self._close(action_id, status, confirmed=result.found, reason=reason, tiers=tiers)

    async def _load(self, work: Work, tokens: TokenArray) -> PrefetchResult:
        """Prefetch, again while chunks that lie on disk found no room in host memory."""
        deadline = time.monotonic() + ROOM_WAIT_S
        while True:
            result = await self._backend.prefetch(work.space, tokens, timeout_s=PREFETCH_TIMEOUT_S)
            if result.complete or time.monotonic() > deadline:
                return result
            placed = await self._locate(work.space, work.chunks)
            if not any(Tier.DISK in tiers and Tier.HOST not in tiers for tiers in placed):
                return result
            await asyncio.sleep(2 * CONFIRM_STEP_S)

    # ------------------------------------------------------------ looking again

    def _watch(self, space: Space, chunks: tuple[bytes, ...], *, retry: bool) -> None:
        now = time.monotonic()
        times = [now + RETRY_S] if retry else [now + s for s in self._recheck_s]
        if times:
            self._watches.append(Watch(space, chunks, times, now + RETRY_FOR_S))

    async def watch_loop(self) -> None:
        """Runs for ever: look again for evicted chunks, delete those that came back and are still dead."""
        while True:
            await asyncio.sleep(CONFIRM_STEP_S)
            now = time.monotonic()
            for watch in [w for w in self._watches if w.times[0] <= now]:
                if self._unmapped(watch.space) and now < watch.give_up:
                    watch.times[0] = now + POSTPONE_S
                    continue
                self._watches.remove(watch)
                if await self._look_again(watch):
                    watch.times.pop(0)
                elif now < watch.give_up:
                    watch.times = [now + RETRY_S, *(now + RETRY_S + s for s in self._recheck_s)]
                else:
                    continue
                if watch.times:
                    self._watches.append(watch)

    async def _look_again(self, watch: Watch) -> bool:
        """False when the cache layer did not answer or the chunks could not be removed."""
        dead = self._unheld(watch.space, watch.chunks)
        if not dead:
            return True
        try:
            placed = await self._locate(watch.space, dead)
            back = self._unheld(watch.space, [c for c, tiers in zip(dead, placed, strict=True) if tiers])
            if not back:
                return True
            await self._drop(watch.space, back, REACHED)
        except BackendError as error:
            self._count(error)
            return False
        self.stats.late_stores_removed += len(back)
        return len(watch.times) > 1

    @property
    def watched(self) -> int:
        return sum(len(watch.chunks) for watch in self._watches)

    # ------------------------------------------------------------ closing

    def _close(self, action_id: str, status: OutcomeStatus, **fields: Any) -> None:
        self._actions.update(action_id, status=status, finished_at=self._clock(), **fields)

    def _failed(self, action_id: str, error: BackendError) -> None:
        self._count(error)
        self._close(action_id, OutcomeStatus.FAILED, reason=str(error))

    def _count(self, error: BackendError) -> None:
        self.stats.backend_errors[type(error).__name__] += 1
