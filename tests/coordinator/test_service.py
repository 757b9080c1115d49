"""What happens to KV when agents do what agents do."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest

from kvpilot.coordinator import executor
from kvpilot.coordinator.actions import Work
from kvpilot.domain import (
    ActionKind,
    Command,
    OutcomeStatus,
    PromptKnown,
    Retention,
    Segment,
    SegmentKind,
    SessionRef,
    SessionState,
    Signal,
    SignalKind,
    Space,
    TargetKind,
    Tier,
)
from kvpilot.sessions.book import MAX_THREADS
from tests.coordinator.world import SYSTEM, World, assistant, text_tokens, user, words


async def test_ending_a_session_removes_only_what_no_other_session_holds() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    b = [SYSTEM, user(words("b", 20))]
    world.turn(a, "A")
    world.turn(b, "B")
    (record,) = await world.settle(world.signal("A", SignalKind.END))
    shared = len(set(world.chunks(a)) & set(world.chunks(b)))
    assert shared >= 2
    assert record.status is OutcomeStatus.DONE
    assert record.confirmed == len(world.chunks(a)) - shared
    assert world.held(a) == [True] * shared + [False] * (len(world.chunks(a)) - shared)
    assert all(world.held(b))


async def test_a_compaction_evicts_the_superseded_part_and_keeps_the_head() -> None:
    world = World()
    old = [SYSTEM, user(words("task", 10)), assistant(words("thought", 30)), user("go on")]
    world.turn(old[:2], "A")
    world.turn(old, "A")
    new = [SYSTEM, user("summary " + words("sum", 8))]
    (record,) = await world.settle(world.turn(new, "A"))
    assert record.source == "supersession"
    keep = len(set(world.chunks(old)) & set(world.chunks(new)))
    assert keep >= 1
    assert world.held(old) == [True] * keep + [False] * (len(world.chunks(old)) - keep)
    assert all(world.held(new))


async def test_growing_a_conversation_evicts_nothing() -> None:
    world = World()
    messages = [SYSTEM, user(words("u", 9))]
    for turn in range(5):
        assert world.turn(messages, "A") == []
        messages = [*messages, assistant(words(f"t{turn}x", 7)), user(words(f"n{turn}x", 6))]


async def test_a_side_call_under_the_same_id_is_not_a_compaction() -> None:
    world = World()
    main = [SYSTEM, user(words("main", 30))]
    world.turn(main, "A")
    title = [{"role": "system", "content": "make a title of five words"}, user("main0 main1")]
    assert world.turn(title, "A") == []
    assert world.turn([*main, assistant("ok"), user("more")], "A") == []
    assert all(world.held(main))


async def test_requests_in_parallel_under_one_id_do_not_supersede_each_other() -> None:
    world = World()
    one, two = [SYSTEM, user(words("one", 20))], [SYSTEM, user(words("two", 20))]
    first, second = world.start(one, "A"), world.start(two, "A")
    assert world.finish(first, one) == []
    assert world.finish(second, two) == []
    assert all(world.held(one)) and all(world.held(two))


async def test_a_late_store_of_evicted_chunks_is_removed_again() -> None:
    world = World(recheck_s=(0.02, 0.05))
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    await world.observe()
    await world.settle(world.signal("A", SignalKind.END))
    assert not any(world.held(a))
    world.layer.store(Space("m"), text_tokens(a), Tier.DISK)
    watching = asyncio.create_task(world.service.executor.watch_loop())
    await asyncio.sleep(0.3)
    watching.cancel()
    assert not any(world.held(a))
    assert world.service.executor.stats.late_stores_removed == len(world.chunks(a))


async def test_what_a_dead_layer_kept_is_evicted_when_it_returns() -> None:
    world = World(recheck_s=(0.01,))
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    world.layer.dead = True
    (record,) = await world.settle(world.signal("A", SignalKind.END))
    assert record.status is OutcomeStatus.FAILED
    assert "dead" in record.reason
    watching = asyncio.create_task(world.service.executor.watch_loop())
    await asyncio.sleep(0.1)
    world.layer.dead = False
    await asyncio.sleep(0.2)
    watching.cancel()
    assert not any(world.held(a))


@pytest.mark.parametrize(
    "complete", [True, False], ids=["complete directory", "directory that missed things"]
)
async def test_an_eviction_is_done_when_the_directory_shows_it(
    complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "CONFIRM_S", 5.0)
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    await world.observe()
    if not complete:
        world.residency.directory_missed(world.now - 20, world.now - 10)
    world.layer.listed = copy.deepcopy(world.layer.held)
    (record,) = world.signal("A", SignalKind.END)
    waited = await world.service.actions.wait(record.id, 0.2)
    assert waited is not None and waited.open
    assert not any(world.held(a))
    world.layer.listed = None
    (record,) = await world.settle([record])
    assert (record.status, record.confirmed) == (OutcomeStatus.DONE, len(world.chunks(a)))


async def test_what_a_directory_that_missed_things_lists_for_ever_is_gone_when_the_layer_says_so() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    await world.observe()
    world.residency.directory_missed(world.now - 20, world.now - 10)
    world.layer.listed = copy.deepcopy(world.layer.held)
    (record,) = await world.settle(world.signal("A", SignalKind.END))
    assert (record.status, record.confirmed) == (OutcomeStatus.DONE, len(world.chunks(a)))


async def test_eviction_waits_for_the_running_request_and_takes_its_reply_along() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    longer = [*a, assistant("ok"), user(words("more", 20))]
    running = world.start(longer, "A")
    (record,) = world.signal("A", SignalKind.END)
    assert record.status is OutcomeStatus.DEFERRED
    await asyncio.sleep(0.05)
    assert all(world.held(a))
    world.finish(running, longer)
    (record,) = await world.settle([record])
    assert record.status is OutcomeStatus.DONE
    assert not any(world.held(longer))


async def test_a_demotion_that_waits_for_a_request_says_so() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    longer = [*a, assistant("ok"), user(words("more", 20))]
    running = world.start(longer, "A")
    chunks = tuple(chunk.hex() for chunk in world.chunks(a))
    command = Command(ActionKind.DEMOTE, "default", "", SessionRef("A"), TargetKind.CHUNKS, chunks=chunks)
    (record,) = await world.service.command(command)
    assert (record.status, bool(record.reason)) == (OutcomeStatus.DEFERRED, True)
    world.finish(running, longer)
    (record,) = await world.settle([record])
    assert record.status is OutcomeStatus.DONE and record.confirmed


async def test_a_session_that_goes_on_is_not_evicted_by_an_older_command() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    running = world.start(a, "A")
    (record,) = world.signal("A", SignalKind.END)
    again = world.start(a, "A")
    world.finish(running, a)
    world.finish(again, a)
    (record,) = await world.settle([record])
    assert record.status is OutcomeStatus.REJECTED
    assert all(world.held(a))


async def test_a_long_reply_frees_what_its_prompt_replaced_before_it_ends() -> None:
    world = World()
    old = [SYSTEM, user(words("task", 30))]
    world.turn(old, "A")
    new = [SYSTEM, user("summary " + words("sum", 8))]
    running = world.start(new, "A")
    ids = json.dumps(text_tokens(new).tolist()).encode()
    records = world.service.handle(PromptKnown(running, world.now, ids))
    await world.settle(records)
    kept = len(set(world.chunks(old)) & set(world.chunks(new)))
    assert world.held(old) == [True] * kept + [False] * (len(world.chunks(old)) - kept)
    world.finish(running, new, prompt_told=True)
    assert all(world.held(new))
    assert world.service.mapper.stats.mapped == 2


async def test_ending_a_parent_ends_its_children() -> None:
    world = World()
    parent, child = [SYSTEM, user(words("p", 20))], [user(words("c", 20))]
    world.turn(parent, "P", parent="P")
    world.turn(child, "C", parent="P")
    await world.settle(world.signal("P", SignalKind.END))
    assert not any(world.held(parent)) and not any(world.held(child))


async def test_demote_keeps_the_copy_below_and_what_others_use() -> None:
    world = World()
    a, b = [SYSTEM, user(words("a", 20))], [SYSTEM, user(words("b", 20))]
    world.turn(a, "A")
    world.turn(b, "B")
    (record,) = await world.settle(world.signal("A", SignalKind.SUSPEND))
    shared = set(world.chunks(a)) & set(world.chunks(b))
    assert record.confirmed == len(world.chunks(a)) - len(shared)
    for chunk in world.chunks(a):
        tiers = world.layer.tiers(Space("m"), chunk)
        assert tiers == ({Tier.HOST, Tier.DISK} if chunk in shared else {Tier.DISK})
    assert world.service.book.get("default", "A").state is SessionState.SUSPENDED


async def test_demote_never_drops_the_only_copy() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A", stored=False)
    world.layer.store(Space("m"), text_tokens(a), Tier.HOST)
    (record,) = await world.settle(world.signal("A", SignalKind.SUSPEND))
    assert record.status is OutcomeStatus.CLIPPED
    assert all(world.held(a))


async def test_resume_brings_the_context_back_and_says_so() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    await world.settle(world.signal("A", SignalKind.SUSPEND))
    (record,) = await world.settle(world.signal("A", SignalKind.RESUME))
    assert record.status is OutcomeStatus.DONE
    assert record.confirmed == len(world.chunks(a))
    assert all(Tier.HOST in world.layer.tiers(Space("m"), c) for c in world.chunks(a))


async def test_a_prefetch_of_what_is_nowhere_is_clipped_not_done() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A", stored=False)
    (record,) = await world.settle(world.signal("A", SignalKind.TOOL_FINISHED))
    assert record.status is OutcomeStatus.CLIPPED
    assert record.confirmed == 0


async def test_passive_mode_maps_but_touches_nothing() -> None:
    world = World(mode="passive")
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    (record,) = world.signal("A", SignalKind.END)
    assert record.status is OutcomeStatus.REJECTED
    assert world.turn([SYSTEM, user("other")], "A") == []
    assert all(world.held(a)) and not world.layer.drops


async def test_what_ended_while_kvpilot_was_passive_holds_nothing_later() -> None:
    world = World(mode="passive")
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    world.signal("A", SignalKind.END)
    world.service.mode = "kvpilot"
    world.turn(a, "B")
    await world.settle(world.signal("B", SignalKind.END))
    assert not any(world.held(a))


async def test_chunks_that_came_back_for_a_request_nobody_knows_the_tokens_of_are_left_alone() -> None:
    world = World(recheck_s=(0.05,))
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    await world.observe()
    await world.settle(world.signal("A", SignalKind.END))
    running = world.start(a, "B")
    world.layer.store(Space("m"), text_tokens(a))
    watching = asyncio.create_task(world.service.executor.watch_loop())
    await asyncio.sleep(0.3)
    assert all(world.held(a))
    world.finish(running, a)
    await asyncio.sleep(0.1)
    watching.cancel()
    assert all(world.held(a)), "now they are referenced"


async def test_a_prefetch_waits_for_room_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "ROOM_WAIT_S", 2.0)
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    await world.settle(world.signal("A", SignalKind.SUSPEND))
    world.layer.host_room = 2
    (record,) = world.signal("A", SignalKind.RESUME)
    await asyncio.sleep(0.1)
    world.layer.host_room = 1000
    (record,) = await world.settle([record])
    assert (record.status, record.confirmed) == (OutcomeStatus.DONE, len(world.chunks(a)))


async def test_tenants_do_not_reach_each_others_sessions() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A", tenant="left")
    world.turn(a, "A", tenant="right")
    command = Command(ActionKind.EVICT, "left", "left", SessionRef("A"))
    await world.settle(await world.service.command(command))
    assert not any(world.held(a, "left"))
    assert all(world.held(a, "right"))
    (record,) = await world.service.command(Command(ActionKind.EVICT, "third", "third", SessionRef("A")))
    assert record.status is OutcomeStatus.MISSING


async def test_named_chunks_that_a_live_session_needs_survive() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    stray = world.layer.store(Space("m"), text_tokens([user(words("stray", 12))]))
    names = tuple(c.hex() for c in [*world.chunks(a), *stray])
    command = Command(ActionKind.EVICT, "default", "", SessionRef(), target=TargetKind.CHUNKS, chunks=names)
    await world.settle(await world.service.command(command))
    assert all(world.held(a))
    assert not any(world.layer.tiers(Space("m"), c) for c in stray)


async def test_a_wish_to_keep_a_context_holds_for_its_time() -> None:
    world = World()
    await world.observe()
    wish = Retention(ttl_s=60.0, priority=7)
    world.turn([SYSTEM, user(words("a", 20))], "A", retention=wish)
    world.turn([SYSTEM, user(words("b", 20))], "B")

    def kept() -> dict[str, tuple[bool, int]]:
        return {t.session[1]: (t.keep_until > world.now, t.priority) for _, t in world.service.book.threads()}

    assert kept() == {"A": (True, 7), "B": (False, 0)}
    world.service.handle(Signal(world.now, "default", SessionRef("B"), SignalKind.RETAIN, retention=wish))
    assert kept()["B"] == (True, 7)
    world.now += 61
    assert kept() == {"A": (False, 7), "B": (False, 7)}


async def test_an_expected_request_is_only_noted() -> None:
    world = World()
    world.turn([SYSTEM, user(words("a", 20))], "A")
    assert world.signal("A", SignalKind.EXPECTED, 30.0) == []
    session = world.service.book.get("default", "A")
    assert session is not None
    assert session.expected_at == world.now + 30.0


async def test_a_parent_and_its_child_are_demoted_with_what_they_share() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "P", parent="P")
    world.turn(a, "C", parent="P")
    records = await world.settle(world.signal("P", SignalKind.SUSPEND))
    assert sum(record.confirmed for record in records) == len(world.chunks(a))
    assert all(world.layer.tiers(Space("m"), c) == {Tier.DISK} for c in world.chunks(a))
    assert world.service.book.get("default", "C").state is SessionState.SUSPENDED


async def test_a_demotion_that_moves_nothing_says_why() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    world.turn(a, "B")
    (record,) = await world.settle(world.signal("A", SignalKind.SUSPEND))
    assert (record.status, record.planned, record.skipped) == (OutcomeStatus.DONE, 0, len(world.chunks(a)))
    assert record.reason


async def test_an_id_used_for_everything_keeps_a_bounded_number_of_conversations() -> None:
    world = World()
    for number in range(MAX_THREADS + 20):
        world.now += 1
        world.turn([{"role": "system", "content": f"side call {number}"}, user(words(f"t{number}x", 8))], "A")
    session = world.service.book.get("default", "A")
    assert session is not None
    assert len(session.threads) == MAX_THREADS
    assert len(world.service.references.owners()) == MAX_THREADS


async def test_a_parent_known_by_name_only_is_not_running() -> None:
    world = World()
    world.turn([SYSTEM, user("a")], "C", parent="P")
    parent = world.service.book.get("default", "P")
    assert parent is not None
    assert parent.state is SessionState.WAITING_HUMAN


async def test_chunks_that_come_alive_while_an_eviction_waits_are_spared() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    slots = world.service.executor._slots
    for _ in range(executor.MAX_PARALLEL):
        await slots.acquire()
    (record,) = world.signal("A", SignalKind.END)
    await asyncio.sleep(0.05)
    world.turn(a, "B")
    for _ in range(executor.MAX_PARALLEL):
        slots.release()
    (record,) = await world.settle([record])
    assert (record.confirmed, record.skipped) == (0, len(world.chunks(a)))
    assert all(world.held(a))


async def test_the_late_end_of_an_older_request_changes_nothing() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    first = world.start(a, "A")
    longer = [*a, assistant("ok"), user(words("more", 20))]
    second = world.start(longer, "A")
    world.finish(second, longer)
    assert world.finish(first, a) == []
    await asyncio.sleep(0.05)
    assert all(world.held(longer))


async def test_a_deferred_eviction_of_which_too_little_is_known_is_not_called_done_after_a_restart() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    world.start([*a, assistant("ok"), user("more")], "A")
    command = Command(ActionKind.EVICT, "default", "", SessionRef("A"))
    (record,) = await world.service.command(command)
    assert record.status is OutcomeStatus.DEFERRED
    world.service.resume([(record, Work(Space("m"), tuple(world.chunks(a))))])
    found = world.service.actions.get(record.id)
    assert found is not None
    assert (found.status, bool(found.reason)) == (OutcomeStatus.MISSING, True)


async def test_a_new_session_holds_its_system_prompt_before_its_tokens_are_known() -> None:
    world = World()
    a = [SYSTEM, user(words("a", 20))]
    world.turn(a, "A")
    thread = next(iter(world.service.book.get("default", "A").threads.values()))
    head = len(text_tokens([SYSTEM]))
    thread.segments = (Segment(SegmentKind.SYSTEM, 0, head, 0),)
    world.start([SYSTEM, user(words("b", 20))], "B")
    await world.settle(world.signal("A", SignalKind.END))
    kept = head // world.layer.chunk_size
    assert world.held(a)[:kept] == [True] * kept
    assert not any(world.held(a)[kept + 1 :])
