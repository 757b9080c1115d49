"""A gateway in this process between real sockets: a fake engine behind it, a fake coordinator beside it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
import zmq
import zmq.asyncio
from aiohttp import web

from kvpilot import link
from kvpilot.config import Config
from kvpilot.domain import ActionRecord, CommandBatch, CommandReply, Event, OutcomeStatus
from kvpilot.event_wire import EventReceiver
from kvpilot.gateway.__main__ import bind
from kvpilot.gateway.app import Gateway

PROMPT_IDS = list(range(600))
OUTPUT_IDS = [7, 8, 9]
WORDS = ["Hello", " there", "!"]


class FakeEngine:
    """Answers like vLLM 0.32: ids only for who asks, the fingerprint on the last chunk of the stream."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.gone = asyncio.Event()
        self._arrived = asyncio.Event()
        self.handler: Callable[[web.Request], Awaitable[web.StreamResponse]] = self.answer
        self.delay = 0.0
        self.chunk_delay = 0.0

    async def asked(self) -> None:
        """Until a request has arrived."""
        async with asyncio.timeout(5):
            await self._arrived.wait()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, _, body in self.requests if body]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((str(request.rel_url), headers, await request.read()))
        self._arrived.set()
        try:
            return await self.handler(request)
        except asyncio.CancelledError:
            self.gone.set()
            raise

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(self.requests[-1][2])
        await asyncio.sleep(self.delay)
        if body.get("stream"):
            return await self.stream(request, body)
        ids = body.get("return_token_ids")
        reply = {
            "id": "chatcmpl-1",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "".join(WORDS)},
                    "finish_reason": "stop",
                    "token_ids": OUTPUT_IDS if ids else None,
                }
            ],
            "usage": {
                "prompt_tokens": 600,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 512},
            },
            "prompt_token_ids": PROMPT_IDS if ids else None,
            "kv_transfer_params": None,
        }
        return web.Response(body=json.dumps(reply, separators=(",", ":")), content_type="application/json")

    async def stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in stream_events(body):
            await response.write(event)
            await asyncio.sleep(self.chunk_delay)
        return response


def stream_events(body: dict[str, Any]) -> list[bytes]:
    """What vLLM 0.32 streams for this request."""
    ids = body.get("return_token_ids")
    usage = (body.get("stream_options") or {}).get("include_usage")

    def event(**fields: Any) -> bytes:
        return (
            b"data: " + json.dumps({"id": "chatcmpl-1", **fields}, separators=(",", ":")).encode() + b"\n\n"
        )

    def choice(delta: dict[str, str], token: int, finish: str | None = None) -> list[dict[str, Any]]:
        return [
            {
                "index": 0,
                "delta": delta,
                "logprobs": None,
                "finish_reason": finish,
                "token_ids": [token] if ids else None,
            }
        ]

    first = {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    events = [event(choices=[first], prompt_token_ids=PROMPT_IDS if ids else None)]
    events.append(event(choices=choice({"content": WORDS[0]}, 7)))
    if ids:
        events.append(event(choices=choice({}, 99)))
    events.append(event(choices=choice({"content": WORDS[1]}, 8)))
    print_on_last = {} if usage else {"system_fingerprint": "fp-1"}
    events.append(event(choices=choice({"content": WORDS[2]}, 9, "stop"), **print_on_last))
    if usage:
        numbers = {
            "prompt_tokens": 600,
            "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 512},
        }
        events.append(event(choices=[], usage=numbers, system_fingerprint="fp-1"))
    events.append(b"data: [DONE]\n\n")
    return events


class FakeCoordinator:
    """Collects events, accepts commands."""

    def __init__(self, config: Config) -> None:
        self.events: list[Event] = []
        self.batches: list[CommandBatch] = []
        self.silent = False
        self._context = context = zmq.asyncio.Context()
        link.make_runtime_dir(config)
        self._receiver = EventReceiver(
            link.event_socket(config), lambda frame: self.events.append(link.event_decoder.decode(frame))
        )
        self._router = context.socket(zmq.ROUTER)
        self._router.bind(link.command_endpoint(config))
        self._tasks = [
            asyncio.create_task(self._receiver.start()),
            asyncio.create_task(self._take_commands()),
        ]

    async def _take_commands(self) -> None:
        while True:
            peer, number, raw = await self._router.recv_multipart()
            batch = link.batch_decoder.decode(raw)
            if batch.commands:
                self.batches.append(batch)
            if self.silent:
                continue
            actions = tuple(
                ActionRecord(
                    id=f"a-{n}", kind=c.kind, status=OutcomeStatus.ACCEPTED, created_at=0.0, planned=2
                )
                for n, c in enumerate(batch.commands)
            )
            await self._router.send_multipart(
                [peer, number, link.event_encoder.encode(CommandReply(actions))]
            )

    async def until(self, kind: type[Event] | Any, count: int = 1) -> list[Any]:
        async with asyncio.timeout(5):
            while True:
                found = [event for event in self.events if isinstance(event, kind)]
                if len(found) >= count:
                    return found
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._receiver.stop()
        self._context.destroy(linger=0)


class _Server(uvicorn.Server):
    def capture_signals(self) -> Any:
        return nullcontext()


@dataclass
class Rig:
    """One gateway with its surroundings; ``url`` is where clients go."""

    url: str
    engine: FakeEngine
    config: Config
    coordinator: FakeCoordinator | None
    gateway: Gateway
    client: aiohttp.ClientSession

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        names = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        async with self.client.post(self.url + path, data=data, headers=names) as reply:
            return reply.status, {k.lower(): v for k, v in reply.headers.items()}, await reply.read()


@asynccontextmanager
async def serve_engine(engine: FakeEngine) -> AsyncIterator[str]:
    server = web.Server(engine.handle, handler_cancellation=True)  # type: ignore[arg-type]
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serve_gateway(config: Config) -> AsyncIterator[tuple[str, Gateway]]:
    listener = bind("127.0.0.1", 0)
    gateway = Gateway(config)
    settings = uvicorn.Config(
        gateway,
        log_config=None,
        date_header=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=1,
    )
    server = _Server(settings)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(10):
        while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", gateway
    finally:
        server.should_exit = True
        await task


StartRig = Callable[..., Awaitable[Rig]]


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StartRig]:
    """Start a rig: ``await start(coordinator=False, tenants={…}, gateway={"max_in_flight": 1})``."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with AsyncExitStack() as stack:

        async def start_rig(*, coordinator: bool = True, engine_url: str = "", **sections: Any) -> Rig:
            engine = FakeEngine()
            url = engine_url or await stack.enter_async_context(serve_engine(engine))
            sections["engine"] = {"url": url, **sections.get("engine", {})}
            sections["state"] = {"dir": str(tmp_path / "state")}
            config = Config().with_overrides(**sections)
            beside = FakeCoordinator(config) if coordinator else None
            if beside is not None:
                stack.push_async_callback(beside.stop)
            address, gateway = await stack.enter_async_context(serve_gateway(config))
            client = await stack.enter_async_context(aiohttp.ClientSession())
            return Rig(address, engine, config, beside, gateway, client)

        yield start_rig


@pytest.fixture
async def rig(start: StartRig) -> Rig:
    return await start()
