"""The same answers with and without: a real small model, its KV moved about between turns or left alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpilot.bench.lab import BenchError, Lab
from kvpilot.demo.tools import Toolbox, ToolCall

QUESTIONS = (
    "In one sentence: what is this module for?",
    "Name one function that it defines.",
    "Would you use it in a web server? Answer briefly.",
)
ANSWER_TOKENS = 24
ANSWER_KEYS = {"passive": "answers-passive", "kvpilot": "answers-kvpilot"}
"""API keys: a tenant each, so that neither conversation finds the other's KV."""
DOCUMENT_TOKENS = 560
MOVES = (("demote", "prefetch"), ("evict",))
"""What is done with the session's KV after the first and after the second turn, in kvpilot mode."""


@dataclass(slots=True)
class Answers:
    """Text and tokens of each turn's answer, and what was done to the KV in between."""

    texts: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    moves: list[str] = field(default_factory=list)


async def compare_answers(
    lab: Lab, toolbox: Toolbox, run_id: str, say: Callable[[str], None]
) -> dict[str, object]:
    """Greedy answers in both modes, each from nothing; ``same_answers`` is the comparison of their tokens."""
    document = toolbox.run(ToolCall("read_file", {"path": "lib/textwrap.py"}), DOCUMENT_TOKENS)
    passive = await _conversation(lab, document, f"{run_id}-passive", move=False, say=say)
    moved = await _conversation(lab, document, f"{run_id}-kvpilot", move=True, say=say)
    return {
        "same_answers": bool(passive.tokens) and passive.tokens == moved.tokens,
        "answers_compared": len(passive.tokens),
        "answers": [text.strip() for text in passive.texts],
        "cached_tokens": {"passive": passive.cached, "kvpilot": moved.cached},
        "moves": moved.moves,
    }


async def _conversation(
    lab: Lab, document: str, session: str, *, move: bool, say: Callable[[str], None]
) -> Answers:
    mode = "kvpilot" if move else "passive"
    await lab.control.set_mode(mode)
    answers = Answers()
    messages: list[dict[str, str]] = [
        {"role": "system", "content": "You are a helpful assistant who answers briefly."}
    ]
    for number, question in enumerate(QUESTIONS):
        content = f"{document}\n\n{question}" if number == 0 else question
        messages.append({"role": "user", "content": content})
        result = await lab.gateway.chat(
            messages, ANSWER_TOKENS, (session, session), ANSWER_KEYS[mode], token_ids=True
        )
        if result.error is not None or not result.token_ids:
            raise BenchError(f"a request failed: {result.status} {result.error}")
        messages.append({"role": "assistant", "content": result.content})
        answers.texts.append(result.content)
        answers.tokens.append(result.token_ids)
        answers.cached.append(result.cached_tokens)
        say(f"{mode}, answer {number + 1}: {result.content.strip()[:60]!r}")
        if move and number < len(MOVES):
            answers.moves += await _move(lab, session, MOVES[number])
    return answers


async def _move(lab: Lab, session: str, kinds: Sequence[str]) -> list[str]:
    """Order each action and wait for its outcome; the device pool is emptied so that it hides nothing."""
    await _until_mapped(lab, session)
    done = []
    for kind in kinds:
        record = await lab.control.command(kind, session=session, wait_s=20)
        done.append(f"{kind}: {record['status']}, {record['confirmed']} of {record['planned']} chunks")
    async with lab.http.post(f"{lab.stack.engine_url}/reset_prefix_cache") as response:
        await response.read()
    return done


async def _until_mapped(lab: Lab, session: str, timeout_s: float = 20.0) -> None:
    """Wait until kvpilot sees the session's KV in host memory and on disk: both are reported a little later."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        known = await lab.control.session(session)
        resident = (known or {}).get("resident") or {}
        if resident.get("host") and resident.get("disk"):
            return
        await asyncio.sleep(0.2)
    raise BenchError(f"kvpilot did not see the KV of {session} within {timeout_s:.0f} s")
