"""A restart brings back what was known and takes up what was acknowledged."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.coordinator.world import World

from kvpilot.control.store import Store
from kvpilot.coordinator import executor
from kvpilot.domain import ActionKind, OutcomeStatus, SessionState, SignalKind

SYSTEM = {"role": "system", "content": "rules that are long enough for chunks of four tokens"}


def user(tag: str) -> dict[str, str]:
    return {"role": "user", "content": " ".join(f"{tag}{i}" for i in range(20))}


def attach(world: World, store: Store) -> None:
    world.service.actions.listener = store.put_action
    world.service.on_session = store.session_changed
    world.service.on_forget = store.session_forgotten


def reload(store: Store, world: World) -> World:
    """A new coordinator over the same cache layer, as after a crash."""
    fresh = World()
    fresh.layer = world.layer
    fresh.service.backend = fresh.service.executor._backend = world.layer
    for session, threads in store.load_sessions():
        for thread, tokens in threads:
            if tokens is not None:
                fresh.service.references.set(thread.owner, thread.space, tokens)
        fresh.service.book.restore(session, [thread for thread, _ in threads])
    closed, pending = store.load_actions()
    for record in closed:
        fresh.service.actions.adopt(record)
    attach(fresh, store)
    fresh.service.resume(pending)
    return fresh


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "sub" / "k.sqlite")


async def test_sessions_references_and_identity_survive(store: Store) -> None:
    world = World()
    attach(world, store)
    a, b = [SYSTEM, user("a")], [SYSTEM, user("b")]
    world.turn(a, "A", parent="P", reply={"role": "assistant", "tool_calls": [{"function": {"name": "ls"}}]})
    world.turn(b)
    await store.flush(world.service.references)
    after = reload(store, world)
    session = after.service.book.get("default", "A")
    assert session is not None
    assert (session.state, session.waiting_for) == (SessionState.WAITING_TOOL, ("ls",))
    assert session.parent == ("default", "P")
    assert after.service.references.holders(world.service.space_of(""), after.chunks(a)) == [
        *([2] * len(set(after.chunks(a)) & set(after.chunks(b)))),
        *([1] * (len(after.chunks(a)) - len(set(after.chunks(a)) & set(after.chunks(b))))),
    ]
    again = [*b, {"role": "assistant", "content": "ok"}, user("more")]
    before = len(after.service.book.sessions)
    after.turn(again)
    assert len(after.service.book.sessions) == before, "the conversation without an id is recognised"
    after.service.references.check_integrity()


async def test_an_acknowledged_eviction_is_taken_up_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "CONFIRM_STEP_S", 0.005)
    world = World()
    attach(world, store)
    a = [SYSTEM, user("a")]
    world.turn(a, "A")
    await store.flush(world.service.references)
    (record,) = world.signal("A", SignalKind.END)
    await world.service.close()  # crash before the action began
    assert all(world.held(a))
    await store.flush(world.service.references)
    after = reload(store, world)
    final = await after.service.actions.wait(record.id, 10.0)
    assert final is not None and not final.open
    for other in await after.settle(list(after.service.actions.newest())):
        assert other.status is OutcomeStatus.DONE
    assert not any(after.held(a))


async def test_forgotten_sessions_are_gone_and_finished_actions_remain(store: Store) -> None:
    world = World()
    attach(world, store)
    world.turn([SYSTEM, user("a")], "A", stored=False)
    (record,) = await world.settle(world.signal("A", SignalKind.TOOL_FINISHED))
    world.service.forget(world.service.book.get("default", "A"))  # type: ignore[arg-type]
    await store.flush(world.service.references)
    after = reload(store, world)
    assert not after.service.book.sessions
    kept = after.service.actions.get(record.id)
    assert kept is not None and kept.kind is ActionKind.PREFETCH and kept.status is record.status


async def test_a_damaged_row_costs_only_itself(store: Store) -> None:
    world = World()
    attach(world, store)
    world.turn([SYSTEM, user("a")], "A")
    world.turn([SYSTEM, user("b")], "B")
    await store.flush(world.service.references)
    store._db.execute("UPDATE sessions SET data=x'00' WHERE id='A'")
    assert [s.id for s, _ in store.load_sessions()] == ["B"]
