"""Requests that manage KV: answered here with a valid, empty completion, never forwarded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kvpilot.domain import ActionRecord, Signal
from kvpilot.gateway.asgi import JSON, Send, respond
from kvpilot.gateway.call import Call
from kvpilot.gateway.empty import empty_reply
from kvpilot.gateway.headers import header_text
from kvpilot.gateway.link import GatewayLink
from kvpilot.gateway.request import Prepared
from kvpilot.gateway.tools import Tools

_AWAY = "the coordinator did not answer in time; whether anything was started is not known"


async def answer(tools: Tools, request: Prepared, call: Call, send: Send) -> None:
    """Hand the commands to the coordinator and tell the client, within its patience, what came of it."""
    actions: Sequence[ActionRecord] = ()
    reasons = list(request.hints.dropped)
    if request.hints.commands:
        reply = await tools.link.ask(request.hints.commands, tools.config.gateway.command_timeout_s)
        if reply is None:
            reasons.insert(0, _AWAY)
        else:
            actions = reply.actions
    completion = empty_completion(
        chat=call.path.endswith("/chat/completions"),
        request_id=call.id,
        created=int(time.time()),
        model=request.model,
        actions=actions,
        reason="; ".join(reasons),
    )
    body = empty_reply(
        call.path,
        request_id=call.id,
        created=completion["created"],
        model=request.model,
        kvpilot=completion["kvpilot"],
        stream=request.stream,
    )
    if body is None:
        body = as_stream(completion) if request.stream else msgspec.json.encode(completion)
    kind = (b"content-type", b"text/event-stream") if request.stream else JSON
    await respond(send, 200, [kind, *own_headers(request, actions)], body)


def tell(link: GatewayLink, signals: Sequence[Signal]) -> None:
    """Hand on what the client says its sessions are doing, as of now."""
    for signal in signals:
        link.emit(msgspec.structs.replace(signal, at=time.time()))


def own_headers(request: Prepared, actions: Sequence[ActionRecord]) -> list[tuple[bytes, bytes]]:
    """What kvpilot adds to replies: the session when the client named one, the ids of its actions."""
    headers = []
    if request.hints.session.id is not None:
        headers.append((b"x-kvpilot-session", header_text(request.hints.session.id)))
    if actions:
        headers.append((b"x-kvpilot-actions", ",".join(action.id for action in actions).encode()))
    return headers


def empty_completion(
    *, chat: bool, request_id: str, created: int, model: str, actions: Sequence[ActionRecord], reason: str
) -> dict[str, Any]:
    """A completion without content that OpenAI clients parse, with what was started under ``kvpilot``."""
    content: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chat else {"text": ""}
    return {
        "id": ("chatcmpl-" if chat else "cmpl-") + request_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        "kvpilot": {"actions": [_summary(action) for action in actions], "reason": reason},
    }


def as_stream(completion: dict[str, Any]) -> bytes:
    """The same as server-sent events, for who asked to have it streamed."""
    chunk = dict(completion)
    choice = dict(chunk["choices"][0])
    if "message" in choice:
        choice["delta"] = choice.pop("message")
        chunk["object"] = "chat.completion.chunk"
    chunk["choices"] = [choice]
    return b"data: " + msgspec.json.encode(chunk) + b"\n\ndata: [DONE]\n\n"


def _summary(action: ActionRecord) -> dict[str, Any]:
    return {name: getattr(action, name) for name in ("id", "kind", "status", "planned", "reason")}
