"""Items of OpenAI's Responses API as chat messages, converted as vLLM does for its own ``/v1/responses`` (0.32).

Never raises on what was sent: what is malformed is left out, the engine will have refused it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

PATH = "/v1/responses"

Json = Mapping[str, Any]


def chat_body(body: Json) -> dict[str, Any]:
    """The chat request a Responses request amounts to, as far as it says so itself."""
    messages: list[dict[str, Any]] = []
    if isinstance(instructions := body.get("instructions"), str) and instructions:
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _objects(given)
    chat: dict[str, Any] = {"messages": chat_messages(items, messages)}
    if tools := [_tool(tool) for tool in _objects(body.get("tools")) if tool.get("type") == "function"]:
        chat["tools"] = tools
    if isinstance(body.get("chat_template_kwargs"), dict):
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat


def chat_messages(
    items: Iterator[Json] | list[Any], before: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """``before`` and the messages of the items behind it: what was thought, said and called in a row is one."""
    messages = before if before is not None else []
    for item in items:
        message = _message(item)
        if message is None:
            continue
        last = messages[-1] if messages else {}
        if last.get("role") == message.get("role") == "assistant" and _joins(last, message):
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            last.update(message)
            if calls:
                last["tool_calls"] = calls
        else:
            messages.append(message)
    return messages


def _joins(last: Json, message: Json) -> bool:
    return not any(key in last for key in ("reasoning", "content") if key in message)


def _message(item: Json) -> dict[str, Any] | None:
    kind = item.get("type", "message")
    if kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments") if kind == "function_call" else item.get("input")
        function = {"name": item.get("name"), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
    if kind == "reasoning":
        texts = [*_objects(item.get("content")), *_objects(item.get("summary"))]
        return {"role": "assistant", "reasoning": str(texts[0].get("text", "")) if texts else ""}
    return {"role": item.get("role"), "content": _content(item.get("content"))} if "role" in item else None


def _content(content: Any) -> Any:
    """A text, or parts as chat has them; one part of text is its text."""
    if not isinstance(content, list):
        return content
    parts = [
        {"type": "text", "text": part["text"]}
        if isinstance(part.get("text"), str)
        else {key: value for key, value in part.items() if key in ("type", "image_url", "file_id")}
        for part in _objects(content)
    ]
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _tool(tool: Json) -> dict[str, Any]:
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in keys if key in tool}}


def _objects(value: Any) -> Iterator[Json]:
    return (item for item in (value if isinstance(value, list) else ()) if isinstance(item, dict))
