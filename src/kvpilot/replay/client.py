"""What a benchmark needs of a gateway and of the control API, over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from kvpilot.domain import SignalKind

CONTROL_TIMEOUT_S = 15.0


class ControlError(RuntimeError):
    """The control API refused or is not there; the message says which call and why."""


class ChatResult(msgspec.Struct):
    """One chat completion as its client saw it. Times in milliseconds; ``error`` None = it went well."""

    status: int
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    content: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    session: str | None = None
    """kvpilot's name for the session (header ``x-kvpilot-session``)."""
    error: str | None = None


class Gateway:
    """Streaming chat completions through the gateway, TTFT taken at the first chunk that arrives here."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str, timeout_s: float = 600.0) -> None:
        self._http, self._url, self.model = http, url.rstrip("/"), model
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        session: tuple[str, str] | None = None,
        api_key: str | None = None,
        token_ids: bool = False,
    ) -> ChatResult:
        """One greedy request of exactly ``max_tokens`` tokens. Never raises: failures are in the result.

        ``session``: (session id, parent session id) sent as ``agent_hint``.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if token_ids:
            body["return_token_ids"] = True
        if session is not None:
            body["agent_hint"] = {"session_id": session[0], "parent_session_id": session[1]}
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        result = ChatResult(status=0)
        began = time.perf_counter()
        try:
            async with self._http.post(
                f"{self._url}/v1/chat/completions",
                data=msgspec.json.encode(body),
                headers=headers,
                timeout=self._timeout,
            ) as response:
                result.status = response.status
                result.session = response.headers.get("x-kvpilot-session")
                if response.status != 200:
                    result.error = (await response.text())[:300]
                else:
                    await _read_stream(response, result, began)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            result.error = f"{type(error).__name__}: {error}"
        result.e2e_ms = (time.perf_counter() - began) * 1000
        return result


async def _read_stream(response: aiohttp.ClientResponse, result: ChatResult, began: float) -> None:
    finished = False
    async for data in _events(response, result, began):
        if data == b"[DONE]":
            break
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            result.error = str(chunk["error"])[:300]
            return
        if chunk.get("prompt_token_ids"):
            result.prompt_token_ids = chunk["prompt_token_ids"]
        for choice in chunk.get("choices") or ():
            result.content += (choice.get("delta") or {}).get("content") or ""
            if choice.get("token_ids"):
                result.token_ids = (result.token_ids or []) + choice["token_ids"]
            finished = finished or choice.get("finish_reason") is not None
        if usage := chunk.get("usage"):
            result.prompt_tokens = usage.get("prompt_tokens") or 0
            result.completion_tokens = usage.get("completion_tokens") or 0
            result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not finished:
        result.error = "the stream ended before the reply did"


async def _events(response: aiohttp.ClientResponse, result: ChatResult, began: float) -> AsyncIterator[bytes]:
    """The stream's data lines, of any length (a prompt's token ids may be one line of megabytes)."""
    rest = b""
    async for piece in response.content.iter_any():
        if result.ttft_ms is None:
            result.ttft_ms = (time.perf_counter() - began) * 1000
        *lines, last = piece.split(b"\n")
        if not lines:
            rest += last
            continue
        lines[0], rest = rest + lines[0], last
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class Control:
    """The control API of kvpilot's coordinator. Methods raise ControlError unless they say otherwise."""

    def __init__(self, http: aiohttp.ClientSession, url: str, token: str = "") -> None:
        self._http = http
        self._base = url.rstrip("/").removesuffix("/kvpilot/v1") + "/kvpilot/v1"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def _call(self, method: str, path: str, body: Any = None, wait_s: float = 0.0) -> Any:
        timeout = aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_S + wait_s)
        try:
            async with self._http.request(
                method, f"{self._base}{path}", json=body, headers=self._headers, timeout=timeout
            ) as response:
                raw = await response.read()
                if response.status >= 400:
                    raise ControlError(
                        f"{method} {path}: {response.status} {raw[:200].decode(errors='replace')}"
                    )
                return msgspec.json.decode(raw) if raw else None
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            raise ControlError(f"{method} {path}: {type(error).__name__} {error}") from None

    async def set_mode(self, mode: str) -> None:
        await self._call("PUT", "/mode", {"mode": mode})

    async def signal(
        self, session: str, kind: SignalKind, parent: str | None = None, eta_s: float | None = None
    ) -> list[str]:
        """Send a life-cycle hint; returns the ids of the actions it started."""
        body = {"kind": kind.value, "parent": parent, "eta_s": eta_s}
        reply = await self._call("POST", f"/sessions/{session}/signals", body)
        return list((reply or {}).get("actions", ()))

    async def session(self, session: str) -> dict[str, Any] | None:
        """The session as the coordinator sees it, or None when it does not know it (or is not there)."""
        try:
            known: dict[str, Any] = await self._call("GET", f"/sessions/{session}")
        except ControlError:
            return None
        return known

    async def tiers(self) -> dict[str, dict[str, int]]:
        """Per tier ``used_bytes`` and ``capacity_bytes``."""
        reply = await self._call("GET", "/tiers")
        return {
            tier["tier"]: {"used_bytes": tier["used_bytes"], "capacity_bytes": tier["capacity_bytes"]}
            for tier in reply["tiers"]
        }

    async def located(self, chunks: Sequence[str]) -> list[list[str]]:
        """Tiers that hold each chunk (hex hashes), asked now from the cache layer's directory."""
        reply = await self._call("POST", "/chunks/locate", {"chunks": list(chunks)})
        return [list(tiers) for tiers in reply["tiers"]]

    async def command(
        self, kind: str, session: str | None = None, chunks: Sequence[str] = (), wait_s: float = 10.0
    ) -> dict[str, Any]:
        """Order an action and wait for its outcome; returns its record."""
        body: dict[str, Any] = {"kind": kind}
        if session is not None:
            body["session"] = session
        if chunks:
            body["chunks"] = list(chunks)
        record: dict[str, Any] = await self._call("POST", f"/actions?wait={wait_s}", body, wait_s)
        return record

    async def actions(self, session: str, limit: int = 100) -> list[dict[str, Any]]:
        reply = await self._call("GET", f"/actions?session={session}&limit={limit}")
        return list(reply["actions"] if isinstance(reply, dict) else reply)

    async def outcome(self, action: str, wait_s: float = 10.0) -> dict[str, Any]:
        """An action's record, waited for until it is final or ``wait_s`` have passed."""
        record: dict[str, Any] = await self._call("GET", f"/actions/{action}?wait={wait_s}", None, wait_s)
        return record

    async def settled(self, session: str, wait_s: float = 10.0) -> list[dict[str, Any]]:
        """The session's actions once none is open, or as they are after ``wait_s``."""
        until = time.monotonic() + wait_s
        while True:
            records = await self.actions(session)
            open_ones = [r for r in records if r["status"] in ("accepted", "deferred")]
            left = until - time.monotonic()
            if not open_ones or left <= 0:
                return records
            await asyncio.sleep(min(0.1, left))
