"""What a client sends again under its own id is answered again and not done again."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvpilot.coordinator import actions
from kvpilot.domain import ActionRecord, Command, OutcomeStatus
from kvpilot.hints import HintRequest, read_hints
from tests.coordinator.world import SYSTEM, World, user, words

A = [SYSTEM, user(words("u", 30))]


def envelope(
    action_id: str | None, message_id: str | None, word: str = "kv.release", session: str = "A"
) -> tuple[Command, ...]:
    """The commands of a KV-hint envelope with one action, as the gateway reads it."""
    action: dict[str, Any] = {"action_type": word, "payload": {"session_id": session}}
    sent: dict[str, Any] = {"protocol_version": "0.1", "actions": [action]}
    if action_id:
        action["action_id"] = action_id
    if message_id:
        sent["message_id"] = message_id
    return read_hints(HintRequest({"kv_hints": msgspec.Raw(msgspec.json.encode(sent))}, {})).commands


async def send(world: World, commands: tuple[Command, ...]) -> ActionRecord:
    ((record,),) = [await world.service.command(command) for command in commands]
    return record


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (("a-1", "m-1"), ("a-1", "m-1")),
        (("a-1", "m-1"), ("a-1", "m-2")),
        (("a-1", None), ("a-1", None)),
        ((None, "m-1"), (None, "m-1")),
    ],
)
async def test_a_repeated_action_or_message_is_answered_with_the_first_outcome(
    first: tuple[str | None, str | None], again: tuple[str | None, str | None]
) -> None:
    world = World()
    world.turn(A, "A")
    done = await world.settle([await send(world, envelope(*first))])
    assert done[0].status is OutcomeStatus.DONE and done[0].confirmed
    world.turn(A, "A")
    held = world.held(A)
    repeat = await send(world, envelope(*again))
    assert repeat == done[0]
    await asyncio.sleep(0)
    assert any(held) and world.held(A) == held, "what the session has again by now stays"


async def test_new_ids_are_new_actions() -> None:
    world = World()
    world.turn(A, "A")
    first = await send(world, envelope("a-1", "m-1", "kv.prefetch"))
    assert (await send(world, envelope("a-2", "m-2", "kv.prefetch"))).id != first.id
    assert (await send(world, envelope(None, None, "kv.prefetch"))).id != first.id


async def test_an_id_used_for_something_else_is_rejected_with_the_reason() -> None:
    world = World()
    world.turn(A, "A")
    await send(world, envelope("a-1", "m-1", "kv.prefetch"))
    other = await send(world, envelope("a-1", "m-2", "kv.release"))
    assert other.status is OutcomeStatus.REJECTED and "a-1" in other.reason
    other = await send(world, envelope("a-2", "m-1", "kv.release"))
    assert other.status is OutcomeStatus.REJECTED and "m-1" in other.reason
    assert all(world.held(A))


async def test_ids_of_one_tenant_are_nothing_to_another() -> None:
    world = World()
    first = await send(world, envelope("a-1", "m-1"))
    (command,) = envelope("a-1", "m-1")
    (other,) = await world.service.command(msgspec.structs.replace(command, tenant="other"))
    assert other.id != first.id


async def test_sent_twice_at_once_it_is_done_once() -> None:
    world = World()
    world.turn(A, "A")
    (command,) = envelope("a-1", "m-1")
    one, two = await asyncio.gather(world.service.command(command), world.service.command(command))
    assert [record.id for record in one] == [record.id for record in two]
    assert len(list(world.service.actions.newest())) == 1


async def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "MAX_RECORDS", 3)
    world = World()
    first = await send(world, envelope("a-0", "m-0"))
    for number in range(1, 4):
        await send(world, envelope(f"a-{number}", f"m-{number}"))
    assert (await send(world, envelope("a-0", "m-0"))).id != first.id
    assert len(world.service.actions._named) <= 2 * 3


async def test_a_prefetch_that_failed_is_tried_again_under_the_same_id() -> None:
    world = World()
    world.turn(A, "A")
    world.layer.dead = True
    (failed,) = await world.settle([await send(world, envelope("a-1", "m-1", "kv.prefetch"))])
    assert failed.status is OutcomeStatus.FAILED
    world.layer.dead = False
    (done,) = await world.settle([await send(world, envelope("a-1", "m-1", "kv.prefetch"))])
    assert done.status is OutcomeStatus.DONE
    assert await send(world, envelope("a-1", "m-1", "kv.prefetch")) == done
