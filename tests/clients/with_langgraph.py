"""langgraph with langchain-openai: a graph of model and tools, the tool really run, plain and streamed."""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from steps import serve

URL, MODEL = sys.argv[1:]

ran: list[bool] = []


@tool
def look(deep: bool) -> str:
    """Look at the list."""
    ran.append(deep)
    return "The list is in order."


def chat(session: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key="none",
        temperature=0,
        max_tokens=400,
        # Left to itself the random model writes blanks inside the call for ever: JSON allows it.
        frequency_penalty=2,
        max_retries=0,
        default_headers={"X-Session-ID": session},
    )


def graph(session: str) -> Any:
    """The first step must call the tool, the next answers."""
    bound = chat(session).bind_tools([look], tool_choice="look", strict=True)
    free = chat(session).bind_tools([look], tool_choice="none", strict=True).bind(max_tokens=8)

    async def think(state: MessagesState) -> dict[str, Any]:
        answering = state["messages"][-1].type == "tool"
        return {"messages": [await (free if answering else bound).ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("think", think)
    builder.add_node("tools", ToolNode([look]))
    builder.add_edge(START, "think")
    builder.add_conditional_edges("think", tools_condition)
    builder.add_edge("tools", "think")
    return builder.compile()


def asked(system: str, text: str) -> list[Any]:
    return [SystemMessage(system), HumanMessage(text)]


async def plain(session: str, system: str, text: str) -> Any:
    answer = await chat(session).bind(max_tokens=8).ainvoke(asked(system, text))
    return {"content": answer.content, "usage": answer.usage_metadata}


async def stream(session: str, system: str, text: str) -> Any:
    whole, chunks = None, 0
    async for chunk in chat(session).bind(max_tokens=8).astream(asked(system, text), stream_usage=True):
        whole, chunks = chunk if whole is None else whole + chunk, chunks + 1
    return {"content": whole.content, "usage": whole.usage_metadata, "chunks": chunks}


async def run(session: str, system: str, text: str, streamed: bool) -> Any:
    ran.clear()
    state: Any = {"messages": asked(system, text)}
    if streamed:
        pieces = 0
        async for mode, part in graph(session).astream(state, stream_mode=["messages", "values"]):
            pieces += mode == "messages"
            state = part if mode == "values" else state
    else:
        state, pieces = await graph(session).ainvoke(state), 0
    types = [message.type for message in state["messages"]]
    return {"types": types, "ran": list(ran), "pieces": pieces, "last": state["messages"][-1].content}


serve(plain, stream, run)
