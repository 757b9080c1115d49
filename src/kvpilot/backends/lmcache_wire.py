"""Shapes and names of LMCache's HTTP interfaces (0.5.6), as far as kvpilot uses them.

Sources: ``lmcache/v1/multiprocess/http_apis`` (node), ``lmcache/v1/mp_coordinator/http_apis`` and
``schemas.py`` (coordinator), ``lmcache/v1/distributed/api.py`` (keys). Unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvpilot.domain import Space, Tier

HOST_TIER = "l1"
DISK_TIER = "l2"
LIST_PAGE = 5_000
"""LMCache allows 10,000; a page of 5,000 takes about half a second on two cores."""


class Key(msgspec.Struct, frozen=True):
    chunk_hash_hex: str
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


class WirePlacement(msgspec.Struct, frozen=True):
    instance_id: str
    tier: str
    incarnation: int = 0
    size_bytes: int = 0
    shared: bool = False


class Located(msgspec.Struct, frozen=True):
    """A row of ``/directory/lookup`` or ``/directory/keys``."""

    key: Key
    placements: list[WirePlacement] = []


class LookupAnswer(msgspec.Struct, frozen=True):
    results: list[Located]


class ListAnswer(msgspec.Struct, frozen=True):
    total: int
    keys: list[Located]


class StatsAnswer(msgspec.Struct, frozen=True):
    num_keys: int
    num_placements: int
    l1_count: int
    l1_size_bytes: int
    l2_count: int
    l2_size_bytes: int


class DeleteAnswer(msgspec.Struct, frozen=True):
    deleted: int
    skipped: int
    ok: bool
    error: str = ""


class PrefetchAccepted(msgspec.Struct, frozen=True):
    chunks: int
    status: str
    request_id: str = ""


class PrefetchState(msgspec.Struct, frozen=True):
    status: str
    found_keys: int = 0
    total_keys: int = 0


class AdapterUsage(msgspec.Struct, frozen=True):
    total_bytes_used: int
    total_capacity_bytes: int = 0


class EvictionStatus(msgspec.Struct, frozen=True):
    adapters: list[AdapterUsage] = []


class StorageStatus(msgspec.Struct, frozen=True):
    l1_usage: tuple[int, int]
    l2_eviction_controller: EvictionStatus | None = None


class EventLogStatus(msgspec.Struct, frozen=True):
    incarnation: int = 0


class NodeStatus(msgspec.Struct, frozen=True):
    """``GET /status`` of a node."""

    chunk_size: int
    hash_algorithm: str
    storage_manager: StorageStatus
    kv_events: EventLogStatus | None = None

    @property
    def started_at(self) -> int:
        """Unix seconds of the node's start, within a few seconds; 0 = not told."""
        return self.kv_events.incarnation // 1_000_000_000 if self.kv_events else 0


class AdapterConfig(msgspec.Struct, frozen=True):
    shared: bool = False


class AdapterConfigs(msgspec.Struct, frozen=True):
    adapters: list[AdapterConfig] = []


class StorageConfig(msgspec.Struct, frozen=True):
    l2_adapter_config: AdapterConfigs | None = None


class ServerConfig(msgspec.Struct, frozen=True):
    instance_id: str = ""


class NodeConfig(msgspec.Struct, frozen=True):
    """``GET /config`` of a node."""

    mp: ServerConfig
    storage_manager: StorageConfig


class AdapterEntry(msgspec.Struct, frozen=True):
    type_name: str


class AdapterList(msgspec.Struct, frozen=True):
    """``GET /config/adapters`` of a node: its L2 adapters, in the order of ``NodeConfig``."""

    adapters: list[AdapterEntry] = []


def kv_rank(world_size: int, rank: int) -> int:
    """LMCache's name of one worker's slice of a chunk (``ObjectKey.ComputeKVRank``)."""
    return world_size << 24 | rank << 16 | world_size << 8 | rank


def keys_of(space: Space, chunks: Iterable[bytes], world_size: int) -> list[Key]:
    """Every key of every chunk: one per rank, chunk by chunk."""
    return [
        Key(chunk.hex(), space.model, kv_rank(world_size, rank), 0, space.salt)
        for chunk in chunks
        for rank in range(world_size)
    ]


def tiers_held(rows: Sequence[Sequence[WirePlacement]], world_size: int) -> frozenset[Tier]:
    """Tiers that hold a whole chunk. ``rows``: the live placements of each of its ranks.

    A chunk is on disk when every rank is somewhere, in host memory when one node has every rank.
    """
    if len(rows) < world_size:
        return frozenset()
    tiers = set()
    on_disk = [any(place.tier == DISK_TIER for place in row) for row in rows]
    if all(on_disk):
        tiers.add(Tier.DISK)
    nodes = [{place.instance_id for place in row if place.tier == HOST_TIER} for row in rows]
    if set.intersection(*nodes):
        tiers.add(Tier.HOST)
    return frozenset(tiers)


def delete_body(keys: Sequence[Key], tier: str, force: bool, adapter: str | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {"keys": keys, "tier": tier, "force": force}
    if adapter is not None:
        body["adapter"] = adapter
    return body
