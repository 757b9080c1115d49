"""What only the engine can tell, asked from it: the tokens of a chat, and where in them its messages end.

vLLM's ``POST /tokenize`` renders and tokenises a chat; the tokens of the first k messages, as far as they agree
with the true prompt, end where message k ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np

from kvpilot.context.render import template_arguments
from kvpilot.context.tokens import common_tokens, parse_tokens
from kvpilot.domain import TokenArray

PROMPT_S = 30.0
"""How long a prompt's tokens are waited for: nobody waits behind it, and a busy engine takes its time."""
_STAND_IN = "\u2047"
"""No message begins like this."""


class _Answer(msgspec.Struct):
    tokens: msgspec.Raw


class EngineRenderError(RuntimeError):
    """The engine did not answer in time or refused."""


class EngineRefusedError(EngineRenderError):
    """The engine does not render this chat: asking again is in vain."""


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Token ends of the messages; ``inexact``: those that only mark where the renderings part."""

    ends: list[int]
    inexact: set[int]
    tools: tuple[int, int] | None
    first: int = 0
    """Where message 0 begins: behind what the template writes unasked (only told for a user message)."""


class EngineRenderer:
    """Asks one engine. ``budget_s`` bounds one alignment as a whole: messages beyond it are not told apart."""

    def __init__(self, url: str, model: str, *, api_key: str = "", budget_s: float = 5.0) -> None:
        self._url = f"{url.rstrip('/')}/tokenize"
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._budget_s = budget_s
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def prompt(self, body: Mapping[str, Any]) -> TokenArray:
        """The tokens of a chat request. Raises EngineRefusedError when the engine says that it cannot be rendered,
        EngineRenderError when it does not answer."""
        try:
            async with asyncio.timeout(PROMPT_S):
                return await self._tokenize(body, body["messages"], body.get("tools"), generation=True)
        except TimeoutError:
            raise EngineRenderError(f"no answer from {self._url} in {PROMPT_S} s") from None
        except aiohttp.ClientResponseError as error:
            refused = error.status in (400, 422)
            raise (EngineRefusedError if refused else EngineRenderError)(f"{self._url}: {error}") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineRenderError(f"{self._url}: {error}") from None

    async def layout(self, body: Mapping[str, Any], prompt: TokenArray, known: Sequence[int]) -> TokenLayout:
        """Where each message ends in ``prompt``; ``known``: leading ends already known.

        Raises EngineRenderError when the engine does not answer or does not render this prompt at all.
        """
        ends = list(known)
        inexact: set[int] = set()
        tools = None
        first = 0
        messages = body["messages"]
        try:
            async with asyncio.timeout(self._budget_s):
                whole = await self._tokenize(body, messages, body.get("tools"), generation=True)
                if not np.array_equal(whole, prompt):
                    raise EngineRenderError("the engine's /tokenize renders another prompt")
                if body.get("tools") and not known:
                    tools = _insertion(whole, await self._tokenize(body, messages, None, generation=True))
                if messages[0].get("role") == "user" and not known:
                    other = [{"role": "user", "content": _STAND_IN}]
                    first = common_tokens(
                        await self._tokenize(body, other, body.get("tools"), generation=False), prompt
                    )
                while len(ends) < len(messages):
                    tokens = await self._tokenize(
                        body, messages[: len(ends) + 1], body.get("tools"), generation=False
                    )
                    shared = common_tokens(tokens, prompt)
                    if shared < len(tokens):
                        inexact.add(len(ends))
                    ends.append(max(shared, ends[-1] if ends else 0))
        except TimeoutError:
            if not ends:
                raise EngineRenderError(f"no answer from {self._url} in {self._budget_s} s") from None
            inexact |= set(range(len(ends), len(messages)))
            ends += [ends[-1]] * (len(messages) - len(ends))
        except (aiohttp.ClientError, ValueError, KeyError) as error:
            raise EngineRenderError(f"{self._url}: {error}") from None
        return TokenLayout(ends, inexact, tools, min(first, ends[0]))

    async def _tokenize(
        self, body: Mapping[str, Any], messages: Sequence[Any], tools: Any, *, generation: bool
    ) -> TokenArray:
        request: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "add_generation_prompt": generation,
        }
        if arguments := template_arguments(body):
            request["chat_template_kwargs"] = arguments
        if tools:
            request["tools"] = tools
        if generation:
            request["add_generation_prompt"] = body.get("add_generation_prompt", True)
            request["continue_final_message"] = body.get("continue_final_message", False)
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        async with self._session.post(self._url, json=request) as response:
            response.raise_for_status()
            answer = msgspec.json.decode(await response.read(), type=_Answer)
        tokens = parse_tokens(answer.tokens)
        if tokens is None:
            raise ValueError("the answer has no tokens")
        return tokens


def _insertion(whole: TokenArray, without: TokenArray) -> tuple[int, int] | None:
    """Where ``whole`` has what ``without`` lacks, when that is one single insertion."""
    start, length = common_tokens(whole, without), len(whole) - len(without)
    if length <= 0 or not np.array_equal(whole[start + length :], without[start:]):
        return None
    return start, start + length
