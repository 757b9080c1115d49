"""The poller keeps the view in step, spares the directory, and outlives its outages."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

from kvpilot.backends.base import DirectoryStats, Placement, Unreachable
from kvpilot.domain import Space, Tier, TierUsage
from kvpilot.ingest.directory import DirectoryPoller
from kvpilot.ingest.residency import Residency

SPACE = Space("m")


def chunk(name: int) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


class Layer:
    """A cache layer in memory; its directory can be away, slow, or forgetful."""

    def __init__(self) -> None:
        self.held: dict[bytes, frozenset[Tier]] = {}
        self.listed: dict[bytes, frozenset[Tier]] | None = None
        self.away = self.down = False
        self.slow_s = 0.0
        self.listings = 0
        self.busy_s = 0.0

    def _directory(self) -> dict[bytes, frozenset[Tier]]:
        if self.away or self.down:
            raise Unreachable("gone")
        return self.held if self.listed is None else self.listed

    async def directory_stats(self) -> DirectoryStats:
        listed = self._directory()
        count = sum(Tier.HOST in tiers for tiers in listed.values())
        mark = (len(listed), count, sum(hash((name, tiers)) for name, tiers in listed.items()))
        return DirectoryStats({Tier.HOST: count}, mark)

    async def list_keys(self) -> AsyncIterator[list[Placement]]:
        rows = list(self._directory().items())
        self.listings += 1
        self.busy_s += self.slow_s
        await asyncio.sleep(self.slow_s)
        for row in rows:
            yield [Placement(SPACE, *row)]

    async def usage(self) -> tuple[TierUsage, ...]:
        if self.down:
            raise Unreachable("gone")
        return (TierUsage(Tier.HOST, sum(Tier.HOST in tiers for tiers in self.held.values()), 100),)


BOTH, NONE = frozenset({Tier.HOST, Tier.DISK}), frozenset[Tier]()


async def until_seen(view: Residency, name: int, tiers: frozenset[Tier], within_s: float = 3.0) -> None:
    async with asyncio.timeout(within_s):
        while view.tiers(SPACE, chunk(name)) != tiers:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_changes_are_seen_and_announced_and_an_idle_directory_is_not_listed_again() -> None:
    layer, view, changes = Layer(), Residency(), []
    poller = DirectoryPoller(layer, view, 0.01, lambda: changes.append(1))  # type: ignore[arg-type]
    await poller.start()
    try:
        layer.held[chunk(1)] = BOTH
        await until_seen(view, 1, BOTH)
        listings = layer.listings
        await asyncio.sleep(0.2)
        assert layer.listings == listings
        assert not view.stale(poller.stats.last_success_at or 0)
        layer.held.clear()
        await until_seen(view, 1, NONE)
        assert len(changes) == 2
        assert view.usage[0].used_bytes in (0, 1)
    finally:
        await poller.close()


async def test_an_outage_ages_the_view_and_ends() -> None:
    layer, view = Layer(), Residency()
    poller = DirectoryPoller(layer, view, 0.01)  # type: ignore[arg-type]
    layer.held[chunk(1)] = BOTH
    await poller.start()
    try:
        await until_seen(view, 1, BOTH)
        layer.away = True
        seen_at = view.directory_at or 0
        await asyncio.sleep(0.3)
        assert poller.stats.error == "gone" and poller.stats.failures >= 1
        assert view.tiers(SPACE, chunk(1)) == BOTH
        assert (view.directory_at or 0) <= seen_at + 0.1
        layer.held[chunk(2)] = BOTH
        layer.away = False
        poller.nudge()
        await until_seen(view, 2, BOTH)
        assert poller.stats.error == ""
    finally:
        await poller.close()


async def test_a_directory_that_came_back_empty_is_not_believed() -> None:
    layer, view, clock = Layer(), Residency(), 1000.0
    poller = DirectoryPoller(layer, view, 0.01, clock=lambda: clock)  # type: ignore[arg-type]
    for name in range(10):
        layer.held[chunk(name)] = BOTH
    await poller.poll()
    assert view.absence_is_certain(Tier.HOST)
    layer.listed = {}
    for _ in range(4):
        clock += 10
        await poller.poll()
    assert not view.absence_is_certain(Tier.HOST)
    layer.listed = None
    for _ in range(4):
        clock += 10
        await poller.poll()
    assert view.absence_is_certain(Tier.HOST)
    assert view.tiers(SPACE, chunk(3)) == BOTH


async def test_a_huge_directory_is_listed_a_tenth_of_the_time_at_most() -> None:
    layer, view = Layer(), Residency()
    layer.slow_s = 0.03
    poller = DirectoryPoller(layer, view, 0.01)  # type: ignore[arg-type]
    await poller.start()
    try:
        for name in range(100):
            layer.held[chunk(name)] = BOTH
            poller.nudge()
            await asyncio.sleep(0.01)
    finally:
        await poller.close()
    assert layer.busy_s <= 0.25, "of a second and more"
