"""The control route on vLLM's own server: ``POST /kvpilot/v1/engine`` takes a command, ``GET`` tells the state.

Outside ``/v1``, so that nobody reaches it through kvpilot's gateway; where vLLM has an API key, it asks for it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from argparse import Namespace
from typing import Any

from fastapi import FastAPI, Request, Response

from kvpilot.engine.commands import PATH, CommandError, EngineCommand, Kind, parse_command
from kvpilot.engine.port import WAIT_S
from kvpilot.engine.wire import dump, load

MAX_BODY = 8 * 2**20


class ControlRoute:
    """An ``EndpointPlugin`` of vLLM's."""

    name = "kvpilot"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        # The coordinator asks every few seconds: that is not worth a line of the server's log each time.
        logging.getLogger("uvicorn.access").addFilter(lambda record: PATH not in record.getMessage())
        app.add_api_route(PATH, self._state, methods=["GET"], include_in_schema=False)
        app.add_api_route(PATH, self._command, methods=["POST"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        state.kvpilot_engine = engine_client
        keys = getattr(args, "api_key", None) or []
        state.kvpilot_keys = [key for key in ([keys] if isinstance(keys, str) else keys) if key]

    async def _state(self, request: Request) -> Response:
        return await self._answer(request, dump(EngineCommand(Kind.STATUS)))

    async def _command(self, request: Request) -> Response:
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > MAX_BODY:
                return _reply(413, dump({"detail": f"a command has at most {MAX_BODY} bytes"}))
        try:
            parse_command(bytes(raw))
        except CommandError as error:
            return _reply(400, dump({"detail": str(error)}))
        return await self._answer(request, bytes(raw))

    async def _answer(self, request: Request, raw: bytes) -> Response:
        state = request.app.state
        told = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if state.kvpilot_keys and not any(
            hmac.compare_digest(told, key.encode()) for key in state.kvpilot_keys
        ):
            return _reply(401, dump({"detail": "this engine asks for its API key: Authorization: Bearer …"}))
        engine = state.kvpilot_engine
        if engine is None:
            return _reply(503, dump({"detail": "there is no engine behind this server"}))
        try:
            async with asyncio.timeout(WAIT_S):
                answer = bytes(await engine.engine_core.call_utility_async("kvpilot_command", raw))
        except TimeoutError:
            late = f"the engine did not answer within {WAIT_S:.0f} s; the command goes on"
            return _reply(504, dump({"detail": late}))
        return _reply(503 if "detail" in load(answer) else 200, answer)


def _reply(status: int, body: bytes) -> Response:
    return Response(body, status, media_type="application/json")
