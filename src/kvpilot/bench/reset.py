"""Empty tiers between the rounds of a benchmark, so that no round lives off another."""

from __future__ import annotations

import asyncio
import time

from kvpilot.bench.lab import BenchError, Lab
from kvpilot.domain import Space, Tier

_BOTH = (Tier.HOST, Tier.DISK)


async def reset_tiers(lab: Lab, timeout_s: float = 30.0) -> int:
    """Empty the device pool, host memory and the disk tier; returns how many chunks were dropped.

    kvpilot still knows its sessions: rounds that play the same texts belong to tenants of their own.
    Needs vLLM's development endpoints (``engine.dev``) and idle engines. Raises BenchError when a tier is not
    empty after ``timeout_s`` seconds.
    """
    until = time.monotonic() + timeout_s
    await reset_device(lab, until)
    dropped: set[tuple[Space, bytes]] = set()
    while True:
        listed: dict[Space, list[bytes]] = {}
        async for page in lab.backend.list_keys():
            for place in page:
                listed.setdefault(place.space, []).append(place.chunk)
        usage = {entry.tier: entry.used_bytes for entry in await lab.backend.usage()}
        if not listed and not any(usage.get(tier, 0) for tier in _BOTH):
            return len(dropped)
        if time.monotonic() > until:
            left = ", ".join(f"{tier} {usage.get(tier, 0)} bytes" for tier in _BOTH)
            raise BenchError(f"the cache tiers are not empty after {timeout_s:.0f} s: {left}")
        for space, chunks in listed.items():
            await lab.backend.drop(space, chunks, _BOTH)
            dropped.update((space, chunk) for chunk in chunks)
        await asyncio.sleep(0.5)


async def reset_device(lab: Lab, until: float) -> None:
    """Forget what vLLM's own pool holds; tried again while transfers still hold blocks."""
    url = f"{lab.stack.engine_url}/reset_prefix_cache"
    while True:
        async with lab.http.post(url) as response:
            if response.status == 404:
                raise BenchError("the engine has no /reset_prefix_cache: start it with engine.dev = true")
            body = await response.json(content_type=None) if response.status == 200 else {}
        if (body or {}).get("success", True) and response.status == 200:
            return
        if time.monotonic() > until:
            raise BenchError("vLLM did not reset its prefix cache: requests or transfers are still running")
        await asyncio.sleep(0.3)
