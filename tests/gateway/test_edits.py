"""Anthropic's context edits: what they clear, when, and what is reported."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.gateway.editing import Edited, edit_context
from kvpilot.gateway.edits import PLACEHOLDER, Message
from kvpilot.hints import HintRequest, read_hints

USES = "clear_tool_uses_20250919"
THINKING = "clear_thinking_20251015"


def history(steps: int, *, tools: tuple[str, ...] = ("read",), thinking: bool = False) -> list[Message]:
    """A question and ``steps`` tool uses with their results, which take a thousand words each."""
    messages: list[Message] = [{"role": "user", "content": "go"}]
    for n in range(steps):
        use = {"type": "tool_use", "id": f"t{n}", "name": tools[n % len(tools)], "input": {"n": n}}
        thought = [{"type": "thinking", "thinking": f"thought {n}", "signature": "s"}] if thinking else []
        messages += [
            {"role": "assistant", "content": [*thought, use]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": f"t{n}", "content": f"{n} " + "w " * 1000}
                ],
            },
        ]
    return messages


async def words(body: bytes) -> int | None:
    """A tokenizer that is easy to see through."""
    return len(body.split())


async def edit(messages: Any, *edits: Any, count: Any = words) -> Edited:
    body = {"model": "m", "max_tokens": 9, "messages": messages, "context_management": {"edits": list(edits)}}
    raw = json.dumps(body).encode()
    hints = read_hints(HintRequest(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]), {}, body=raw))
    return await edit_context(raw, hints.edits, count)


def results(edited: Edited) -> list[str]:
    """Which results are left, as their first word."""
    blocks = [
        b for m in json.loads(edited.body)["messages"] if isinstance(m["content"], list) for b in m["content"]
    ]
    return ["-" if b["content"] == PLACEHOLDER else b["content"].split()[0] for b in blocks if "content" in b]


def inputs(edited: Edited) -> list[Any]:
    blocks = [
        b for m in json.loads(edited.body)["messages"] if isinstance(m["content"], list) for b in m["content"]
    ]
    return [b["input"] for b in blocks if "input" in b]


async def test_the_oldest_results_go_and_three_stay() -> None:
    edited = await edit(history(5), {"type": USES, "trigger": {"type": "input_tokens", "value": 4000}})
    assert results(edited) == ["-", "-", "2", "3", "4"]
    assert inputs(edited) == [{"n": n} for n in range(5)]
    (done,) = edited.applied
    assert (done["type"], done["cleared_tool_uses"]) == (USES, 2)
    assert edited.original_tokens is not None
    assert done["cleared_input_tokens"] == edited.original_tokens - len(edited.body.split()) > 1900
    body = json.loads(edited.body)
    assert "context_management" not in body
    assert (body["model"], body["max_tokens"]) == ("m", 9)


@pytest.mark.parametrize(
    ("more", "left"),
    [
        ({"trigger": {"type": "input_tokens", "value": 40_000}}, "01234"),
        ({}, "01234"),
        ({"trigger": {"type": "tool_uses", "value": 5}}, "01234"),
        ({"trigger": {"type": "tool_uses", "value": 4}}, "--234"),
        (
            {"trigger": {"type": "input_tokens", "value": 1}, "keep": {"type": "tool_uses", "value": 1}},
            "----4",
        ),
        (
            {"trigger": {"type": "input_tokens", "value": 1}, "keep": {"type": "tool_uses", "value": 0}},
            "-----",
        ),
        (
            {"trigger": {"type": "input_tokens", "value": 1}, "keep": {"type": "tool_uses", "value": 9}},
            "01234",
        ),
        ({"trigger": {"type": "tool_uses", "value": 0}, "keep": "all"}, "01234"),
        (
            {"trigger": {"type": "tool_uses", "value": 0}, "keep": {"type": "thinking_turns", "value": 0}},
            "01234",
        ),
        ({"trigger": {"type": "tokens", "value": 1}}, "01234"),
        (
            {
                "trigger": {"type": "tool_uses", "value": 0},
                "clear_at_least": {"type": "tool_uses", "value": 1},
            },
            "01234",
        ),
        ({"trigger": {"type": "tool_uses", "value": 0}, "exclude_tools": "read"}, "01234"),
        ({"trigger": {"type": "input_tokens", "value": 1}, "exclude_tools": ["read"]}, "0-234"),
        ({"trigger": {"type": "input_tokens", "value": 1}, "exclude_tools": ["read", "write"]}, "01234"),
        (
            {
                "trigger": {"type": "input_tokens", "value": 1},
                "clear_at_least": {"type": "input_tokens", "value": 2500},
            },
            "01234",
        ),
        (
            {
                "trigger": {"type": "input_tokens", "value": 1},
                "clear_at_least": {"type": "input_tokens", "value": 1500},
            },
            "--234",
        ),
    ],
)
async def test_when_and_what(more: dict[str, Any], left: str) -> None:
    edited = await edit(history(5, tools=("read", "write")), {"type": USES, **more})
    assert "".join(results(edited)) == left
    assert bool(edited.applied) == ("-" in left)


@pytest.mark.parametrize(("which", "cleared"), [(True, [0, 1]), (["read"], [0]), (["none"], []), (False, [])])
async def test_inputs_go_where_that_is_asked(which: Any, cleared: list[int]) -> None:
    trigger = {"type": "input_tokens", "value": 1}
    uses = history(5, tools=("read", "write"))
    edited = await edit(uses, {"type": USES, "trigger": trigger, "clear_tool_inputs": which})
    assert [i for i, given in enumerate(inputs(edited)) if given == {}] == cleared
    assert results(edited)[:2] == ["-", "-"]


async def test_an_id_that_is_given_again_is_kept_with_its_newest_result() -> None:
    """Some engines and harnesses call every turn's first tool use ``call_0``."""
    trigger = {"type": "tool_uses", "value": 0}
    messages = json.loads(json.dumps(history(5, tools=("read", "write"))).replace('"t4"', '"t0"'))
    edited = await edit(messages, {"type": USES, "trigger": trigger})
    assert results(edited) == ["0", "-", "2", "3", "4"]
    messages = json.loads(json.dumps(messages).replace('"t1"', '"t0"').replace('"t2"', '"t0"'))
    edited = await edit(
        messages, {"type": USES, "trigger": trigger, "keep": {"type": "tool_uses", "value": 1}}
    )
    assert results(edited) == ["0", "1", "2", "-", "4"]


async def test_a_request_waits_for_three_counts_at_most() -> None:
    asked = []

    async def count(body: bytes) -> int | None:
        asked.append(body)
        return await words(body)

    never = {
        "type": USES,
        "trigger": {"type": "tool_uses", "value": 0},
        "clear_at_least": {"type": "input_tokens", "value": 10**9},
    }
    edited = await edit(history(5), *[never] * 8, count=count)
    assert (len(asked), edited.applied, results(edited)) == (3, [], ["0", "1", "2", "3", "4"])


async def test_what_is_cleared_already_is_not_cleared_again() -> None:
    trigger = {"type": "tool_uses", "value": 1}
    once = await edit(history(5), {"type": USES, "trigger": trigger})
    again = await edit(json.loads(once.body)["messages"], {"type": USES, "trigger": trigger})
    assert (again.applied, results(again)) == ([], results(once))


async def test_thoughts_of_older_turns_go() -> None:
    """Tool results do not end a turn: only the second question does."""
    messages = [
        *history(2, thinking=True),
        {"role": "user", "content": "more"},
        *history(1, thinking=True)[1:],
    ]
    edited = await edit(messages, {"type": THINKING})
    assert thoughts(edited) == [False, False, True]
    (done,) = edited.applied
    assert (done["type"], done["cleared_thinking_turns"]) == (THINKING, 1)
    assert done["cleared_input_tokens"] > 0
    for keep in ("all", {"type": "all"}, {"type": "thinking_turns", "value": 2}):
        kept = await edit(messages, {"type": THINKING, "keep": keep})
        assert (thoughts(kept), kept.applied) == ([True] * 3, [])


def thoughts(edited: Edited) -> list[bool]:
    said = [m["content"] for m in json.loads(edited.body)["messages"] if m["role"] == "assistant"]
    return [any(b["type"] == "thinking" for b in content) for content in said]


async def test_a_message_of_nothing_but_thoughts_stays() -> None:
    lone = {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "s"}]}
    messages = [{"role": "user", "content": "a"}, lone, {"role": "user", "content": "b"}]
    messages += [{"role": "assistant", "content": lone["content"] + [{"type": "text", "text": "t"}]}]
    edited = await edit(messages, {"type": THINKING})
    assert (json.loads(edited.body)["messages"], edited.applied) == (messages, [])


async def test_edits_are_applied_in_their_order_and_counted_apart() -> None:
    uses = {
        "type": USES,
        "trigger": {"type": "input_tokens", "value": 1},
        "keep": {"type": "tool_uses", "value": 0},
    }
    messages = [
        *history(2, thinking=True),
        {"role": "user", "content": "more"},
        *history(1, thinking=True)[1:],
    ]
    edited = await edit(messages, {"type": THINKING}, uses)
    assert [done["type"] for done in edited.applied] == [THINKING, USES]
    total = sum(done["cleared_input_tokens"] for done in edited.applied)
    assert edited.original_tokens == total + len(edited.body.split())


async def test_what_is_not_applied_here_stays_for_the_engine() -> None:
    compact = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 1}}
    later = {"type": "clear_images_20300101"}
    edited = await edit(
        history(5), compact, None, {"type": USES, "trigger": {"type": "tool_uses", "value": 1}}, later
    )
    assert json.loads(edited.body)["context_management"] == {"edits": [compact, None, later]}
    assert [done["type"] for done in edited.applied] == [USES]


async def test_without_counts_nothing_is_cleared() -> None:
    async def mute(body: bytes) -> int | None:
        return None

    edited = await edit(history(5), {"type": USES, "trigger": {"type": "tool_uses", "value": 1}}, count=mute)
    assert (results(edited), edited.applied) == (["0", "1", "2", "3", "4"], [])


async def test_a_short_request_is_not_even_counted() -> None:
    async def never(body: bytes) -> int | None:
        raise AssertionError

    assert (await edit(history(5), {"type": USES}, count=never)).applied == []


@given(st.integers(0, 8), st.integers(0, 9), st.sets(st.sampled_from(["a", "b", "c"])), st.booleans())
async def test_clearing_takes_nothing_but_old_results(
    steps: int, keep: int, excluded: set[str], thinking: bool
) -> None:
    messages = history(steps, tools=("a", "b", "c"), thinking=thinking)
    edited = await edit(
        messages,
        {
            "type": USES,
            "trigger": {"type": "tool_uses", "value": 0},
            "keep": {"type": "tool_uses", "value": keep},
            "exclude_tools": sorted(excluded),
        },
    )
    after = json.loads(edited.body)["messages"]
    assert len(after) == len(messages)
    gone = [n for n in range(steps) if n < steps - keep and "abc"[n % 3] not in excluded]
    for number, (old, new) in enumerate(zip(messages, after, strict=True)):
        if number % 2 == 0 and number and number // 2 - 1 in gone:
            assert new["content"] == [{**old["content"][0], "content": PLACEHOLDER}]
        else:
            assert new == old
    assert sum(done["cleared_tool_uses"] for done in edited.applied) == len(gone)
