"""A running stack in the hands of a benchmark: traffic, the control API, and what each layer says of itself."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from kvpilot.backends.engine_plugin import EnginePlugin
from kvpilot.backends.lmcache import LMCacheBackend
from kvpilot.context.chunks import ChunkHasher
from kvpilot.domain import Space, Tier
from kvpilot.replay.client import Control, Gateway
from kvpilot.replay.text import TextMaker
from kvpilot.stack.launch import Endpoints

_HITS = re.compile(r"^vllm:(external_)?prefix_cache_hits_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


class BenchError(RuntimeError):
    """The benchmark cannot go on; the message says what was not as it must be."""


@dataclass(frozen=True, slots=True)
class EngineHits:
    """Tokens vLLM found in its device pool and got from below, since it started."""

    device: int
    below: int


@dataclass(slots=True)
class Lab:
    """Everything a benchmark talks to. ``space`` is the default tenant's name space in the cache layer."""

    stack: Endpoints
    http: aiohttp.ClientSession
    gateway: Gateway
    control: Control
    backend: LMCacheBackend
    plugin: EnginePlugin
    texts: TextMaker
    space: Space

    @property
    def disk_folder(self) -> Path:
        return self.stack.state_dir / "disk"

    def chunks(self, tokens: Sequence[int]) -> list[bytes]:
        """The cache layer's hashes of the whole chunks of a context."""
        hasher = ChunkHasher(self.backend.chunk_size)
        return hasher.hashes(np.asarray(tokens, dtype=np.uint32))

    async def held(self, chunks: Sequence[bytes]) -> dict[Tier, int]:
        """How many of ``chunks`` each tier holds, by LMCache's directory (about a second old)."""
        located = await self.backend.locate(self.space, chunks)
        return {tier: sum(tier in tiers for tiers in located) for tier in (Tier.HOST, Tier.DISK)}

    async def until_held(
        self, chunks: Sequence[bytes], want: dict[Tier, int], timeout_s: float = 10.0
    ) -> bool:
        """Wait until the directory shows exactly these counts; False after ``timeout_s``."""
        until = time.monotonic() + timeout_s
        while True:
            held = await self.held(chunks)
            if all(held[tier] == count for tier, count in want.items()):
                return True
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.1)

    async def engine_hits(self) -> EngineHits:
        async with self.http.get(f"{self.stack.engine_url}/metrics") as response:
            found = dict(_HITS.findall(await response.text()))
        return EngineHits(int(float(found.get("", 0))), int(float(found.get("external_", 0))))

    async def tier_sizes(self) -> dict[str, int]:
        """Capacity in bytes of every bounded tier."""
        return {tier: usage["capacity_bytes"] for tier, usage in (await self.control.tiers()).items()}


@asynccontextmanager
async def lab(stack: Endpoints) -> AsyncIterator[Lab]:
    """Connections to ``stack``, closed at the end. Raises BenchError when the engine names no model."""
    engine = stack.config.engine
    backend = LMCacheBackend.from_config(stack.config)
    plugin = EnginePlugin.from_config(stack.config)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        async with http.get(f"{stack.engine_url}/v1/models") as response:
            models = (await response.json()).get("data") or []
        if not models:
            raise BenchError(f"{stack.engine_url} serves no model")
        root = engine.cache_model_name or models[0].get("root") or models[0]["id"]
        try:
            yield Lab(
                stack=stack,
                http=http,
                gateway=Gateway(http, stack.gateway_url, engine.served_model_name),
                control=Control(http, stack.control_url, stack.config.coordinator.token),
                backend=backend,
                plugin=plugin,
                texts=TextMaker.load(engine.tokenizer or engine.model),
                space=Space(model=root),
            )
        finally:
            await backend.close()
            await plugin.close()


def drop_page_cache(folder: Path) -> int:
    """Write a folder's files back and drop them from the kernel's page cache; returns how many there were.

    Only this process's view of the disk is touched: posix_fadvise(DONTNEED) after fdatasync, per file.
    """
    files = 0
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            files += 1
        finally:
            os.close(descriptor)
    return files
