"""LMCache in multi-process mode, driven over HTTP: one or several nodes and their coordinator.

What was found out about 0.5.6, by reading and by running it, and matters to callers:

* **The directory follows the nodes by about 1 s** (they flush events once a second), so :meth:`locate`
  right after an action may still show the state before it.
* **The directory forgets, and never relearns.** Nodes send changes only. What happened while the coordinator
  was away is lost for good: stored keys stay unlisted until they are stored anew, evicted keys stay listed.
  A restarted coordinator begins empty unless it was started with ``--checkpoint-path``. Compare
  :meth:`directory_stats` with :meth:`usage` to notice.
* **A restarted node deletes old files without telling.** For L2 keys stored before a node's restart the
  native disk adapters emit no delete event (they report only keys they stored in this life), so the directory
  would list them for ever. This class remembers such drops and does not show them again. The node's own byte
  count of the disk tier starts at zero after a restart, too.
* **Prefetch** looks at every chunk by itself: missing ones leave holes, chunks already in L1 count as found
  and become recently used. When L1 has no room the rest is left out, which only the count tells.
* **Deleting skips what is locked**: L1 keys being written, read by a request, or copied to L2 at this moment.
  They come back as ``skipped``; ask again a little later. The L2 copy of a skipped key is deleted all the
  same, and a copy to L2 that was under way ends after the delete and brings the key back. So look again after
  an evict (the store path is asynchronous: seconds under load).
* The node counts every L2 key it was asked to delete as deleted, whether it was there or not.
* Pins in LMCache's coordinator do not hold against deletes on a node: kvpilot does not use them.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Self

from kvpilot.backends import lmcache_wire as wire
from kvpilot.backends.base import (
    BackendError,
    BadAnswer,
    Capabilities,
    DirectoryStats,
    DropResult,
    Placement,
    PrefetchResult,
    Unreachable,
)
from kvpilot.backends.http import Peer
from kvpilot.backends.lmcache_node import Node
from kvpilot.config import Config
from kvpilot.domain import Space, Tier, TierUsage, TokenArray

_LOOKUP_KEYS = 500
"""Keys per directory lookup: each row of the answer carries the chunk's tokens (about 2 KB)."""

_PAGE_OVERLAP = 500
"""Rows asked twice between pages, since deletions meanwhile shift what follows."""

_START_SLACK_S = 3
"""A node's event log and its directory events stamp the node's start seconds apart."""

_MAX_REMEMBERED_DROPS = 200_000


class LMCacheBackend:
    """Implements :class:`~kvpilot.backends.base.Backend`.

    ``world_size``: tensor- × pipeline-parallel ranks of the engine; a chunk is one key per rank and is in a
    tier only when all of them are. With several nodes a chunk is in HOST when any node has it, a drop goes to
    all nodes, and a prefetch warms all of them (its result is the worst node's). An L2 pool that nodes share
    is deleted through the first of them; the directory learns of it only if that node stored the keys.
    """

    name = "lmcache"

    def __init__(
        self,
        nodes: Sequence[str],
        coordinator: str,
        *,
        chunk_size: int = 256,
        hash_algorithm: str = "blake3",
        world_size: int = 1,
        timeout_s: float = 5.0,
    ) -> None:
        self.chunk_size = chunk_size
        self._hash_algorithm = hash_algorithm
        self._world_size = world_size
        self._nodes = [Node(url, timeout_s=timeout_s) for url in nodes]
        self._coordinator = Peer(coordinator, timeout_s=timeout_s) if coordinator else None
        self._dropped: OrderedDict[tuple[Space, bytes], Mapping[str, int]] = OrderedDict()

    @classmethod
    def from_config(cls, config: Config) -> Self:
        cache = config.lmcache
        return cls(
            cache.nodes,
            cache.coordinator,
            chunk_size=cache.chunk_size,
            hash_algorithm=cache.hash_algorithm,
            world_size=config.engine.world_size,
            timeout_s=cache.timeout_s,
        )

    async def start(self) -> None:
        """Nothing to do: connections are opened on first use."""

    async def close(self) -> None:
        for peer in (
            *(node.peer for node in self._nodes),
            *([self._coordinator] if self._coordinator else []),
        ):
            await peer.close()

    # ---------------------------------------------------------------- asking

    async def capabilities(self) -> Capabilities:
        """Asked from the nodes. Raises BadAnswer when their chunking is not what kvpilot is configured for:
        every chunk hash would be wrong."""
        tiers = {Tier.HOST}
        for node in self._nodes:
            status = await node.status()
            if (status.chunk_size, status.hash_algorithm) != (self.chunk_size, self._hash_algorithm):
                raise BadAnswer(
                    f"{node.peer.url} hashes {status.chunk_size}-token chunks with {status.hash_algorithm}; "
                    "set lmcache.chunk_size and lmcache.hash_algorithm accordingly"
                )
            if (await node.facts(status)).adapters:
                tiers.add(Tier.DISK)
        return Capabilities(
            prefetch=Tier.DISK in tiers,
            drop_tiers=frozenset(tiers),
            directory=self._coordinator is not None,
            chunk_size=self.chunk_size,
            hash_algorithm=self._hash_algorithm,
        )

    async def usage(self) -> tuple[TierUsage, ...]:
        """Bytes per tier, summed over the nodes, from their own accounting (the coordinator is not needed).

        The disk tier is left out when no node accounts for it (an L2 adapter without eviction).
        """
        statuses = await asyncio.gather(*(node.status() for node in self._nodes))
        host = [status.storage_manager.l1_usage for status in statuses]
        disk: list[wire.AdapterUsage] = []
        shared_seen: set[str] = set()
        for node, status in zip(self._nodes, statuses, strict=True):
            eviction = status.storage_manager.l2_eviction_controller
            for index, entry in enumerate(eviction.adapters if eviction else ()):
                adapters = (await node.facts(status)).adapters
                if index < len(adapters) and adapters[index].shared:
                    if adapters[index].type_name in shared_seen:
                        continue
                    shared_seen.add(adapters[index].type_name)
                disk.append(entry)
        usage = [TierUsage(Tier.HOST, sum(used for used, _ in host), sum(size for _, size in host))]
        if disk:
            used, size = (
                sum(entry.total_bytes_used for entry in disk),
                sum(e.total_capacity_bytes for e in disk),
            )
            usage.append(TierUsage(Tier.DISK, used, size))
        return tuple(usage)

    async def locate(self, space: Space, chunks: Sequence[bytes]) -> list[frozenset[Tier]]:
        """See :meth:`Backend.locate`; as of about a second ago. Raises Unreachable without a coordinator."""
        ranks = self._world_size
        per_call = max(1, _LOOKUP_KEYS // ranks)
        found: list[frozenset[Tier]] = []
        for first in range(0, len(chunks), per_call):
            batch = chunks[first : first + per_call]
            keys = wire.keys_of(space, batch, ranks)
            directory = self._directory()
            answer = await directory.call("POST", "/directory/lookup", wire.LookupAnswer, body={"keys": keys})
            if len(answer.results) != len(keys):
                raise BadAnswer(f"{directory.url}: {len(answer.results)} results for {len(keys)} keys")
            for index, chunk in enumerate(batch):
                rows = answer.results[index * ranks : (index + 1) * ranks]
                live = [self._live(space, chunk, row.placements) for row in rows]
                found.append(wire.tiers_held(live, ranks))
        return found

    async def directory_stats(self) -> DirectoryStats:
        stats = await self._directory().call("GET", "/directory/stats", wire.StatsAnswer)
        return DirectoryStats(
            {Tier.HOST: stats.l1_size_bytes, Tier.DISK: stats.l2_size_bytes},
            (stats.num_keys, stats.l1_count, stats.l1_size_bytes, stats.l2_count, stats.l2_size_bytes),
        )

    async def list_keys(self) -> AsyncIterator[list[Placement]]:
        """See :meth:`Backend.list_keys`. Pages overlap, so chunks may come twice; a chunk can be missed once
        when many before it are deleted between two pages."""
        ranks: dict[tuple[Space, bytes], dict[int, list[wire.WirePlacement]]] = {}
        offset = 0
        while True:
            answer = await self._directory().call(
                "GET",
                "/directory/keys",
                wire.ListAnswer,
                query={"offset": offset, "limit": wire.LIST_PAGE},
            )
            yield self._assemble(answer.keys, ranks)
            if len(answer.keys) < wire.LIST_PAGE:
                return
            offset += len(answer.keys) - _PAGE_OVERLAP

    # ---------------------------------------------------------------- acting

    async def prefetch(self, space: Space, tokens: TokenArray, *, timeout_s: float) -> PrefetchResult:
        """See :meth:`Backend.prefetch`. Each node's job is polled until it completes."""
        started = time.monotonic()
        whole = len(tokens) - len(tokens) % self.chunk_size
        if not whole:
            return PrefetchResult(0, 0, 0.0)
        body = {
            "model_name": space.model,
            "world_size": self._world_size,
            "token_ids": tokens[:whole].tolist(),
            "cache_salt": space.salt,
            "source_tier": wire.DISK_TIER,
            "target_tier": wire.HOST_TIER,
        }
        results = await asyncio.gather(*(node.prefetch(body, started + timeout_s) for node in self._nodes))
        return PrefetchResult(
            min(found for found, _ in results),
            max(total for _, total in results),
            time.monotonic() - started,
        )

    async def drop(
        self, space: Space, chunks: Sequence[bytes], tiers: Collection[Tier], *, force: bool = False
    ) -> DropResult:
        """See :meth:`Backend.drop`."""
        wanted = set(tiers) & {Tier.HOST, Tier.DISK}
        if not wanted or not chunks:
            return DropResult(0, 0)
        keys = wire.keys_of(space, reversed(chunks), self._world_size)
        deleted = skipped = 0
        failures: list[BackendError] = []
        errors: list[str] = []
        shared_done: set[str] = set()
        started_at: dict[str, int] = {}
        for node in self._nodes:
            try:
                result = await node.drop(keys, wanted, force, shared_done)
            except BackendError as failure:
                failures.append(failure)
                continue
            deleted += result.deleted
            skipped += result.skipped
            errors += result.errors
            if result.started_at:
                started_at[result.instance_id] = result.started_at
        if len(failures) == len(self._nodes):
            raise failures[0]
        if started_at:
            if len(self._nodes) == 1:
                # The node may have been known by another id in an earlier life.
                started_at[""] = next(iter(started_at.values()))
            self._remember_drop(space, chunks, started_at)
        return DropResult(
            deleted // self._world_size,
            -(-skipped // self._world_size),
            (*errors, *(str(failure) for failure in failures)),
        )

    # ---------------------------------------------------------------- internals

    def _directory(self) -> Peer:
        if self._coordinator is None:
            raise Unreachable("no LMCache coordinator is configured (lmcache.coordinator)")
        return self._coordinator

    def _remember_drop(self, space: Space, chunks: Sequence[bytes], started_at: Mapping[str, int]) -> None:
        for chunk in chunks:
            self._dropped[(space, chunk)] = started_at
            self._dropped.move_to_end((space, chunk))
        while len(self._dropped) > _MAX_REMEMBERED_DROPS:
            self._dropped.popitem(last=False)

    def _live(
        self, space: Space, chunk: bytes, placements: Sequence[wire.WirePlacement]
    ) -> Sequence[wire.WirePlacement]:
        """Without disk placements that a node's earlier life reported and its later life has deleted.

        Had the chunk been stored again since, the later life would have reported it.
        """
        dropped = self._dropped.get((space, chunk))
        if dropped is None:
            return placements
        return [
            place
            for place in placements
            if place.tier != wire.DISK_TIER
            or place.shared
            or place.incarnation >= dropped.get(place.instance_id, dropped.get("", 0)) - _START_SLACK_S
        ]

    def _assemble(
        self,
        rows: Sequence[wire.Located],
        ranks: dict[tuple[Space, bytes], dict[int, list[wire.WirePlacement]]],
    ) -> list[Placement]:
        """Chunks of which all ranks are listed by now; ``ranks`` keeps the others for later pages."""
        expected = [wire.kv_rank(self._world_size, rank) for rank in range(self._world_size)]
        page = []
        for row in rows:
            key = row.key
            if key.object_group_id or key.kv_rank not in expected:
                continue
            try:
                chunk = bytes.fromhex(key.chunk_hash_hex)
            except ValueError:
                raise BadAnswer(f"directory lists the chunk hash {key.chunk_hash_hex[:80]!r}") from None
            space = Space(key.model_name, key.cache_salt)
            if len(expected) == 1:
                complete = [self._live(space, chunk, row.placements)]
            else:
                seen = ranks.setdefault((space, chunk), {})
                seen[key.kv_rank] = list(row.placements)
                if len(seen) < len(expected):
                    continue
                complete = [self._live(space, chunk, placements) for placements in seen.values()]
                del ranks[(space, chunk)]
            tiers = wire.tiers_held(complete, self._world_size)
            if tiers:
                page.append(Placement(space, chunk, tiers))
        return page
