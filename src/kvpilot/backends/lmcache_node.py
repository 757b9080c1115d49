"""One LMCache server ("node"): its facts, and deletes and prefetches on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvpilot.backends import lmcache_wire as wire
from kvpilot.backends.base import BackendError, BadAnswer, NotReady, Refused, TimedOut
from kvpilot.backends.http import Peer
from kvpilot.domain import Tier

_DELETE_KEYS = 2_000
"""Keys per delete: well below LMCache's limit of 10,000, so that one call stays within its time-out."""

_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.1
_SHORTEST_POLL_TIMEOUT_S = 0.25


@dataclass(frozen=True, slots=True)
class Adapter:
    """An L2 adapter; ``shared``: one pool that all nodes mount."""

    type_name: str
    shared: bool


@dataclass(frozen=True, slots=True)
class NodeFacts:
    instance_id: str
    adapters: tuple[Adapter, ...]


@dataclass(frozen=True, slots=True)
class NodeDrop:
    deleted: int
    skipped: int
    errors: tuple[str, ...]
    started_at: int
    """When the node was started, if it deleted everything from disk as asked; else 0."""
    instance_id: str


class Node:
    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.peer = Peer(url, timeout_s=timeout_s)
        self._facts: NodeFacts | None = None
        self._facts_of_start = -1

    async def status(self) -> wire.NodeStatus:
        return await self.peer.call("GET", "/status", wire.NodeStatus)

    async def facts(self, status: wire.NodeStatus) -> NodeFacts:
        """What does not change while the node lives; asked again after a restart (``status`` tells)."""
        if self._facts is None or self._facts_of_start != status.started_at:
            config = await self.peer.call("GET", "/config", wire.NodeConfig)
            listed = await self.peer.call("GET", "/config/adapters", wire.AdapterList)
            settings = config.storage_manager.l2_adapter_config
            shared = [adapter.shared for adapter in settings.adapters] if settings else []
            shared += [False] * (len(listed.adapters) - len(shared))
            self._facts = NodeFacts(
                config.mp.instance_id,
                tuple(
                    Adapter(entry.type_name, flag)
                    for entry, flag in zip(listed.adapters, shared, strict=False)
                ),
            )
            self._facts_of_start = status.started_at
        return self._facts

    async def drop(
        self, keys: Sequence[wire.Key], tiers: Collection[Tier], force: bool, shared_done: set[str]
    ) -> NodeDrop:
        """Delete ``keys`` in the order given, host copies first. ``shared_done`` names shared adapters that
        another node has deleted from, and is added to. Raises BackendError when nothing could be done."""
        targets: list[tuple[str, str | None]] = [(wire.HOST_TIER, None)] if Tier.HOST in tiers else []
        started_at, instance_id = 0, ""
        if Tier.DISK in tiers:
            status = await self.status()
            facts = await self.facts(status)
            started_at, instance_id = status.started_at, facts.instance_id
            for adapter in facts.adapters:
                if adapter.shared and adapter.type_name in shared_done:
                    continue
                targets.append((wire.DISK_TIER, adapter.type_name))
                if adapter.shared:
                    shared_done.add(adapter.type_name)
        deleted = skipped = done = 0
        errors: list[str] = []
        failure: BackendError | None = None
        for first in range(0, len(keys), _DELETE_KEYS):
            batch = keys[first : first + _DELETE_KEYS]
            for tier, adapter_name in targets:
                body = wire.delete_body(batch, tier, force, adapter_name)
                try:
                    answer = await self.peer.call("DELETE", "/cache/objects", wire.DeleteAnswer, body=body)
                except BackendError as error:
                    failure = error
                    errors.append(str(error))
                    continue
                done += 1
                deleted += answer.deleted
                skipped += answer.skipped
                if not answer.ok:
                    errors.append(f"{self.peer.url} {adapter_name or tier}: {answer.error}")
        if failure is not None and not done:
            raise failure
        return NodeDrop(deleted, skipped, tuple(errors), 0 if errors else started_at, instance_id)

    async def prefetch(self, body: dict[str, Any], deadline: float) -> tuple[int, int]:
        """Run one prefetch job to its end; (found, total) in chunks. ``deadline``: of the monotonic clock."""
        try:
            job = await self.peer.call("POST", "/cache/prefetches", wire.PrefetchAccepted, body=body)
        except Refused as refusal:
            if refusal.status == 503:
                raise NotReady(str(refusal), refusal.status) from None
            raise
        if job.status == "noop":
            return 0, 0
        path = f"/cache/prefetches/{job.request_id}"
        pause = _FIRST_POLL_S
        while True:
            await asyncio.sleep(pause)
            pause = min(pause * 1.6, _LAST_POLL_S)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut(f"{self.peer.url}: prefetch of {job.chunks} chunks is still running")
            try:
                state = await self.peer.call(
                    "GET", path, wire.PrefetchState, timeout_s=max(left, _SHORTEST_POLL_TIMEOUT_S)
                )
            except Refused as refusal:
                # An outcome is told once. It got lost on its way, or the node was restarted meanwhile.
                if refusal.status == 404:
                    raise BadAnswer(f"{self.peer.url}: the outcome of a prefetch was lost") from None
                raise
            if state.status == "completed":
                per_chunk = max(1, state.total_keys // max(1, job.chunks))
                return state.found_keys // per_chunk, job.chunks
