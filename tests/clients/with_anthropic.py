"""The anthropic package: messages, plain, streamed and with tools."""

from __future__ import annotations

import sys
from typing import Any

from anthropic import AsyncAnthropic
from steps import serve

URL, MODEL = sys.argv[1:]

client = AsyncAnthropic(base_url=URL, api_key="none", max_retries=0)
FIXED: Any = {"model": MODEL, "max_tokens": 64}


def sampling(session: str, temperature: float) -> Any:
    """The package has no word for the temperature any more."""
    return {"extra_headers": {"X-Session-ID": session}, "extra_body": {"temperature": temperature}}


def facts(message: Any) -> dict[str, Any]:
    return {
        "content": [block.model_dump(exclude_none=True) for block in message.content],
        "stop": message.stop_reason,
        "usage": message.usage.model_dump(exclude_none=True),
    }


async def plain(session: str, temperature: float = 0, **given: Any) -> Any:
    return facts(await client.messages.create(**{**FIXED, **given}, **sampling(session, temperature)))


async def stream(session: str, temperature: float = 0, **given: Any) -> Any:
    """As the package's own accumulator sees the stream."""
    async with client.messages.stream(**{**FIXED, **given}, **sampling(session, temperature)) as events:
        kinds = {event.type async for event in events}
        return {**facts(await events.get_final_message()), "kinds": sorted(kinds)}


async def count(**given: Any) -> int:
    return (await client.messages.count_tokens(model=MODEL, **given)).input_tokens


async def refused() -> str:
    """What the package raises for a model nobody serves."""
    try:
        await client.messages.create(
            **{**FIXED, "model": "nobody"}, messages=[{"role": "user", "content": "hi"}]
        )
    except Exception as error:
        return type(error).__name__
    return "nothing"


serve(plain, stream, count, refused)
