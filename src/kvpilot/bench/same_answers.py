"""Does the plug-in change answers? The same requests, one at a time, on a stock engine and on a steered one.

On the steered engine everything is done to them that kvpilot can do: a pool too small for the sessions, commands
between the requests (evict, demote, retain, prefetch), the coordinator's own plan, and requests that are preempted
while they run. Prompts are token ids and do not depend on answers, so that the two runs can be compared request by
request.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvpilot.backends.base import BackendError
from kvpilot.backends.engine_plugin import EnginePlugin
from kvpilot.bench.lab import BenchError
from kvpilot.config import Config
from kvpilot.engine.commands import EngineCommand, Kind
from kvpilot.stack.launch import Endpoints, launch, with_free_ports

LONGEST = 640
"""Tokens of a context; 512 and more have a chunk in the tiers below."""
SESSIONS = 8
OUTPUT = 6
TOLERANCE = 1e-4
PREEMPTED_EVERY = 5
_KINDS = (Kind.EVICT, Kind.DEMOTE, Kind.RETAIN, Kind.PREFETCH, Kind.PREFETCH)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``before``: what is done to which session first; ``preempt``: it is preempted while it runs."""

    session: str
    prompt: tuple[int, ...]
    before: tuple[tuple[Kind, str], ...]
    preempt: bool


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


def script(requests: int, seed: int, vocabulary: int = 40_000) -> list[Asked]:
    """Sessions that grow, are compacted and begin anew, in any order."""
    dice = random.Random(seed)
    contexts: dict[str, list[int]] = {}

    def more(count: int) -> list[int]:
        return [dice.randrange(100, vocabulary) for _ in range(count)]

    system = more(64)
    out = []
    for number in range(requests):
        name = f"s{dice.randrange(SESSIONS)}"
        context = contexts.setdefault(name, [*system, *more(dice.randrange(150, 300))])
        roll = dice.random()
        if len(context) > LONGEST - 150 or roll < 0.1:
            del context[dice.randrange(64, LONGEST - 150) :]
        context += more(dice.randrange(20, 140))
        chosen = [(dice.choice(_KINDS), f"s{dice.randrange(SESSIONS)}") for _ in range(dice.randrange(3))]
        preempt = number % PREEMPTED_EVERY == PREEMPTED_EVERY - 1
        out.append(Asked(name, tuple(context), tuple(chosen), preempt))
    return out


def bench_same_answers(config: Config, requests: int, seed: int, say: Say) -> dict[str, Any]:
    """Starts two stacks, one after the other. Raises BenchError, StackError."""
    asked = script(requests, seed)
    base = with_free_ports(config).with_overrides(
        engine={
            "max_model_len": LONGEST + 2 * OUTPUT,
            "device_blocks": 2 * LONGEST // config.engine.block_size + 1,
            "kv_events": "",
            "dev": True,
        }
    )
    done = Counter[str]()
    runs = []
    for steered in (False, True):
        settings = base.with_overrides(
            engine={"plugin": steered},
            coordinator={"mode": "kvpilot" if steered else "passive"},
            state={"dir": str(config.state_dir / ("steered" if steered else "stock"))},
        )
        with launch(settings) as stack:
            runs.append(asyncio.run(_run(stack, asked, done if steered else None, say)))
    return {
        "requests": requests,
        "model": config.engine.model,
        "done": dict(sorted(done.items())),
        **compare(*runs),
    }


def compare(stock: Sequence[Answer], steered: Sequence[Answer]) -> dict[str, Any]:
    """``differing``: requests with other tokens; ``largest``: of all differences of logprobs."""
    pairs = list(zip(stock, steered, strict=True))
    differing = [at for at, (a, b) in enumerate(pairs) if a.tokens != b.tokens]
    gaps = [abs(x - y) for a, b in pairs for x, y in zip(a.logprobs, b.logprobs, strict=False)]
    largest = max(gaps, default=0.0)
    return {
        "differing": differing,
        "tokens": sum(len(a.tokens) for a in stock),
        "largest_logprob_difference": largest,
        "cached_tokens": [sum(answer.cached for answer in run) for run in (stock, steered)],
        "same": not differing and largest <= TOLERANCE,
    }


async def _run(stack: Endpoints, asked: Sequence[Asked], done: Counter[str] | None, say: Say) -> list[Answer]:
    """``done``: counts what was done to the engine; None: nothing is."""
    plugin = EnginePlugin.from_config(stack.config)
    answers = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        for number, request in enumerate(asked):
            for kind, session in request.before if done is not None else ():
                with contextlib.suppress(BackendError):
                    outcome = await plugin.command(EngineCommand(kind, session=session))
                    assert done is not None
                    done[f"{kind} {outcome.status}"] += 1
            asking = asyncio.create_task(_ask(http, stack, request))
            if done is not None and request.preempt:
                done["preempted"] += await _preempt(http, stack, asking)
            answers.append(await asking)
            if number % 20 == 19:
                say(f"{'stock' if done is None else 'steered'}: {number + 1} of {len(asked)} requests")
    await plugin.close()
    return answers


async def _ask(http: aiohttp.ClientSession, stack: Endpoints, request: Asked) -> Answer:
    body = {
        "model": stack.config.engine.served_model_name,
        "prompt": list(request.prompt),
        "max_tokens": OUTPUT,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    url = f"{stack.gateway_url}/v1/completions"
    async with http.post(url, json=body, headers={"X-Session-ID": request.session}) as reply:
        told = await reply.json()
    if reply.status != 200:
        raise BenchError(f"a request was answered {reply.status}: {str(told)[:200]}")
    [choice] = told["choices"]
    details = told["usage"].get("prompt_tokens_details") or {}
    return Answer(
        tuple(choice["token_ids"]),
        tuple(choice["logprobs"]["token_logprobs"]),
        int(details.get("cached_tokens") or 0),
    )


async def _preempt(http: aiohttp.ClientSession, stack: Endpoints, asking: asyncio.Task[Answer]) -> int:
    """Preempt the request as soon as it runs; whether that was in time."""
    while not asking.done():
        await asyncio.sleep(0.05)
        async with http.get(f"{stack.engine_url}/metrics") as reply:
            running = [
                line
                for line in (await reply.text()).splitlines()
                if line.startswith("vllm:num_requests_running")
            ]
        if any(float(line.rpartition(" ")[2]) for line in running):
            query = {"reset_running_requests": "true"}
            async with http.post(f"{stack.engine_url}/reset_prefix_cache", params=query):
                return int(not asking.done())
    return 0
