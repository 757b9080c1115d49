"""Replies of the APIs that tell no token ids, as vLLM writes them; ``count`` is the prompt's length in tokens."""

from __future__ import annotations

from typing import Any

import msgspec

Json = dict[str, Any]

_WORDS = ("All ", "work ", "and ", "no ", "play.")
_TEXT = "".join(_WORDS)
_THINKING: Json = {"type": "thinking", "thinking": "so"}
_CALL: Json = {"type": "tool_use", "id": "call_0", "name": "ls", "input": {"path": "a"}}


def message(count: int) -> bytes:
    content = [_THINKING, {"type": "text", "text": _TEXT}, _CALL]
    return msgspec.json.encode(
        {**_message(content), "stop_reason": "tool_use", "usage": _usage(count, len(_WORDS))}
    )


def message_events(count: int) -> bytes:
    blocks: list[tuple[Json, list[Json]]] = [
        ({**_THINKING, "thinking": ""}, [{"type": "thinking_delta", "thinking": _THINKING["thinking"]}]),
        ({"type": "text", "text": ""}, [{"type": "text_delta", "text": word} for word in _WORDS]),
        (
            {**_CALL, "input": {}},
            [{"type": "input_json_delta", "partial_json": part} for part in ('{"path"', ':"a"}')],
        ),
    ]
    events: list[Json] = [{"type": "message_start", "message": {**_message([]), "usage": _usage(count, 0)}}]
    for index, (block, deltas) in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": "tool_use", "stop_sequence": None}
    events.append({"type": "message_delta", "delta": delta, "usage": _usage(count, len(_WORDS))})
    return _stream([*events, {"type": "message_stop"}])


def response(count: int) -> bytes:
    return msgspec.json.encode(_response(count))


def response_events(count: int) -> bytes:
    whole = _response(count)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    deltas = [{"type": "response.output_text.delta", "delta": word} for word in _WORDS]
    return _stream(
        [
            {"type": "response.created", "response": begun},
            *deltas,
            {"type": "response.completed", "response": whole},
        ]
    )


def _message(content: list[Json]) -> Json:
    return {"id": "c", "type": "message", "role": "assistant", "model": "m", "content": content}


def _usage(count: int, output: int) -> Json:
    return {"input_tokens": count, "output_tokens": output}


def _response(count: int) -> Json:
    arguments = msgspec.json.encode(_CALL["input"]).decode()
    return {
        "id": "c",
        "object": "response",
        "status": "completed",
        "output": [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": _TEXT}]},
            {"type": "function_call", "call_id": "call_0", "name": "ls", "arguments": arguments},
        ],
        "usage": _usage(count, len(_WORDS)),
    }


def _stream(events: list[Json]) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events
    )
