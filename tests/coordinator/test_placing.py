"""Whatever the coordinator sees, what it decides is possible and disturbs nobody."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.coordinator.planner import Planner
from kvpilot.domain import ActionKind, Retention, SignalKind, Space, Tier
from tests.coordinator.world import World, text_tokens

SPACE = Space("m")
SYSTEM = {"role": "system", "content": " ".join(f"rule{i}" for i in range(16))}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "bash"}}]}

agents = st.fixed_dictionaries(
    {
        "words": st.integers(1, 40),
        "shares": st.booleans(),
        "waits": st.sampled_from(("tool", "person", "running", "suspended", "due")),
        "in_host": st.integers(0, 20),
        "on_disk": st.integers(0, 20),
        "kept": st.booleans(),
        "ago": st.floats(0.0, 4000.0),
    }
)


def context(number: int, agent: dict[str, Any]) -> list[dict[str, str]]:
    own = {"role": "user", "content": " ".join(f"{number}x{i}" for i in range(agent["words"]))}
    return [SYSTEM, own] if agent["shares"] else [own]


async def build(drawn: list[dict[str, Any]], filled: float, strays: int) -> World:
    world = World(recheck_s=())
    latest = world.now + 5000.0
    for number, agent in enumerate(drawn):
        world.now = latest - agent["ago"]
        messages, name = context(number, agent), f"s{number}"
        wish = Retention(ttl_s=1e5, priority=number) if agent["kept"] else None
        reply = CALL if agent["waits"] == "tool" else None
        world.turn(messages, name, reply=reply, stored=False, retention=wish)
        chunks = world.chunks(messages)
        for tier, count in ((Tier.HOST, agent["in_host"]), (Tier.DISK, agent["on_disk"])):
            size = min(count, len(chunks)) * world.layer.chunk_size
            world.layer.store(SPACE, text_tokens(messages)[:size], tier)
        if agent["waits"] == "running":
            world.start(
                [*messages, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "on"}], name
            )
    world.now = latest
    for number, agent in enumerate(drawn):
        if agent["waits"] in ("suspended", "due"):
            world.service.book.sessions["default", f"s{number}"].last_seen = latest
            kind = SignalKind.EXPECTED if agent["waits"] == "due" else SignalKind.WAITING_HUMAN
            world.signal(f"s{number}", kind, eta_s=5.0)
    world.layer.store(SPACE, text_tokens([{"role": "user", "content": "stray " * 4 * strays}]), Tier.HOST)
    held = sum(Tier.HOST in tiers for tiers in world.layer.held.values())
    world.layer.capacity = max(1, int(max(1, held) * 1000 / filled))
    await world.observe()
    return world


@given(st.lists(agents, max_size=6), st.floats(0.2, 1.0), st.integers(0, 6))
@settings(max_examples=80)
def test_decisions_are_possible_and_leave_running_requests_alone(
    drawn: list[dict[str, Any]], filled: float, strays: int
) -> None:
    async def check() -> None:
        world = await build(drawn, filled, strays)
        service = world.service
        decisions = Planner(service).decisions()
        in_use = {
            chunk
            for _, thread in service.book.threads()
            if thread.in_flight and thread.owner in service.references
            for chunk in service.references.chunks(thread.owner)
        }
        leaving: set[bytes] = set()
        for decision in decisions:
            assert decision.chunks > 0
            here = [Tier.HOST in world.layer.tiers(SPACE, chunk) for chunk in decision.work.chunks]
            if decision.kind is ActionKind.DEMOTE:
                assert all(here), "only what is there"
                assert decision.chunks == len(decision.work.chunks)
                assert not in_use & set(decision.work.chunks)
                assert not leaving & set(decision.work.chunks), "nothing twice"
                leaving |= set(decision.work.chunks)
            else:
                assert decision.owner is not None
                whole = service.references.chunks(decision.owner)
                assert list(decision.work.chunks) == whole[: len(decision.work.chunks)], "a head"
                assert here.count(False) >= 1
                assert all(world.layer.tiers(SPACE, chunk) for chunk in decision.work.chunks)
        for owner in service.references.owners():
            gone = [chunk in leaving for chunk in service.references.chunks(owner)]
            there = [Tier.HOST in world.layer.tiers(SPACE, c) for c in service.references.chunks(owner)]
            kept = [is_there and not goes for is_there, goes in zip(there, gone, strict=True)]
            first_gone = gone.index(True) if any(gone) else len(gone)
            leading = there.index(False) if False in there else len(there)
            assert not any(kept[first_gone:leading]), "from the tail"
        assert [d.owner for d in Planner(service).decisions()] == [d.owner for d in decisions], (
            "deterministic"
        )

    asyncio.run(check())
