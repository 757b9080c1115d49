"""Edits of a range: of messages, tokens or engine blocks."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import msgspec
import pytest

from kvpilot.context.segments import SegmentedPrompt
from kvpilot.domain import (
    ActionKind,
    Command,
    OutcomeStatus,
    SessionRef,
    SessionState,
    SignalKind,
    Space,
    TargetKind,
    Tier,
)
from kvpilot.sessions.book import Thread
from tests.coordinator.world import SYSTEM, World, text_tokens, user, words


def ranged(target: TargetKind, start: int, end: int, kind: ActionKind = ActionKind.DEMOTE) -> Command:
    return Command(kind, "default", "", SessionRef("A"), target=target, start=start, end=end)


@pytest.mark.parametrize(("target", "size"), [(TargetKind.TOKENS, 1), (TargetKind.BLOCKS, 2)])
async def test_a_range_of_tokens_or_blocks_is_the_chunks_it_touches(target: TargetKind, size: int) -> None:
    world = World(block_size=2)
    messages = [SYSTEM, user(words("u", 30))]
    world.turn(messages, "A")
    (record,) = await world.settle(await world.service.command(ranged(target, 8 // size, 16 // size)))
    assert (record.status, record.confirmed) == (OutcomeStatus.DONE, 2)
    chunks = world.chunks(messages)
    in_host = [Tier.HOST in world.layer.tiers(Space("m"), chunk) for chunk in chunks]
    assert in_host == [index not in (2, 3) for index in range(len(chunks))]


async def test_a_range_that_ends_behind_the_context_is_missing() -> None:
    world = World(block_size=2)
    messages = [SYSTEM, user(words("u", 30))]
    world.turn(messages, "A")
    total = len(text_tokens(messages))
    (record,) = await world.service.command(ranged(TargetKind.TOKENS, 0, total + 1))
    assert record.status is OutcomeStatus.MISSING
    (record,) = await world.service.command(ranged(TargetKind.BLOCKS, 0, total // 2 + 2))
    assert record.status is OutcomeStatus.MISSING


async def test_a_released_token_range_takes_what_is_behind_it_along_later() -> None:
    world = World()
    messages = [SYSTEM, user(words("u", 30))]
    world.turn(messages, "A")
    (record,) = await world.settle(
        await world.service.command(ranged(TargetKind.TOKENS, 16, 24, ActionKind.EVICT))
    )
    assert (record.status, record.confirmed) == (OutcomeStatus.DONE, 2)
    held = world.held(messages)
    assert held[:4] == [True] * 4
    assert held[4:6] == [False] * 2


async def test_a_range_of_several_contexts_is_not_guessed() -> None:
    world = World()
    main, side = (
        [SYSTEM, user(words("u", 30))],
        [{"role": "system", "content": "title"}, user(words("t", 30))],
    )
    world.turn(main, "A")
    world.turn(side, "A")
    command = ranged(TargetKind.TOKENS, 0, 8)
    (record,) = await world.service.command(command)
    assert record.status is OutcomeStatus.MISSING
    named = msgspec.structs.replace(command, body=json.dumps({"messages": main}).encode())
    (record,) = await world.settle(await world.service.command(named))
    assert record.status is OutcomeStatus.DONE


def edit(session: str, messages: list[dict[str, str]], start: int, end: int) -> Command:
    body = json.dumps({"messages": messages}).encode()
    target = TargetKind.MESSAGES
    return Command(ActionKind.EVICT, "default", "", SessionRef(session), target, start, end, body)


@pytest.mark.parametrize(("start", "end"), [(1, 2), (2, 3), (5, 9)])
async def test_a_range_whose_borders_are_not_certain_is_not_guessed(start: int, end: int) -> None:
    world = World()
    a = [SYSTEM, *(user(words(f"m{n}x", 12)) for n in range(4))]
    world.turn(a, "A")
    world.segmented(a, "A")
    (known,) = world.service.segments._known.values()
    known.map = dataclasses.replace(known.map, inexact=frozenset((1, 4)))
    (record,) = await world.service.command(edit("A", a, start, end))
    assert record.status is OutcomeStatus.MISSING and record.reason
    (record,) = await world.settle(await world.service.command(edit("A", a, 3, 4)))
    assert record.status is OutcomeStatus.DONE and record.confirmed


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("how", ["command", "signal", "restart"])
async def test_what_a_range_edit_left_behind_goes_with_its_session(start: int, how: str) -> None:
    world = World()
    a = [SYSTEM, *(user(words(f"m{n}x", 12)) for n in range(5))]
    world.turn(a, "A")
    world.segmented(a, "A")
    await world.settle(await world.service.command(edit("A", a, start, start + 1)))
    assert any(world.held(a)), "behind the range nothing goes before its context does"
    if how == "command":
        command = Command(ActionKind.EVICT, "default", "", SessionRef("A"))
        (record,) = await world.settle(await world.service.command(command))
        assert record.planned == record.confirmed > 0
    elif how == "signal":
        await world.settle(world.signal("A", SignalKind.END))
    else:
        world.service.book.get("default", "A").state = SessionState.ENDED
        world.service.resume([])
        await world.settle(world.service.actions.open_records())
    assert not any(world.held(a))


async def test_a_prefetch_of_what_a_range_edit_left_behind_is_missing() -> None:
    world = World()
    messages = [SYSTEM, user(words("u", 60))]
    world.turn(messages, "A")
    await world.settle(await world.service.command(ranged(TargetKind.TOKENS, 16, 24, ActionKind.EVICT)))
    (behind,) = await world.service.command(ranged(TargetKind.TOKENS, 32, 40, ActionKind.PREFETCH))
    assert behind.status is OutcomeStatus.MISSING
    (across,) = await world.settle(
        await world.service.command(ranged(TargetKind.TOKENS, 8, 40, ActionKind.PREFETCH))
    )
    assert across.status is OutcomeStatus.DONE


async def test_range_edits_one_after_another_each_remove_their_range() -> None:
    world = World()
    a = [SYSTEM, *(user(words(f"m{n}x", 12)) for n in range(6))]
    world.turn(a, "A")
    world.segmented(a, "A")
    (first,) = await world.settle(await world.service.command(edit("A", a, 1, 2)))
    before = world.held(a)
    (second,) = await world.settle(await world.service.command(edit("A", a, 4, 5)))
    assert first.confirmed and second.confirmed == second.planned == sum(before) - sum(world.held(a)) > 0
    (again,) = await world.settle(await world.service.command(edit("A", a, 4, 5)))
    assert again.planned == 0


async def test_a_range_of_a_context_that_is_given_up_while_it_is_looked_for_is_missing() -> None:
    world = World()
    messages = [SYSTEM, user(words("u", 30))]
    world.turn(messages, "A")
    segments, ended = world.service.segments, asyncio.Event()

    async def slowly(thread: Thread) -> SegmentedPrompt | None:
        await ended.wait()
        return await segments.of(thread)

    world.service.resolver._segments_of = slowly
    command = ranged(TargetKind.MESSAGES, 0, 1)
    command = msgspec.structs.replace(command, body=json.dumps({"messages": messages}).encode())
    asked = asyncio.create_task(world.service.command(command))
    await asyncio.sleep(0)
    await world.settle(world.signal("A", SignalKind.END))
    ended.set()
    (record,) = await asked
    assert (record.status, record.reason) == (
        OutcomeStatus.MISSING,
        "session 'A' gave its context up meanwhile",
    )
