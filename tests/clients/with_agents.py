"""The openai-agents package: an agent whose tool is really run, by chat completions and by responses."""

from __future__ import annotations

import sys
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI
from steps import serve

URL, MODEL = sys.argv[1:]

client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
models = {
    "chat": OpenAIChatCompletionsModel(MODEL, client),
    "responses": OpenAIResponsesModel(MODEL, client),
}
ran: list[bool] = []
END = {"2": 100}
"""The random model would go on for ever: it ends as soon as it may."""


@function_tool
def look(deep: bool) -> str:
    """Look at the list."""
    ran.append(deep)
    return "The list is in order."


def agent(api: str, session: str, instructions: str, tool: bool) -> Agent:
    """With ``tool`` the first step must call it; the package then leaves the choice to the model.

    By responses it ends with the tool's result, as a model that never ends by itself cannot answer there: the
    package takes a cut reply for an error.
    """
    sampled: dict[str, Any] = {"logit_bias": END, "frequency_penalty": 2}
    if api == "chat":
        sampled["min_tokens"] = 4
    return Agent(
        name="reader",
        instructions=instructions,
        model=models[api],
        tools=[look] if tool else [],
        tool_use_behavior="run_llm_again" if api == "chat" else "stop_on_first_tool",
        model_settings=ModelSettings(
            temperature=0,
            max_tokens=400,
            tool_choice="look" if tool else None,
            extra_headers={"X-Session-ID": session},
            extra_body=sampled,
        ),
    )


async def run(api: str, session: str, instructions: str, text: str, tool: bool, streamed: bool) -> Any:
    ran.clear()
    config = RunConfig(tracing_disabled=True)
    reader = agent(api, session, instructions, tool)
    events: set[str] = set()
    if streamed:
        result: Any = Runner.run_streamed(reader, text, run_config=config, max_turns=3)
        events = {event.type async for event in result.stream_events()}
    else:
        result = await Runner.run(reader, text, run_config=config, max_turns=3)
    return {
        "output": result.final_output,
        "ran": list(ran),
        "items": [item.type for item in result.new_items],
        "requests": result.context_wrapper.usage.requests,
        "events": sorted(events),
    }


serve(run)
