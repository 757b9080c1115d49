"""vLLM's file-system tier within a budget, given out by what sessions need.

vLLM's own never deletes a file. This one counts what it holds, also what earlier runs left in the folder, and makes
room in the order of :mod:`kvpilot.engine.tier_order`. It counts its own engine's files only: engines that share a
folder each keep to their own budget.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from kvpilot.engine.tier_order import Key, TierOrder


class SessionDisk(FileSystemTierManager):
    """``{"type": "SessionDisk", "module_path": "kvpilot.engine.tier_disk", "root_dir": …, "gb": …}``, and what vLLM's
    ``fs`` takes. ``gb``: GiB; without it as much as there is room for."""

    def __init__(self, *args: Any, gb: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.order: TierOrder[None] = TierOrder()
        self.room = max(1, int(gb * 2**30) // self._block_size) if gb else None
        self._users: Counter[Key] = Counter()
        self._under_way: dict[int, TransferJob] = {}
        self._refused: list[JobResult] = []
        self._going: set[Key] = set()
        """Given up, but not yet deleted."""
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="kvpilot-disk")
        for key in self._found():
            self.order.put(key, None, evictable=True)
        self._make_room(0, ())

    def forget(self, keys: Iterable[Key]) -> int:
        """Delete what lies under these keys, but for what a transfer uses; returns how many files."""
        gone = [key for key in keys if key in self.order and not self._users[key]]
        for key in gone:
            self.order.remove(key)
        self._delete(gone)
        return len(gone)

    # ------------------------------------------------------------ what vLLM asks

    def lookup(self, key: Key, req_context: ReqContext) -> LookupResult:
        return LookupResult.MISS if key in self._going else super().lookup(key, req_context)

    def submit_store(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        if not self._make_room(sum(key not in self.order for key in keys), keys):
            # All the rest is in use: nothing is written.
            self._refused.append(JobResult(job_id=job_metadata.job_id, success=False))
            return
        for key in keys:
            if key in self.order:
                self.order.remove(key)
            length = job_metadata.req_context.get_offload_key_position(key) or 0
            self.order.put(key, None, length=length)
            self._going.discard(key)
        self._begin(job_metadata, keys)
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        self.order.use(reversed(keys))
        self._begin(job_metadata, keys)
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        refused, self._refused = self._refused, []
        results = [*refused, *super().get_finished_jobs()]
        for result in results:
            if (job := self._under_way.pop(result.job_id, None)) is not None:
                self._end(job, result)
        return results

    def shutdown(self) -> None:
        super().shutdown()
        self._remover.shutdown(wait=True)

    # ------------------------------------------------------------ what is held

    def _begin(self, job: TransferJob, keys: list[Key]) -> None:
        self._under_way[job.job_id] = job
        self._users.update(keys)
        for key in keys:
            self.order.pin(key)

    def _end(self, job: TransferJob, result: JobResult) -> None:
        for key in job.keys:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self.order.unpin(key)
        if not job.is_promotion and not result.success:
            self.forget(job.keys)

    def _make_room(self, count: int, protected: Iterable[Key]) -> bool:
        """For so many files more; whether there is room now."""
        excess = len(self.order) + count - self.room if self.room is not None else 0
        if excess <= 0:
            return True
        evicted = self.order.evict(excess, set(protected), time.monotonic())
        self._delete([key for key, _ in evicted or ()])
        return evicted is not None

    def _delete(self, keys: list[Key]) -> None:
        if keys:
            self._going.update(keys)
            self._lookup_manager.mark_miss(keys)
            self._remover.submit(self._unlink, keys)

    def _unlink(self, keys: list[Key]) -> None:
        for key in keys:
            if key not in self.order:  # Not stored again meanwhile.
                with contextlib.suppress(OSError):
                    Path(self.file_mapper.get_file_name(key)).unlink()
            self._going.discard(key)

    def _found(self) -> list[Key]:
        """What lies in the folder already, oldest first."""
        root = Path(f"{self.file_mapper.base_path}_r{self.file_mapper.rank}")
        found: list[tuple[float, Key]] = []
        for file in root.glob("*/*_g*/*.bin"):
            with contextlib.suppress(OSError, ValueError):
                group = int(file.parent.name.rpartition("_g")[2])
                found.append((file.stat().st_mtime, make_offload_key(bytes.fromhex(file.stem), group)))
        return [key for _, key in sorted(found)]
