"""A small HTTP server that answers as it is told to: well, never, wrongly."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any


class Misbehaving:
    """``answers`` maps a path to JSON; ``fault`` replaces every answer:
    hang, 500, html, truncated, garbage, slow, huge, reset, redirect."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.fault = ""
        self.url = ""
        self.status = 200
        self.requests: list[tuple[str, str, Any]] = []
        self.open = self.most_open = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                while True:
                    await self._answer(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split(" ", 2)
        length = next(
            (
                int(line.split(":")[1])
                for line in head.splitlines()
                if line.lower().startswith("content-length")
            ),
            0,
        )
        body = await reader.readexactly(length)
        path = target.split("?")[0]
        self.requests.append((method, path, json.loads(body) if body else None))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._respond(writer, self.answers.get(path))
        finally:
            self.open -= 1

    async def _respond(self, writer: asyncio.StreamWriter, answer: Any) -> None:
        if callable(answer):
            answer = answer()
        status, payload, kind = (
            (self.status, answer, "application/json") if answer is not None else (404, {}, "x/y")
        )
        raw = json.dumps(payload).encode()
        match self.fault:
            case "hang":
                await asyncio.sleep(60)
            case "500":
                status, raw = 500, b'{"detail": "internal"}'
            case "html":
                raw, kind = b"<html><body>Bad gateway</body></html>", "text/html"
            case "garbage":
                raw = b"\xff\xfe\x00{{{{"
            case "wrong":
                raw = b'{"l1_usage": "many", "results": 7, "deleted": [], "chunks": null}'
            case "reset":
                writer.close()
                raise ConnectionResetError
            case "redirect":
                status = 302
        length = len(raw) + (100 if self.fault == "truncated" else 0)
        length = 10**12 if self.fault == "huge" else length
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n"
            f"location: http://127.0.0.1:1/\r\n\r\n".encode()
        )
        if self.fault == "slow":
            for byte in raw:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.05)
        elif self.fault == "huge":
            while True:
                writer.write(b" " * (1 << 20))
                await writer.drain()
        else:
            writer.write(raw)
        await writer.drain()
        if self.fault == "truncated":
            writer.close()
            raise ConnectionResetError


@contextlib.asynccontextmanager
async def misbehaving() -> AsyncIterator[Misbehaving]:
    server = Misbehaving()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
