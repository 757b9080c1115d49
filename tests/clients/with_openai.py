"""The openai package: chat completions and responses, plain, streamed and with tools."""

from __future__ import annotations

import sys
from typing import Any

from openai import AsyncOpenAI
from steps import serve

URL, MODEL = sys.argv[1:]

client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
FIXED: Any = {"model": MODEL, "temperature": 0, "max_tokens": 64}


def owner(session: str) -> dict[str, str]:
    return {"X-Session-ID": session}


async def plain(session: str, **given: Any) -> Any:
    raw = await client.chat.completions.with_raw_response.create(
        **{**FIXED, **given}, extra_headers=owner(session)
    )
    answer = raw.parse()
    choice = answer.choices[0]
    return {
        "message": choice.message.model_dump(exclude_none=True),
        "finish": choice.finish_reason,
        "prompt_tokens": answer.usage.prompt_tokens,
        "session": raw.headers.get("x-kvpilot-session"),
    }


async def stream(session: str, **given: Any) -> Any:
    """The chunks one by one."""
    chunks = await client.chat.completions.create(
        **{**FIXED, **given},
        stream=True,
        stream_options={"include_usage": True},
        extra_headers=owner(session),
    )
    pieces, finish, prompt_tokens = [], None, 0
    async for chunk in chunks:
        prompt_tokens = chunk.usage.prompt_tokens if chunk.usage else prompt_tokens
        for choice in chunk.choices:
            pieces += [choice.delta.content] if choice.delta.content else []
            finish = choice.finish_reason or finish
    message = {"role": "assistant", "content": "".join(pieces)}
    return {"message": message, "finish": finish, "prompt_tokens": prompt_tokens, "chunks": len(pieces)}


async def accumulate(session: str, **given: Any) -> Any:
    """The stream as the package's own accumulator sees it (which takes a cut reply for an error)."""
    async with client.chat.completions.stream(**{**FIXED, **given}, extra_headers=owner(session)) as events:
        kinds = {event.type async for event in events}
        choice = (await events.get_final_completion()).choices[0]
    message = choice.message.model_dump(exclude_none=True, exclude={"parsed"})
    return {"message": message, "finish": choice.finish_reason, "kinds": sorted(kinds)}


async def responses(session: str, text: str, streamed: bool) -> Any:
    fixed: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 8, "input": text}
    if not streamed:
        answer = await client.responses.create(**fixed, extra_headers=owner(session))
    else:
        async with client.responses.stream(**fixed, extra_headers=owner(session)) as events:
            async for _ in events:
                pass
            answer = await events.get_final_response()
    return {"text": answer.output_text, "input_tokens": answer.usage.input_tokens}


async def refused() -> str:
    """What the package raises for a model nobody serves."""
    try:
        await client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "hi"}])
    except Exception as error:
        return type(error).__name__
    return "nothing"


serve(plain, stream, accumulate, responses, refused)
