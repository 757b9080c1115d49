"""Caches of single chunks against an independent implementation, libCacheSim, on the same accesses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpilot.sim.flat import Flat, FlatCache

THEIRS = {Flat.LRU: "LRU", Flat.LFU: "LFU", Flat.ARC: "ARC", Flat.S3FIFO: "S3FIFO"}


def accesses(seed: int, chunks: int, length: int) -> list[int]:
    """Popular chunks, scans, and chunks that come back soon: something for every policy to tell apart."""
    rng = np.random.default_rng(seed)
    out: list[int] = []
    while len(out) < length:
        kind = rng.integers(3)
        if kind == 0:
            out += (rng.zipf(1.3, 40) % chunks).tolist()
        elif kind == 1:
            begin = int(rng.integers(chunks))
            out += [(begin + i) % chunks for i in range(30)]
        else:
            out += rng.choice(out[-50:] or [0], 20).tolist()
    return out[:length]


def theirs(policy: Flat, capacity: int, trace: list[int]) -> list[bool]:
    libcachesim: Any = pytest.importorskip("libcachesim")
    cache = getattr(libcachesim, THEIRS[policy])(cache_size=capacity, hashpower=14)
    hits = []
    for chunk in trace:
        request = libcachesim.Request()
        request.obj_id, request.obj_size = chunk + 1, 1
        hits.append(bool(cache.get(request)))
    return hits


@pytest.mark.parametrize("policy", list(Flat), ids=lambda policy: policy.name)
@pytest.mark.parametrize("capacity", [30, 64, 300])
def test_hits_are_those_of_libcachesim(policy: Flat, capacity: int) -> None:
    trace = accesses(seed=capacity, chunks=600, length=6000)
    cache = FlatCache(policy, chunks=600, capacity=capacity, uses=len(trace))
    ours = [cache.access(chunk) for chunk in trace]
    assert ours == theirs(policy, capacity, trace)
    assert cache.used == capacity
