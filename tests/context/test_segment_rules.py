"""What holds for every conversation: spans tile the prompt, and each message gets its own text."""

from __future__ import annotations

import asyncio
import unicodedata
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.context.segments import PreviousMap, SegmentedPrompt, spans_of_messages

from .models import HERMES, LLAMA, QWEN, SMOLLM, Model, assert_tiles, model

words = st.sampled_from(
    ["a", "user", "system\n", "ls", " ", "\n", "é", "e\u0301", "你好", '"x"', "<b>", "tool", "🙂"]
)
texts = st.lists(words, max_size=6).map("".join)
calls = st.lists(
    st.tuples(st.sampled_from(["ls", "read"]), st.dictionaries(words, texts, max_size=2)), max_size=3
)
names = st.sampled_from(["ls", "read", "grep"])


@st.composite
def agent_turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A conversation as an agent has it: questions, thoughts, parallel calls and their results."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(texts)})
        for _ in range(draw(st.integers(0, 2))):
            message: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
            if draw(st.booleans()):
                message["reasoning_content"] = draw(texts)
            made = [
                {"id": f"{len(messages)}.{n}", "function": {"name": name, "arguments": arguments}}
                for n, (name, arguments) in enumerate(draw(calls))
            ]
            messages.append(message | ({"tool_calls": made} if made else {}))
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": draw(texts)} for call in made
            ]
    return messages


@st.composite
def tool_lists(draw: st.DrawFn) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "description": draw(texts), "parameters": {}}}
        for name in draw(st.lists(names, max_size=2, unique=True))
    ]


def segment(
    chat: Model, body: dict[str, Any], *, template: bool = True, previous: PreviousMap | None = None
) -> tuple[SegmentedPrompt, list[str]]:
    """The map of a prompt, and the text of each message by it."""
    tokens = chat.prompt(body)
    done = asyncio.run(chat.segmenter(template=template).segment(body, tokens, previous=previous))
    assert_tiles(done, len(tokens))
    spans = [spans_of_messages(done, number, number + 1) for number in range(len(done.message_ends))]
    return done, [chat.read(tokens, *span) for span in spans if span]


@given(agent_turns(), st.sampled_from(["byte-level", "sentencepiece"]))
@settings(max_examples=50)
def test_plain_chatml_messages_are_exact(messages: list[dict[str, Any]], kind: str) -> None:
    chat = model(SMOLLM, kind)
    body = {"messages": messages}
    done, said = segment(chat, body)
    assert (done.method, done.reason) == ("template", None)
    for message, text in zip(messages, said, strict=True):
        content = message["content"]
        if kind == "byte-level":
            content = unicodedata.normalize("NFC", content)
        expected = f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"
        assert text == expected


@given(agent_turns(), tool_lists())
@settings(max_examples=50)
def test_thinking_tool_using_agents_are_exact(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    chat = model(QWEN)
    body = {"messages": messages, "tools": tools}
    done, said = segment(chat, body)
    assert (done.method, done.reason) == ("template", None)
    for message, text in zip(messages, said, strict=True):
        if message["role"] == "user":
            content = unicodedata.normalize("NFC", message["content"])
            assert text == f"<|im_start|>user\n{content}<|im_end|>\n"
        elif message["role"] == "assistant":
            assert text.startswith("<|im_start|>assistant\n") and text.endswith("<|im_end|>\n")
            assert text.count("<tool_call>") == len(message.get("tool_calls", ()))
        elif message["role"] == "tool":
            assert text.count("<tool_response>") == 1


@given(agent_turns(), tool_lists(), st.sampled_from([SMOLLM, QWEN, LLAMA, HERMES]))
@settings(max_examples=50)
def test_searching_without_the_template_still_tiles(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], template: str
) -> None:
    chat = model(template)
    if template is LLAMA:  # it takes one call at a time
        messages = [m | {"tool_calls": m["tool_calls"][:1]} if m.get("tool_calls") else m for m in messages]
    body = {"messages": messages, "tools": tools}
    searched, _ = segment(chat, body, template=False)
    exact, _ = segment(chat, body)
    if exact.method != "template" or exact.reason:
        return
    # What is told at all begins no earlier than the message does, and behind the one before it.
    for number in range(1, len(messages)):
        span = spans_of_messages(searched, number, number + 1)
        whole = spans_of_messages(exact, number, number + 1)
        assert span is None or whole is None or whole[0] <= span[0] <= whole[1]


@given(agent_turns(), tool_lists(), st.integers(1, 12))
@settings(max_examples=50)
def test_going_on_from_an_earlier_map_gives_the_map_made_anew(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], cut: int
) -> None:
    chat = model(QWEN)
    cut = min(cut, len(messages))
    before = {"messages": messages[:cut], "tools": tools}
    after = {"messages": messages, "tools": tools}
    earlier = PreviousMap(segment(chat, before)[0], chat.prompt(before), cut)
    assert segment(chat, after, previous=earlier) == segment(chat, after)
