"""Puts a coordinator together from its configuration: backend, ingest, store, service, sockets, API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from fastapi import FastAPI

from kvpilot.backends.engine_plugin import EnginePlugin
from kvpilot.backends.lmcache import LMCacheBackend
from kvpilot.config import Config
from kvpilot.context.engine_render import EngineRenderer
from kvpilot.context.segments import Segmenter
from kvpilot.control.api import create_app
from kvpilot.control.metrics import metrics_text
from kvpilot.control.seed import Seed
from kvpilot.control.store import FLUSH_S, Store
from kvpilot.coordinator.placing import PlannerSettings
from kvpilot.coordinator.planner import Planner
from kvpilot.coordinator.recorder import Recorder
from kvpilot.coordinator.server import LinkServer
from kvpilot.coordinator.service import CoordinatorService, ServiceSettings
from kvpilot.coordinator.view import Reader
from kvpilot.domain import Event, Space
from kvpilot.ingest.directory import DirectoryPoller
from kvpilot.ingest.residency import Residency
from kvpilot.ingest.vllm_events import KvEventSubscriber
from kvpilot.link import command_endpoint, event_socket, make_runtime_dir

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 30.0
FORECAST_MEMORY = "forecasts"
REMEMBER_S = 300.0
"""How often what was learned is written, some MB; what a crash loses of it is learned again."""


class Runtime:
    """Everything of one coordinator process. ``jobs`` run for ever; ``close`` after they were cancelled."""

    def __init__(self, config: Config, model: str) -> None:
        self.config = config
        self.store = Store(config.state_dir / "coordinator.sqlite")
        self.backend = LMCacheBackend.from_config(config)
        self.plugin = EnginePlugin.from_config(config)
        self.residency = Residency()
        self.poller = DirectoryPoller(self.backend, self.residency, config.coordinator.directory_poll_s)
        self.events: KvEventSubscriber | None = None
        if config.engine.kv_events:
            self.events = KvEventSubscriber(
                config.engine.kv_events,
                self.residency,
                self.poller.stir,
                model=model,
                replay_endpoint=config.engine.kv_events_replay,
                host_hints=len(config.lmcache.nodes) == 1,
            )
        served = config.engine.served_model_name or Path(config.engine.model).name
        self.renderer = EngineRenderer(config.engine.url, served, api_key=config.engine.api_key)
        self.service = CoordinatorService(
            backend=self.backend,
            residency=self.residency,
            segmenter=Segmenter.for_model(config.engine.tokenizer or model, self.renderer),
            space_of=lambda salt: Space(model=model, salt=salt),
            settings=ServiceSettings(
                mode=config.coordinator.mode,
                recheck_s=config.coordinator.recheck_s,
                session_idle_s=config.coordinator.session_idle_s,
                request_timeout_s=config.gateway.read_timeout_s * 1.5,
                block_size=config.engine.block_size,
            ),
            render=self.renderer.prompt,
            plugin=self.plugin,
            nudge=self.poller.nudge,
        )
        self.link = LinkServer(
            event_socket(config), command_endpoint(config), self._on_event, self.service.command
        )
        self.seed = Seed(self.service, config.tenants, config.coordinator.token)
        if config.coordinator.record:
            self.service.recorder = Recorder(
                Path(config.coordinator.record),
                config.lmcache.chunk_size,
                config.coordinator.record_mb * 1_000_000,
                config.coordinator.record_files,
            )
        reader = Reader(self.service)
        self.planner = Planner(self.service, PlannerSettings(budgets=config.budgets))
        self.app: FastAPI = create_app(
            self.service,
            self.planner,
            reader,
            lambda: metrics_text(self.service),
            config.coordinator.token,
            self.seed,
        )

    @classmethod
    async def create(cls, config: Config) -> Runtime:
        """Waits for the engine where it has to be asked for its model's name."""
        make_runtime_dir(config)
        runtime = cls(config, config.engine.cache_model_name or await ask_model_name(config))
        await runtime.backend.start()
        runtime.restore()
        await runtime.poller.start()
        if runtime.events is not None:
            await runtime.events.start()
        return runtime

    def _on_event(self, event: Event) -> None:
        self.service.handle(event)

    def restore(self) -> None:
        """Bring back what the store holds, before the first event is taken in."""
        service, store = self.service, self.store
        learned = store.load_memory(FORECAST_MEMORY)
        if learned is not None:
            service.forecasts.remember(learned)
        for session, threads in store.load_sessions():
            service.restore(session, threads)
        closed, pending = store.load_actions()
        for record in closed:
            service.actions.adopt(record)
        service.actions.listener = store.put_action
        service.on_session = store.session_changed
        service.on_forget = store.session_forgotten
        service.resume(pending)
        if service.book.sessions:
            log.info("restored %d sessions, %d open actions", len(service.book.sessions), len(pending))

    def jobs(self) -> list[Callable[[], Awaitable[Any]]]:
        """Coroutines that run for ever; one that ends is a fault."""
        recorder = self.service.recorder
        return [
            *([recorder.run] if recorder is not None else []),
            self.link.run,
            self.service.segments.run,
            self.service.executor.watch_loop,
            self.service.device.run,
            lambda: self.planner.run(self.config.coordinator.tick_s),
            self._flush_loop,
            self._housekeeping,
            self._remember_loop,
        ]

    async def _flush_loop(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.store.flush(self.service.references, self.service.forecasts.stored)
            except Exception:
                log.exception("the store could not be written; going on without")

    async def _housekeeping(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self.service.forecasts.forecaster.tick(self.service.clock())
            try:
                self.store.prune_actions()
            except Exception:
                log.exception("the store could not be written; going on without")

    async def _remember_loop(self) -> None:
        while True:
            await asyncio.sleep(REMEMBER_S)
            await self._remember()

    async def _remember(self) -> None:
        memory = self.service.forecasts.memory()
        try:
            await asyncio.to_thread(self.store.put_memory, FORECAST_MEMORY, memory)
        except Exception:
            log.exception("what forecasts have learned could not be written; going on without")

    async def close(self) -> None:
        await self.service.close()
        if self.events is not None:
            await self.events.close()
        await self.poller.close()
        await self.store.flush(self.service.references, self.service.forecasts.stored)
        await self._remember()
        if self.service.recorder is not None:
            await self.service.recorder.flush()
        await self.renderer.close()
        await self.plugin.close()
        await self.backend.close()
        self.store.close()


async def ask_model_name(config: Config) -> str:
    """The name under which the cache layer keys the engine's KV: vLLM tells it as ``root`` of its model."""
    headers = {"Authorization": f"Bearer {config.engine.api_key}"} if config.engine.api_key else {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5), headers=headers) as client:
        while True:
            try:
                async with client.get(f"{config.engine.url}/v1/models") as response:
                    models = (await response.json())["data"]
                    return str(models[0].get("root") or models[0]["id"])
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
                log.info("waiting for the engine at %s: %s", config.engine.url, error)
                await asyncio.sleep(1.0)
