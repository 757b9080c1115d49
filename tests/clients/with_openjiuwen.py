"""openJiuwen's own model client and KV-cache runtime, with affinity on."""

from __future__ import annotations

import sys
import time
from typing import Any

from openjiuwen.core.foundation.llm.model import Model
from openjiuwen.core.foundation.llm.schema.config import ModelClientConfig, ModelRequestConfig
from openjiuwen.core.kv_cache import KVCacheIdentity, KVCacheRuntime, resolve_kvc_action_timeout
from steps import serve

URL, MODEL = sys.argv[1:]

model = Model(
    ModelClientConfig(
        client_provider="AscendAffinity", api_key="none", api_base=f"{URL}/v1", verify_ssl=False
    ),
    ModelRequestConfig(model_name=MODEL, temperature=0.0, max_tokens=16),
)
runtime = KVCacheRuntime()


def whose(session: str, parent: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = model.build_kv_cache_affinity_invoke_kwargs(
        session_id=session, parent_session_id=parent, enable_kv_cache_affinity=True
    )
    return found


def reply(message: Any) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls or ()]
    return {"content": message.content, "calls": calls, "finish": message.finish_reason}


async def supports() -> bool:
    return bool(model.supports_kv_cache_affinity())


async def invoke(session: str, messages: list[Any], parent: str | None = None, **given: Any) -> Any:
    return reply(await model.invoke(messages, **given, **whose(session, parent)))


async def stream(session: str, messages: list[Any], parent: str | None = None, **given: Any) -> Any:
    whole, chunks = None, 0
    async for chunk in model.stream(messages, **given, **whose(session, parent)):
        whole, chunks = chunk if whole is None else whole + chunk, chunks + 1
    return {**reply(whole), "chunks": chunks}


async def manage(action: str, session: str, target: str = "session", **given: Any) -> dict[str, Any]:
    """One management call within the package's own budget for it."""
    budget = resolve_kvc_action_timeout(action, target)
    began = time.monotonic()
    done = await getattr(model, f"{action}_kvc")(
        session_id=session, parent_session_id=session, target=target, timeout=budget, **given
    )
    return {"done": done, "seconds": time.monotonic() - began, "budget": budget}


async def turn(session: str, messages: list[Any]) -> Any:
    """A call with the runtime's accounting around it, as the package's agents make them."""
    lease = await runtime.begin_inference(whole(session), model)
    answer = reply(await model.invoke(messages, **whose(session)))
    await runtime.end_inference(lease, succeeded=True)
    return answer


async def suspend(session: str) -> bool:
    return bool(await runtime.suspend(whole(session)))


async def prepare(session: str) -> bool:
    return bool(await runtime.prepare(whole(session)))


async def release(session: str) -> bool:
    return bool(await runtime.release(whole(session)))


def whole(session: str) -> KVCacheIdentity:
    return KVCacheIdentity(session, session)


serve(supports, invoke, stream, manage, turn, suspend, prepare, release)
