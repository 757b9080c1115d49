"""Keeps the residency view in step with the cache layer's directory.

The directory is only polled (LMCache pushes it to nobody). Its summary is cheap and asked often. A full listing
costs the layer time in proportion to its size (about 0.1 s per 1,000 keys on two cores), so it is taken when
the summary has changed, or now and then regardless, and listings never take more than about a tenth of the
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvpilot.backends.base import Backend, BackendError
from kvpilot.domain import Tier
from kvpilot.ingest.residency import Residency

log = logging.getLogger(__name__)

_DUTY = 0.1
_LONGEST_REST_S = 120.0
_SLOWEST_RETRY_S = 4.0
_IDLE_FACTOR = 4
"""How much slower than ``poll_s`` a directory is polled that does not change."""

_FULL_LISTING_S = 10.0
_USAGE_S, _USAGE_WHEN_MOVING_S = 5.0, 1.0
_FAST_S = 0.1
_FAST_FOR_S = 3.0
"""After a nudge: how often, and for how long (events reach LMCache's directory after 1 to 2 s)."""


@dataclass(slots=True)
class PollerStats:
    """For metrics. Times are unix seconds; ``error`` is the last failure, empty while all is well."""

    polls: int = 0
    listings: int = 0
    failures: int = 0
    error: str = ""
    last_success_at: float | None = None
    last_listing_s: float = 0.0
    chunks: int = 0


class DirectoryPoller:
    """Background task that refreshes ``residency`` from ``backend``.

    ``poll_s``: usual pause between polls. ``on_change`` is called after a listing that changed the view.
    Outages only make the view old (``residency.stale``): polling goes on with growing pauses and the view is
    complete again with the first listing after it. LMCache's coordinator does not learn what happened while it
    was away; see ``Residency.absence_is_certain`` for what that means to the view.
    """

    def __init__(
        self,
        backend: Backend,
        residency: Residency,
        poll_s: float,
        on_change: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.stats = PollerStats()
        self._backend = backend
        self._residency = residency
        self._poll_s = poll_s
        self._on_change = on_change
        self._clock = clock
        self._wake = asyncio.Event()
        self._fast_until = 0.0
        self._mark: tuple[int, ...] | None = None
        self._listed_at = 0.0
        self._next_listing = 0.0
        self._usage_at = 0.0
        self._quiet_polls = 0
        self._away_since: float | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="directory-poller")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def nudge(self) -> None:
        """Somebody waits to see a change: look more often for a few seconds."""
        self._fast_until = time.monotonic() + _FAST_FOR_S
        self._quiet_polls = 0
        self._wake.set()

    def stir(self) -> None:
        """There is traffic: poll at the usual pace again, no faster, since every poll takes time from it."""
        self._quiet_polls = 0

    async def poll(self) -> bool:
        """One poll, now. Returns whether the view changed. Raises BackendError."""
        now = self._clock()
        self.stats.polls += 1
        try:
            directory = await self._backend.directory_stats()
        except BackendError:
            if self._away_since is None:
                self._away_since = self.stats.last_success_at or now
            raise
        if self._away_since is not None:
            self._residency.directory_missed(self._away_since, now)
            self._away_since = None
        moved = directory.mark != self._mark
        changed = False
        if (
            moved or abs(now - self._listed_at) >= _FULL_LISTING_S
        ) and time.monotonic() >= self._next_listing:
            changed = await self._list(now)
            self._mark = directory.mark
        elif not moved:
            self._residency.confirm(now)
        if abs(now - self._usage_at) >= (_USAGE_WHEN_MOVING_S if moved else _USAGE_S):
            # A node that is away does not make the directory's answer worse.
            with contextlib.suppress(BackendError):
                await self._refresh_usage(directory.bytes, now)
        self._quiet_polls = 0 if moved else self._quiet_polls + 1
        self.stats.last_success_at = now
        self.stats.error = ""
        if changed and self._on_change is not None:
            self._on_change()
        return changed

    async def _list(self, now: float) -> bool:
        refresh = self._residency.begin_refresh(now)
        started = time.monotonic()
        try:
            async for page in self._backend.list_keys():
                refresh.add(page)
        finally:
            spent = time.monotonic() - started
            self._next_listing = time.monotonic() + min(spent * (1 / _DUTY - 1), _LONGEST_REST_S)
        self._listed_at = now
        self.stats.last_listing_s = spent
        self.stats.listings += 1
        self.stats.chunks = sum(len(chunks) for chunks in refresh.spaces.values())
        # A view that takes long to take is not stale before the next one can be there.
        self._residency.listing_takes_s = spent
        return self._residency.commit(refresh)

    async def _refresh_usage(self, listed: Mapping[Tier, int], now: float) -> None:
        self._usage_at = now
        self._residency.set_usage(await self._backend.usage(), listed, now)

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                await self.poll()
                failures = 0
            except BackendError as error:
                failures += 1
                self._failed(str(error), first=failures == 1)
                # The directory may be away while the nodes are not.
                with contextlib.suppress(BackendError):
                    await self._refresh_usage({}, self._clock())
            except Exception as error:
                failures += 1
                self._failed(repr(error), first=failures == 1)
                log.exception("directory poll failed unexpectedly")
            await self._pause(failures)

    def _failed(self, message: str, *, first: bool) -> None:
        self.stats.failures += 1
        self.stats.error = message
        if first:
            log.warning("the view of the cache layer is getting old: %s", message)

    async def _pause(self, failures: int) -> None:
        if failures:
            wanted = min(self._poll_s * 2 ** min(failures, 6), _SLOWEST_RETRY_S)
        elif time.monotonic() < self._fast_until:
            wanted = _FAST_S
        else:
            wanted = self._poll_s * min(1 + self._quiet_polls // 10, _IDLE_FACTOR)
        self._wake.clear()
        at_least = min(wanted, _FAST_S)
        await asyncio.sleep(at_least)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), wanted - at_least)
