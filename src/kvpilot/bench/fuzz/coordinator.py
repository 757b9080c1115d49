"""The real coordinator service over a simulated cache layer, and a wire to it that has no sockets."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from unittest.mock import patch

import msgspec

from kvpilot import link as wire
from kvpilot.backends.memory import MemoryLayer
from kvpilot.bench.fuzz.engine import render
from kvpilot.config import Config
from kvpilot.context.conversation import Body, read_request
from kvpilot.context.engine_render import EngineRenderError
from kvpilot.context.segments import Segmenter
from kvpilot.context.tokens import parse_tokens
from kvpilot.coordinator import asking, executor
from kvpilot.coordinator.planner import Planner
from kvpilot.coordinator.service import CoordinatorService, ServiceSettings
from kvpilot.domain import (
    ActionRecord,
    Command,
    CommandBatch,
    CommandReply,
    Event,
    RequestFinished,
    RequestStarted,
    Space,
    TokenArray,
)
from kvpilot.gateway.link import GatewayLink
from kvpilot.ingest.residency import Residency

log = logging.getLogger(__name__)

CHUNK_TOKENS = 64
HELD_CHUNKS = 4000
TICK_EVERY = 200
"""Events between two plans and two looks at the cache layer."""
MAX_OPEN = 500
"""Actions under way beyond which the run waits for them, as a client would."""
TURNS_TO_ASK = 6
"""Turns of the loop in which the engine is asked for a prompt's tokens."""
SECONDS_AN_EVENT = 0.5
IDLE_S = 300.0


@contextmanager
def hurried() -> Iterator[None]:
    """Executor and asker with the short waits that fit a cache layer without latency."""
    waits = patch.multiple(
        executor, CONFIRM_STEP_S=0.001, CONFIRM_S=0.05, STORE_WAIT_S=0.02, ROOM_WAIT_S=0.02
    )
    with waits, patch.object(asking, "ASK_AFTER_S", 0.0):
        yield


class Coordinator:
    """A coordinator whose clock goes on with every event, so that sessions grow old in a run of minutes."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.events = 0
        self.outcomes: Counter[str] = Counter()
        self._layer = MemoryLayer(CHUNK_TOKENS, HELD_CHUNKS)
        self._layer.host_room = HELD_CHUNKS
        self._residency = Residency()
        self.service = CoordinatorService(
            backend=self._layer,
            residency=self._residency,
            segmenter=Segmenter(None, None),
            space_of=lambda salt: Space("m", salt),
            settings=ServiceSettings(recheck_s=(0.01,), session_idle_s=IDLE_S),
            render=_render,
            clock=lambda: self.now,
        )
        self._planner = Planner(self.service)
        self._running: dict[str, RequestStarted] = {}
        self._jobs: list[asyncio.Task[None]] = []

    @property
    def asked(self) -> Counter[str]:
        """What came of the prompts whose tokens the engine was asked for."""
        return self.service.awaited.asker.outcomes if self.service.awaited.asker else Counter()

    async def start(self) -> None:
        jobs = (self.service.segments.run(), self.service.executor.watch_loop())
        self._jobs = [asyncio.create_task(job) for job in jobs]

    async def close(self) -> None:
        await self.settle(0)
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await self.service.close()

    def take(self, event: Event) -> None:
        """One event, as it comes out of the wire."""
        self.now += SECONDS_AN_EVENT
        event = msgspec.structs.replace(event, at=self.now)
        self._store(event)
        self.events += 1
        self._count(self.service.handle(event))

    async def ask(self, command: Command) -> list[ActionRecord]:
        return self._count(await self.service.command(command))

    async def settle(self, most: int = MAX_OPEN) -> None:
        """Until at most so many actions are under way; every now and then a plan and a look at the layer."""
        for _ in range(TURNS_TO_ASK):
            await asyncio.sleep(0)
        if self.events % TICK_EVERY == 0:
            await self._look()
            self._count(self._planner.tick())
        with suppress(TimeoutError):
            async with asyncio.timeout(60):
                while self.service.tasks.under_way > most:  # noqa: ASYNC110 (nothing tells when they end)
                    await asyncio.sleep(0.001)

    async def _look(self) -> None:
        refresh = self._residency.begin_refresh(self.now)
        async for page in self._layer.list_keys():
            refresh.add(page)
        self._residency.commit(refresh)
        self._residency.set_usage(await self._layer.usage(), {}, self.now)

    def _store(self, event: Event) -> None:
        """What the engine does with the request's KV; what is oldest goes when the layer is full."""
        if isinstance(event, RequestStarted):
            self._running[event.request_id] = event
        elif isinstance(event, RequestFinished) and (started := self._running.pop(event.request_id, None)):
            tokens = parse_tokens(event.prompt_ids)
            if started.path in asking.SILENT:
                with suppress(EngineRenderError):
                    tokens = render(read_request(started.path, started.body))
            if tokens is not None:
                self._layer.store(Space("m", started.salt), tokens)
            while len(self._layer.held) > HELD_CHUNKS:
                del self._layer.held[next(iter(self._layer.held))]

    def _count(self, records: list[ActionRecord]) -> list[ActionRecord]:
        self.outcomes.update(f"{record.kind.value} {record.status.value}" for record in records)
        return records


async def _render(body: Body) -> TokenArray:
    return render(body)


class DirectLink(GatewayLink):
    """The gateway's end of the wire, its frames handed over instead of sent.

    ``coordinator`` is None while nobody listens: the frames are made all the same.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.coordinator: Coordinator | None = None

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def emit(self, event: Event) -> None:
        read = wire.event_decoder.decode(wire.event_encoder.encode(event))
        self.sent += 1
        if self.coordinator is None:
            return
        try:
            self.coordinator.take(read)
        except Exception:
            log.exception("event %s was not understood", type(event).__name__)

    async def ask(self, commands: tuple[Command, ...], timeout_s: float) -> CommandReply | None:
        batch = wire.batch_decoder.decode(wire.event_encoder.encode(CommandBatch(commands)))
        if self.coordinator is None:
            return None
        records: list[ActionRecord] = []
        for command in batch.commands:
            try:
                records += await self.coordinator.ask(command)
            except Exception:
                log.exception("a %s command failed", command.kind.value)
        return wire.reply_decoder.decode(wire.event_encoder.encode(CommandReply(tuple(records))))
