"""vLLM's own tiers below the device pool, DRAM and disk, given out by what sessions need.

``OffloadingConnector`` with ``KvpilotTieringSpec`` in its configuration: vLLM's tiering, whose DRAM gives up chunks in
the order of :mod:`kvpilot.engine.tier_order`, and which does not store what nobody will ask for. On CUDA the copies are
vLLM's own; on the CPU platform, which vLLM refuses here, a thread of ours makes them. Without kvpilot's scheduler
around it, it is vLLM's tiering with LRU.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadingWorker,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvpilot.engine.book import Book, Context, Hash
from kvpilot.engine.tier_disk import SessionDisk
from kvpilot.engine.tier_order import GROUP_BYTES, Key, TierOrder

if TYPE_CHECKING:
    from kvpilot.engine.inside import Inside

log = logging.getLogger("vllm.kvpilot")

DEFAULTS = {
    "eviction_policy": "SessionPolicy",
    "cache_policy_module_path": __name__,
    "offload_prompt_only": False,
}
"""Where the configuration says nothing. What a turn generated is part of the next turn's prompt."""


class SessionPolicy(CachePolicy):
    """vLLM's interface to :class:`TierOrder`."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.order: TierOrder[ChunkStatus] = TierOrder()
        self._lengths: dict[Key, int] = {}
        """Of chunks that are about to be put."""
        self.promoting: tuple[ReqContext, int] | None = None
        """While a chunk comes up from disk: who asked for it, and where in its context it ends."""

    def get(self, key: Key) -> ChunkStatus | None:
        return self.order.get(key)

    def on_store_miss(self, keys: Iterable[Key], req_context: ReqContext) -> None:
        self._lengths = {key: req_context.get_offload_key_position(key) or 0 for key in keys}

    def insert(self, key: Key, chunk: ChunkStatus) -> None:
        self.order.put(key, chunk, length=self._lengths.pop(key, 0), evictable=chunk.ref_cnt == 0)

    def remove(self, key: Key) -> None:
        self.order.remove(key)

    def touch(self, keys: Iterable[Key], req_context: ReqContext) -> None:
        self.order.use(reversed(list(keys)))

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[Key]],
        insertion_only_keys: set[Key],
        reused_keys: set[Key],
        req_context: ReqContext,
    ) -> None:
        self.order.use(reversed(order_request_keys(key_groups, req_context)))

    def evict(self, n: int, protected: set[Key]) -> list[tuple[Key, ChunkStatus]] | None:
        refuse = self._in_its_own_way if self.promoting is not None else None
        try:
            return self.order.evict(n, protected, time.monotonic(), refuse)
        except Exception:
            # A store or a load waits for this room: it gets it, in vLLM's own order from now on.
            log.exception("kvpilot's order of the tiers failed: from now on the least recently used goes")
            self.order.forget_book()
            return self.order.evict(n, protected, time.monotonic(), refuse)

    def _in_its_own_way(self, victim: Key) -> bool:
        """A chunk that comes up never takes the room of what the same request needs before it: in a tier smaller
        than the context the two would take turns for ever."""
        assert self.promoting is not None
        context, end = self.promoting
        position = context.get_offload_key_position(victim)
        return position is not None and position < end

    def clear(self) -> None:
        self.order.clear()

    def mark_evictable(self, key: Key) -> None:
        self.order.unpin(key)

    def mark_non_evictable(self, key: Key) -> None:
        self.order.pin(key)


@dataclass(frozen=True, slots=True)
class Dropped:
    """Chunks forgotten in DRAM, files deleted, and why that is not all; empty: it is."""

    dram: int
    disk: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Asker:
    """The context a request belongs to, kept with vLLM's own notes on the request."""

    context: Context
    last: bool


class SessionTiers(TieringOffloadingManager):
    """vLLM's manager of its tiers, with admission, and chunks dropped by command. ``groups``: the numbers of its KV
    groups."""

    def __init__(
        self, primary_tier: Any, secondary_tiers: list[Any], groups: Sequence[int], tokens: int
    ) -> None:
        super().__init__(primary_tier, secondary_tiers)
        self._inside: Inside | None = None
        self._policy = primary_tier._policy if isinstance(primary_tier._policy, SessionPolicy) else None
        self._disks = [tier for tier in secondary_tiers if isinstance(tier, SessionDisk)]
        self._orders: list[TierOrder[Any]] = [disk.order for disk in self._disks]
        if self._policy is not None:
            self._orders.append(self._policy.order)
        self._groups = groups
        self.tokens = tokens
        """Room in DRAM."""
        self.not_stored = 0
        """Chunks that nobody would have asked for."""

    def attach(self, inside: Inside) -> None:
        """From now on sessions decide."""
        self._inside = inside
        for order in self._orders:
            order.follow(inside.book)

    def detach(self) -> None:
        self._inside = None
        for order in self._orders:
            order.forget_book()

    # ------------------------------------------------------------ what vLLM asks

    def on_new_request(self, req_context: ReqContext, **kwargs: Any) -> RequestOffloadingContext:
        if self._inside is not None and (found := self._inside.asker(req_context.req_id)):
            req_context.set_state(_Asker(*found))
        return super().on_new_request(req_context, **kwargs)

    def prepare_store(self, keys: Collection[Key], req_context: ReqContext) -> PrepareStoreOutput | None:
        asker = req_context.get_state(_Asker)
        if asker is not None and self._inside is not None:
            try:
                keys = self._wanted(keys, asker, self._inside.book)
            except Exception:
                log.exception("kvpilot could not tell what is needed below: all of it is stored from now on")
                self.detach()
        return super().prepare_store(keys, req_context)

    def _wanted(self, keys: Collection[Key], asker: _Asker, book: Book) -> list[Key]:
        """Those that somebody will ask for."""
        wanted = [k for k in keys if book.needed(k[:-GROUP_BYTES], asker.context, last=asker.last)]
        self.not_stored += len(keys) - len(wanted)
        return wanted

    def _initiate_promotion(self, tier_idx: int, key: Key, req_context: ReqContext) -> bool:
        policy = self._policy
        if policy is None:
            return bool(super()._initiate_promotion(tier_idx, key, req_context))
        policy.promoting = (req_context, req_context.get_offload_key_position(key) or 0)
        try:
            return bool(super()._initiate_promotion(tier_idx, key, req_context))
        finally:
            policy.promoting = None

    # ------------------------------------------------------------ what kvpilot asks

    def drop(self, values: Iterable[Hash]) -> Dropped:
        """Forget these contents. Chunks in a transfer stay, and go first when room is needed."""
        primary, there = self.primary_tier, 0
        gone: list[Key] = []
        keys = [make_offload_key(value, group) for value in values for group in self._groups]
        for key in keys:
            chunk = primary._policy.get(key)
            if chunk is None:
                continue
            there += 1
            if chunk.ref_cnt == 0:
                primary._policy.remove(key)
                primary._free_chunk(chunk)
                primary._num_evictable_cache_chunks -= 1
                gone.append(key)
        if gone and primary.events is not None:
            primary.events.append(OffloadingEvent(keys=gone, medium=Medium.CPU, removed=True))
        there += sum(key in disk.order for disk in self._disks for key in keys)
        deleted = sum(disk.forget(keys) for disk in self._disks)
        reason = ""
        if len(gone) + deleted < there:
            reason = "some of it is being copied between the tiers"
        elif len(self._disks) < len(self.secondary_tiers):
            reason = "what lies in tiers of other kinds is not deleted"
        return Dropped(len(gone), deleted, reason)

    def status(self) -> dict[str, Any]:
        primary = self.primary_tier
        return {
            "chunks": primary._num_chunks,
            "free": primary._get_num_free_chunks(),
            "order": self._order(),
            "not_stored": self.not_stored,
            "below": [tier.tier_type for tier in self.secondary_tiers],
            "disk": [{"chunks": len(disk.order), "room": disk.room} for disk in self._disks],
        }

    def _order(self) -> str:
        """What decides in DRAM."""
        if self._policy is None:
            return type(self.primary_tier._policy).__name__
        return "sessions" if self._policy.order.follows else "recency"


class KvpilotTieringSpec(TieringOffloadingSpec):
    """``"spec_name": "KvpilotTieringSpec", "spec_module_path": "kvpilot.engine.tiers"``."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(replace(config, extra_config={**DEFAULTS, **config.extra_config}))
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            stock = super().get_manager()
            self._unname_region()
            groups = [group.group_id for group in self.config.groups]
            tokens = self.num_chunks // len(groups) * self.blocks_per_chunk * min(self.tokens_per_block)
            self._manager = SessionTiers(stock.primary_tier, stock.secondary_tiers, groups, tokens)
        return self._manager

    def _unname_region(self) -> None:
        """All workers have mapped it by now, as vLLM makes the scheduler after their caches: without a name its
        memory comes back however the engine ends."""
        region = self._scheduler_mmap
        if region is not None and not region._creator:
            with contextlib.suppress(OSError):
                Path(region.mmap_path).unlink()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            from kvpilot.engine.tier_copies import CpuPlatformWorker

            self._worker = CpuPlatformWorker(self, kv_caches)
        return self._worker


def tiers_of(scheduler: Any) -> SessionTiers | None:
    """The tiers below a scheduler's pool, where they are ours."""
    manager = getattr(getattr(scheduler.connector, "connector_scheduler", None), "manager", None)
    return manager if isinstance(manager, SessionTiers) else None
