"""Copies between vLLM's KV tensors and its shared region in DRAM, on the CPU platform, where vLLM has none.

One thread makes them, in the order in which they were asked for, beside the engine's own work: vLLM asks for a store
when its source is written, and waits for one before the source is written anew.
"""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

if TYPE_CHECKING:
    from kvpilot.engine.tiers import KvpilotTieringSpec


class CpuPlatformWorker(OffloadingWorker):
    """vLLM's worker interface over plain memory copies."""

    def __init__(self, spec: KvpilotTieringSpec, kv_caches: CanonicalKVCaches) -> None:
        if spec.config.canonical_layout:
            raise ValueError("canonical_layout is not there on the CPU platform: leave it out")
        self._per_chunk = spec.blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._region = SharedOffloadRegion(
            engine_id=spec._engine_id,
            num_chunks=spec.num_chunks,
            rank=0 if spec.replicated_layout else spec.config.parallel.rank,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        self._device: list[torch.Tensor] = []
        self._host: list[torch.Tensor] = []
        for cache in kv_caches.tensors:
            self._device.append(cache.tensor.view(torch.int8).view((-1, cache.page_size_bytes)))
            self._host.append(self._region.create_next_worker_view(cache.page_size_bytes * self._per_chunk))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvpilot-tiers")
        self._under_way: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        done = [job_id for job_id, future in self._under_way.items() if future.done()]
        return [self._under_way.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        wait([self._under_way[job_id] for job_id in job_ids if job_id in self._under_way])

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True)
        self._device.clear()
        self._host.clear()
        # Its name is gone already, as soon as the scheduler has mapped it.
        self._region._creator = self._region._creator and Path(self._region.mmap_path).exists()
        self._region.cleanup()

    def _submit(self, job_id: int, blocks: GPULoadStoreSpec, chunks: Any, *, store: bool) -> bool:
        self._under_way[job_id] = self._thread.submit(self._copy, job_id, blocks, chunks, store)
        return True

    def _copy(self, job_id: int, blocks: GPULoadStoreSpec, chunks: Any, store: bool) -> TransferResult:
        began, moved = time.perf_counter(), 0
        first_block = first_chunk = 0
        for group, (size, index) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            if not size:
                continue
            # The first chunk may begin before the first block that is meant.
            skipped = index % self._per_chunk
            last_chunk = first_chunk + -(-(skipped + size) // self._per_chunk)
            block_ids = blocks.block_ids[first_block : first_block + size]
            chunk_ids = chunks.block_ids[first_chunk:last_chunk]
            first_block, first_chunk = first_block + size, last_chunk
            for ref in self._refs[group]:
                device, host = np.empty(size, np.uint64), np.empty(size, np.uint64)
                compute_sub_block_ptrs(block_ids, 1, device, self._device[ref.tensor_idx])
                compute_sub_block_ptrs(
                    chunk_ids, self._per_chunk, host, self._host[ref.tensor_idx], skip_count=skipped
                )
                pairs = zip(device.tolist(), host.tolist(), strict=True)
                for in_pool, below in pairs:
                    source, target = (in_pool, below) if store else (below, in_pool)
                    ctypes.memmove(target, source, ref.page_size_bytes)
                moved += size * ref.page_size_bytes
        return TransferResult(
            job_id=job_id, success=True, transfer_size=moved, transfer_time=time.perf_counter() - began
        )
