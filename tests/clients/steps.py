"""Runs inside the client environment: a script offers steps, the test asks for them one by one.

One line each: ``{"step": NAME, …arguments}`` in; ``answer: {"facts": …}`` or ``answer: {"error": …}`` out, between
whatever the packages print.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

ANSWER = "answer: "

Step = Callable[..., Awaitable[Any]]


def serve(*steps: Step) -> None:
    """Answer until stdin ends. A step is called by its function's name."""
    asyncio.run(_serve({step.__name__: step for step in steps}))


async def _serve(steps: dict[str, Step]) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        try:
            answer = {"facts": await steps[asked.pop("step")](**asked)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(ANSWER + json.dumps(answer), flush=True)
