"""Requests that are cancelled before anybody has told their tokens: what they left has a holder."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpilot.coordinator import remains
from kvpilot.domain import OutcomeStatus, RequestFinished, SignalKind, Space, TokenArray
from tests.coordinator.world import SYSTEM, World, text_tokens, user, words

A = [SYSTEM, user(words("a", 30))]
M = Space("m")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remains, "LOOK_AFTER_S", (0.01, 0.01))


async def render(body: Any) -> TokenArray:
    return text_tokens(body["messages"])


def cancelled(world: World, path: str) -> None:
    request = world.start(A, "A", path=path)
    world.service.handle(RequestFinished(request, world.now, 0, aborted=True))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_what_a_cancelled_request_left_goes_with_its_session(path: str) -> None:
    world = World(render=render)
    world.turn([SYSTEM, user("other")], "B")
    cancelled(world, path)
    world.layer.store(M, text_tokens(A)[:24])  # the engine got so far, and stores late
    (record,) = world.signal("A", SignalKind.END)
    assert record.status is OutcomeStatus.DEFERRED
    (record,) = await world.settle([record])
    assert (record.status, bool(record.confirmed)) == (OutcomeStatus.DONE, True)
    shared = len(set(world.chunks(A)) & set(world.chunks([SYSTEM, user("other")])))
    assert world.held(A) == [True] * shared + [False] * (len(world.chunks(A)) - shared)


@pytest.mark.parametrize("stored", [0, 12])
async def test_a_rendering_nothing_speaks_for_is_not_believed(stored: int) -> None:
    """Nothing of it is in the layer, or only what another session holds."""
    world = World(render=render)
    if stored:
        world.turn([SYSTEM, user("other")], "B")
    cancelled(world, "/v1/chat/completions")
    await asyncio.sleep(0.1)
    (thread,) = world.service.book.get("default", "A").threads.values()  # type: ignore[union-attr]
    assert not thread.unsettled
    held = thread.owner in world.service.references
    assert not held or world.service.references.length(thread.owner) < len(text_tokens(A))


async def test_a_layer_that_is_dead_costs_nothing_but_the_knowledge() -> None:
    world = World(render=render)
    world.layer.dead = True
    cancelled(world, "/v1/messages")
    await asyncio.sleep(0.1)
    (thread,) = world.service.book.get("default", "A").threads.values()  # type: ignore[union-attr]
    assert not thread.unsettled and thread.owner not in world.service.references


async def test_the_next_request_of_the_conversation_counts_for_more() -> None:
    world = World(render=render)
    cancelled(world, "/v1/chat/completions")
    world.layer.store(M, text_tokens(A))
    longer = [*A, user("more " * 9)]
    world.turn(longer, "A")
    await asyncio.sleep(0.1)
    (thread,) = world.service.book.get("default", "A").threads.values()  # type: ignore[union-attr]
    assert world.service.references.length(thread.owner) >= len(text_tokens(longer))
