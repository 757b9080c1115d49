"""Anthropic's Messages as chat messages, converted as vLLM does for its own ``/v1/messages`` (0.32).

What is no content (cache marks, signatures) falls away here, so that moving a mark changes no message's name.
Never raises on what was sent: what is malformed is left out, the engine will have refused it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

PATH = "/v1/messages"
_ATTRIBUTION = "x-anthropic-billing-header"
"""How a line of Claude Code's begins that changes with every request; vLLM leaves it out too."""

Json = Mapping[str, Any]


def chat_body(body: Json) -> dict[str, Any]:
    """The chat request a Messages request amounts to, as far as it makes the prompt."""
    messages: list[dict[str, Any]] = []
    if system := _text(body.get("system")):
        messages.append({"role": "system", "content": system})
    for message in _objects(body.get("messages")):
        messages += chat_messages(message)
    chat: dict[str, Any] = {"messages": messages}
    if tools := [_tool(tool) for tool in _objects(body.get("tools"))]:
        chat["tools"] = tools
    if isinstance(body.get("chat_template_kwargs"), dict):
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    if (effort := _effort(body)) is not None:
        chat["reasoning_effort"] = effort
    return chat


def system_first(chat: Json) -> dict[str, Any] | None:
    """A ``chat_body`` as vLLM makes it for templates that take system messages only at the beginning: all in one;
    None when that changes nothing. Other APIs' chats have no such second rendering."""
    system = [m for m in chat["messages"] if m["role"] == "system"]
    if system == chat["messages"][: len(system)]:
        return None
    text = "".join(message["content"] for message in system)
    rest = [m for m in chat["messages"] if m["role"] != "system"]
    return {**chat, "messages": [{"role": "system", "content": text}, *rest]}


def chat_messages(message: Json) -> list[dict[str, Any]]:
    """One message as chat messages: each tool result is one of its own and comes before the rest."""
    role, content = message.get("role"), message.get("content")
    if role == "system":
        text = _text(content)
        return [{"role": "system", "content": text}] if text else []
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = list(_objects(content))
    rest: dict[str, Any] = {"role": role}
    if thoughts := [b["thinking"] for b in _of(blocks, "thinking") if isinstance(b.get("thinking"), str)]:
        rest["reasoning"] = "".join(thoughts)
    if calls := [_call(block) for block in _of(blocks, "tool_use")]:
        rest["tool_calls"] = calls
    if parts := list(_parts(blocks)):
        only_text = len(parts) == 1 and parts[0]["type"] == "text"
        rest["content"] = parts[0]["text"] if only_text else parts
    results = [_result(block) for block in _of(blocks, "tool_result")]
    return [*results, rest] if "content" in rest or role != "user" else results


def _parts(blocks: list[Json]) -> Iterator[dict[str, Any]]:
    for block in blocks:
        if block.get("type") == "text" and isinstance(block.get("text"), str) and block["text"]:
            yield {"type": "text", "text": block["text"]}
        elif block.get("type") == "image":
            yield {"type": "image_url", "image_url": {"url": _image(block.get("source"))}}


def _result(block: Json) -> dict[str, Any]:
    content = block.get("content")
    texts = [b["text"] for b in _of(list(_objects(content)), "text") if isinstance(b.get("text"), str)]
    return {
        "role": "tool",
        "tool_call_id": block.get("tool_use_id") or "",
        "content": content if isinstance(content, str) else "\n".join(texts),
    }


def _call(block: Json) -> dict[str, Any]:
    arguments = json.dumps(block.get("input") or {})
    function = {"name": block.get("name") or "", "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool(tool: Json) -> dict[str, Any]:
    schema = tool.get("input_schema")
    schema = {**schema, "type": schema.get("type", "object")} if isinstance(schema, dict) else schema
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    function |= {key: tool[key] for key in ("strict", "defer_loading") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _text(content: Any) -> str:
    """A system text, which may come in blocks."""
    texts = [content] if isinstance(content, str) else [b.get("text") for b in _of(_objects(content), "text")]
    return "".join(text for text in texts if isinstance(text, str) and not text.startswith(_ATTRIBUTION))


def _image(source: Any) -> str:
    if not isinstance(source, dict):
        return ""
    if source.get("type") == "url":
        return str(source.get("url", ""))
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"


def _effort(body: Json) -> Any:
    thinking, output = body.get("thinking"), body.get("output_config")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        return "none"
    return output.get("effort") if isinstance(output, dict) else None


def _of(blocks: Iterator[Json] | list[Json], kind: str) -> list[Json]:
    return [block for block in blocks if block.get("type") == kind]


def _objects(value: Any) -> Iterator[Json]:
    return (item for item in (value if isinstance(value, list) else ()) if isinstance(item, dict))
