"""A restart brings back what was known and takes up what was acknowledged."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.coordinator.world import World

from kvpilot.control.store import Store
from kvpilot.coordinator import executor
from kvpilot.coordinator.actions import Work
from kvpilot.domain import (
    ActionKind,
    ActionRecord,
    Command,
    OutcomeStatus,
    SessionRef,
    SessionState,
    SignalKind,
    Space,
    TargetKind,
    Tier,
)
from kvpilot.sessions.book import Session

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
        fresh.service.restore(session, threads)
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


async def test_a_guessed_parent_stays_a_guess(store: Store) -> None:
    world = World()
    attach(world, store)
    call = {"function": {"name": "Task", "arguments": "{}"}}
    world.turn([SYSTEM, user("a")], "main", reply={"role": "assistant", "tool_calls": [call]})
    world.turn([{"role": "system", "content": "rules of another agent"}, user("b")], "sub")
    world.turn([SYSTEM, user("c")], "named", parent="main")
    await store.flush(world.service.references)
    after = reload(store, world).service.book
    guessed = {s.id: s.parent_guessed for s in after.sessions.values() if s.parent == ("default", "main")}
    assert guessed == {"sub": True, "named": False}


async def test_segments_found_after_the_session_was_written_survive(store: Store) -> None:
    world = World()
    attach(world, store)
    world.turn([SYSTEM, user("a")], "A")
    await store.flush(world.service.references)
    ((_, thread),) = world.service.book.threads()
    assert not thread.segments_method
    await world.service.segments.of(thread)
    await store.flush(world.service.references)
    ((_, after),) = reload(store, world).service.book.threads()
    assert after.segments_method
    assert (after.segments_method, after.segments) == (thread.segments_method, thread.segments)


async def test_what_is_sent_again_after_a_restart_is_not_done_again(store: Store) -> None:
    world = World()
    attach(world, store)
    context = [SYSTEM, user("a")]
    world.turn(context, "A")
    command = Command(ActionKind.EVICT, "default", "", SessionRef("A"), client_ids=("action:a-1",))
    (done,) = await world.settle(await world.service.command(command))
    assert done.status is OutcomeStatus.DONE and done.confirmed
    await store.flush(world.service.references)
    after = reload(store, world)
    after.turn(context, "A")
    held = after.held(context)
    assert await after.service.command(command) == [done]
    await asyncio.sleep(0)
    assert any(held) and after.held(context) == held


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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "CONFIRM_STEP_S", 0.005)


def command(kind: ActionKind, session: str = "A", **more: Any) -> Command:
    return Command(kind, "default", "", SessionRef(session), client_ids=("action:a-1",), **more)


async def deferred(world: World, store: Store, asked: Command) -> ActionRecord:
    """Asked for while a request of the session runs; then the coordinator is killed."""
    attach(world, store)
    world.turn([SYSTEM, user("a")], "A")
    world.turn([SYSTEM, user("b")], "B")
    world.start([SYSTEM, user("a"), {"role": "assistant", "content": "ok"}, user("more")], "A")
    (record,) = await world.service.command(asked)
    assert record.status is OutcomeStatus.DEFERRED
    await store.flush(world.service.references)
    await world.service.close()
    return record


def shared(world: World) -> int:
    a, b = world.chunks([SYSTEM, user("a")]), world.chunks([SYSTEM, user("b")])
    return len(set(a) & set(b))


async def test_an_eviction_that_waited_for_a_request_is_done_after_a_restart(
    store: Store, quick: None
) -> None:
    world = World()
    asked = command(ActionKind.EVICT)
    record = await deferred(world, store, asked)
    after = reload(store, world)
    (again,) = await after.service.command(asked)
    assert again.id == record.id
    (final,) = await after.settle([record])
    assert (final.status, final.confirmed) == (OutcomeStatus.DONE, record.planned)
    held, head = after.held([SYSTEM, user("a")]), shared(after)
    assert (held[:head], any(held[head:])) == ([True] * head, False), "what B holds stays"
    assert all(after.held([SYSTEM, user("b")]))
    session = after.service.book.get("default", "A")
    assert session is not None and session.state is SessionState.ENDED


async def test_a_range_that_waited_for_a_request_is_evicted_after_a_restart(
    store: Store, quick: None
) -> None:
    world = World()
    messages = {"messages": [SYSTEM, user("a")]}
    asked = command(
        ActionKind.EVICT, target=TargetKind.TOKENS, start=16, end=24, body=json.dumps(messages).encode()
    )
    record = await deferred(world, store, asked)
    after = reload(store, world)
    (final,) = await after.settle([record])
    assert final.status is OutcomeStatus.DONE and final.confirmed
    held = after.held([SYSTEM, user("a")])
    assert (all(held[:4]), any(held[4:6]), all(held[6:])) == (True, False, True)


async def test_a_demotion_that_waited_for_a_request_is_done_after_a_restart(
    store: Store, quick: None
) -> None:
    world = World()
    record = await deferred(world, store, command(ActionKind.DEMOTE))
    after = reload(store, world)
    (final,) = await after.settle([record])
    assert final.status is OutcomeStatus.DONE and final.confirmed
    tail = [
        after.layer.tiers(Space("m"), chunk) for chunk in after.chunks([SYSTEM, user("a")])[shared(after) :]
    ]
    assert tail and all(tiers == {Tier.DISK} for tiers in tail)


async def test_a_session_that_went_on_before_the_restart_is_not_evicted_after_it(store: Store) -> None:
    world = World()
    record = await deferred(world, store, command(ActionKind.EVICT))
    world.start([SYSTEM, user("a")], "A")
    await store.flush(world.service.references)
    after = reload(store, world)
    (final,) = await after.settle([record])
    assert final.status is OutcomeStatus.REJECTED
    assert all(after.held([SYSTEM, user("a")]))


async def test_what_came_to_nothing_is_tried_again_under_the_same_id_also_after_restarts(
    store: Store, quick: None
) -> None:
    world = World()
    attach(world, store)
    (missing,) = await world.service.command(command(ActionKind.EVICT))
    assert missing.status is OutcomeStatus.MISSING
    await store.flush(world.service.references)
    after = reload(store, world)
    after.turn([SYSTEM, user("a")], "A")
    (done,) = await after.settle(await after.service.command(command(ActionKind.EVICT)))
    assert (done.status, bool(done.confirmed)) == (OutcomeStatus.DONE, True)
    await store.flush(after.service.references)
    last = reload(store, after)
    assert await last.service.command(command(ActionKind.EVICT)) == [done]


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


def known(name: str) -> Session:
    return Session(key=("t", name), explicit=True)


def stored(store: Store) -> list[str]:
    return sorted(session.id for session, _ in store.load_sessions())


async def test_what_a_locked_store_missed_is_written_when_it_works_again(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    references = World().service.references
    work = Work(Space("m"), (b"c" * 32,))
    accepted = ActionRecord("a-1", ActionKind.EVICT, OutcomeStatus.ACCEPTED, 1.0)
    finished = ActionRecord("a-2", ActionKind.EVICT, OutcomeStatus.DONE, 2.0)
    other = sqlite3.connect(tmp_path / "sub" / "k.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store.session_changed(known("early"))
    store.put_action(accepted, work)
    store.put_action(ActionRecord("a-2", ActionKind.EVICT, OutcomeStatus.ACCEPTED, 2.0), work)
    await store.flush(references)
    store.put_action(accepted, None)
    store.put_action(finished, None)
    store.session_changed(known("late"))
    await store.flush(references)
    assert (stored(store), store.load_actions()) == ([], ([], []))
    assert [r.message.count("k.sqlite cannot be written") for r in caplog.records] == [1], "it is said once"
    other.execute("ROLLBACK")
    await store.flush(references)
    assert stored(store) == ["early", "late"]
    assert store.load_actions() == ([finished], [(accepted, work)])


async def test_a_row_that_cannot_be_written_costs_only_itself(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("before", "bad\ud800", "after"):
        store.session_changed(known(name))
        store.put_action(ActionRecord(name, ActionKind.EVICT, OutcomeStatus.DONE, 1.0), None)
    await store.flush(World().service.references)
    assert stored(store) == ["after", "before"]
    assert [record.id for record in store.load_actions()[0]] == ["after", "before"]
    assert sum("cannot be stored as it is" in r.message for r in caplog.records) == 2


async def test_damaged_actions_and_memories_are_skipped(store: Store) -> None:
    for name in ("a", "b"):
        store.put_action(
            ActionRecord(name, ActionKind.EVICT, OutcomeStatus.ACCEPTED, 1.0), Work(Space("m"), ())
        )
    store.put_action(ActionRecord("c", ActionKind.EVICT, OutcomeStatus.DONE, 1.0), None)
    store.put_memory("learned", {"x": 1})
    store._db.execute("UPDATE actions SET record=x'00' WHERE id IN ('a', 'c')")
    store._db.execute("UPDATE actions SET work='text' WHERE id='b'")
    store._db.execute("UPDATE memory SET data=x'c1'")
    closed, pending = store.load_actions()
    assert (closed, [(r.id, work) for r, work in pending]) == ([], [("b", None)])
    assert store.load_memory("learned") is None


async def test_a_cancelled_flush_loses_nothing(store: Store) -> None:
    references = World().service.references
    store.session_changed(known("A"))
    flush = asyncio.create_task(store.flush(references))
    await asyncio.sleep(0)
    flush.cancel()
    await store.flush(references)
    assert flush.cancelled() and stored(store) == ["A"]


@pytest.mark.parametrize("damage", ["text", "cut", "page"])
def test_a_damaged_file_is_moved_aside(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "k.sqlite"
    store = Store(path)
    for n in range(200):
        store.session_changed(known(f"{n:0100}"))
    asyncio.run(store.flush(World().service.references))
    store.close()
    intact = path.read_bytes()
    damaged = {
        "text": b"this is no database" * 100,
        "cut": intact[: len(intact) // 2],
        "page": intact[:8192] + b"\xff" * 8192 + intact[16384:],
    }[damage]
    path.write_bytes(damaged)
    caplog.set_level(logging.WARNING)
    fresh = Store(path)
    assert stored(fresh) == []
    (aside,) = tmp_path.glob("k.sqlite.damaged-????????-??????")
    assert aside.read_bytes() == damaged
    (warning,) = caplog.messages
    assert f"{path} is damaged" in warning and f"moved to {aside}," in warning
    fresh.session_changed(known("new"))
    asyncio.run(fresh.flush(World().service.references))
    fresh.close()
    assert stored(Store(path)) == ["new"]


def test_a_file_that_cannot_be_opened_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "k.sqlite").mkdir()
    with pytest.raises(RuntimeError, match=r"k\.sqlite cannot be opened .*writable"):
        Store(tmp_path / "k.sqlite")
