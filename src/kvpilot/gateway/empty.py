"""Empty replies that Anthropic's and OpenAI's clients parse, for requests that only manage KV."""

from __future__ import annotations

from typing import Any

import msgspec

from kvpilot.gateway.other_apis import MESSAGES, RESPONSES

Json = dict[str, Any]


def empty_reply(
    path: str, *, request_id: str, created: int, model: str, kvpilot: Json, stream: bool
) -> bytes | None:
    """The body for one of these APIs, whole or as events; None for any other."""
    if path == MESSAGES:
        message = _message(request_id, model, kvpilot)
        return _events(_message_events(message)) if stream else msgspec.json.encode(message)
    if path == RESPONSES:
        response = _response(request_id, created, model, kvpilot)
        return _events(_response_events(response)) if stream else msgspec.json.encode(response)
    return None


def _message(request_id: str, model: str, kvpilot: Json) -> Json:
    return {
        "id": f"msg_{request_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
        "kvpilot": kvpilot,
    }


def _message_events(message: Json) -> list[Json]:
    delta = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    return [
        {"type": "message_start", "message": {**message, "stop_reason": None}},
        {"type": "message_delta", "delta": delta, "usage": message["usage"]},
        {"type": "message_stop"},
    ]


def _response(request_id: str, created: int, model: str, kvpilot: Json) -> Json:
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": created,
        "status": "completed",
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0, **details},
        "kvpilot": kvpilot,
    }


def _response_events(response: Json) -> list[Json]:
    begun = {**response, "status": "in_progress", "usage": None}
    return [
        {"type": "response.created", "sequence_number": 0, "response": begun},
        {"type": "response.completed", "sequence_number": 1, "response": response},
    ]


def _events(events: list[Json]) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events
    )
