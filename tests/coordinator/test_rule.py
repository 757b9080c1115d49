"""The rule everything rests on, for any order of events: KV that a live context holds stays, all else goes.

Checked against the plainest possible model: a set of chunks per live conversation.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpilot.coordinator import executor
from kvpilot.domain import SignalKind, Space
from tests.coordinator.world import World

Step = tuple[str, int, int]
steps = st.lists(
    st.tuples(st.sampled_from(["grow", "compact", "rewind", "end"]), st.integers(0, 3), st.integers(1, 9)),
    min_size=1,
    max_size=18,
)
SYSTEM = {"role": "system", "content": "one system prompt that all of these agents share and keep"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "CONFIRM_STEP_S", 0.0)
    monkeypatch.setattr(executor, "CONFIRM_S", 0.05)


async def play(plays: list[Step]) -> None:
    world = World(recheck_s=())
    live: dict[str, list[dict[str, str]]] = {}
    stored: set[bytes] = set()
    for serial, (what, who, size) in enumerate(plays):
        session = f"s{who}"
        text = " ".join(f"{serial}w{i}" for i in range(3 * size))
        if what == "end":
            records = world.signal(session, SignalKind.END)
            live.pop(session, None)
        else:
            old = live.get(session, [SYSTEM])
            kept = {"grow": old, "compact": [SYSTEM], "rewind": old[: max(1, len(old) - size)]}[what]
            live[session] = [*kept, {"role": "user", "content": text}]
            records = world.turn(live[session], session)
            stored.update(world.chunks(live[session]))
        await world.settle(records)
        needed = {chunk for messages in live.values() for chunk in world.chunks(messages)}
        present = {chunk for (_, chunk) in world.layer.held}
        assert present == needed & stored
        world.service.references.check_integrity()
    assert all(space == Space("m") for space, _ in world.layer.held)


@given(steps)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_exactly_what_no_live_session_holds_is_evicted(plays: list[Step]) -> None:
    asyncio.run(play(plays))
