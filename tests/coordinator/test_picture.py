"""The planner's picture, kept up while things happen, is the one that would be made anew."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.coordinator.picture import Picture
from kvpilot.coordinator.planner import Planner
from kvpilot.coordinator.service import CoordinatorService
from kvpilot.domain import ActionKind, Command, Retention, SessionRef, SignalKind, Space, TargetKind, Tier
from kvpilot.plan.placement import PlacementSettings, TierLimits, plan, recount
from tests.coordinator.world import World, assistant, text_tokens, user, words

SYSTEM = {"role": "system", "content": words("rule", 16)}
LIMITS = [TierLimits(1000, 1000.0), TierLimits(10_000, 100.0, managed=False)]
RECENT = {"s1#1"}

steps = st.lists(
    st.tuples(
        st.sampled_from(
            (
                *("grow", "grow", "start", "compact", "rewind", "copy", "end", "suspend", "resume", "due"),
                *(
                    "keep",
                    "demote",
                    "prefetch",
                    "stored",
                    "moved",
                    "gone",
                    "listed",
                    "later",
                    "forget",
                    "look",
                ),
            )
        ),
        st.integers(0, 3),
        st.integers(1, 9),
    ),
    min_size=1,
    max_size=25,
)


def seen(picture: Picture, service: CoordinatorService, now: float) -> dict[str, Any]:
    """Everything there is in a picture, by names instead of rows."""
    holdings, layout = picture.holdings, picture.layout
    recount(holdings, LIMITS, now, PlacementSettings())
    chunks = {row: tuple(picture.chunks(row)) for row in picture._nodes}
    name = {
        row: (*tuple(picture._nodes[row][1].tokens.tolist()), picture._nodes[row][1].end) for row in chunks
    }
    tenants = {number: tenant for tenant, number in picture.tenants.items()}
    moves = plan(layout, LIMITS, now)
    return {
        "runs": {
            name[row]: (
                chunks[row],
                name.get(int(holdings.above[row])),
                [int(column[row]) for column in (holdings.end, holdings.chunks, holdings.running)],
                [int(column[row]) for column in (holdings.holders, holdings.declined)],
                tenants[int(holdings.tenant[row])],
                float(holdings.worth[row]),
                layout.here[:, row].tolist(),
                bool(layout.busy[row]),
                picture.holders(row),
            )
            for row in chunks
        },
        "used": (layout.used.tolist(), layout.used_by.sum(axis=1).tolist(), picture.arriving),
        "orphans": {space: set(held) for space, held in picture.orphans.items()},
        "tips": {owner: name.get(picture.tip(owner)) for owner in picture._contexts},
        "wishes": {
            owner: (bool(holdings.kept[c]), int(holdings.priority[c]), str(float(holdings.due[c])))
            for owner, c in picture._contexts.items()
        },
        "running": picture.running,
        "leaving": {picture.owner(int(c)) for c in picture.leaving()[0]},
        "moves": sorted((m.kind, name[m.run], m.tier, m.first, m.end) for m in moves),
    }


class Play:
    def __init__(self) -> None:
        self.world = World(recheck_s=())
        self.picture = Picture(self.world.service)
        self.live: dict[str, list[dict[str, str]]] = {}
        self.serial = 0

    def check(self) -> None:
        service, now = self.world.service, self.world.now
        self.picture.settle(now, RECENT)
        kept_up = seen(self.picture, service, now)
        anew = Picture(service)
        anew.settle(now, RECENT)
        assert kept_up == seen(anew, service, now)
        anew.close()

    async def step(self, what: str, who: int, size: int) -> None:
        world, session = self.world, f"s{who}"
        self.serial += 1
        world.now += 0.5
        old = self.live.get(session, [SYSTEM])
        text = user(words(f"{self.serial}w", 3 * size))
        match what:
            case "grow" | "compact" | "rewind" | "start" | "copy":
                other = self.live.get(f"s{(who + 1) % 4}", [SYSTEM])
                before = {"compact": [SYSTEM], "rewind": old[: max(1, len(old) - size)], "copy": other}
                self.live[session] = messages = [*before.get(what, [*old, assistant("ok")]), text]
                if what == "start":
                    world.start(messages, session)
                else:
                    tenant = "other" if who == 3 else "default"
                    world.turn(messages, session, tenant=tenant)
            case "end" | "suspend" | "resume":
                world.signal(session, SignalKind(what))
                if what == "end":
                    self.live.pop(session, None)
            case "due":
                world.signal(session, SignalKind.EXPECTED, eta_s=float(size))
            case "keep":
                self.live[session] = [*old, assistant("ok"), text]
                wish = Retention(ttl_s=float(size), priority=size)
                world.turn(self.live[session], session, retention=wish)
            case "demote" | "prefetch":
                command = Command(ActionKind(what), "default", "", SessionRef(session))
                if size % 2:
                    command = Command(
                        *(ActionKind(what), "default", "", SessionRef(session), TargetKind.TOKENS, 0, 8)
                    )
                await world.service.command(command)
            case "stored" | "moved" | "gone":
                chunks = world.chunks(old)[:size]
                tiers = {"stored": {Tier.HOST, Tier.DISK}, "moved": {Tier.DISK}, "gone": set()}[what]
                world.residency.observe(Space("m"), chunks, [tiers] * len(chunks), world.now)
            case "listed":
                stray = text_tokens([user(words(f"{self.serial}stray", 4 * size))])
                world.layer.store(Space("m"), stray, Tier.HOST)
                await world.observe()
            case "later":
                world.now += 2.0**size
                world.service.expire()
            case "forget":
                if (known := world.service.book.get("default", session)) is not None:
                    world.service.forget(known)
                    self.live.pop(session, None)
            case "look":
                await asyncio.sleep(0)
                self.check()


async def play(plays: list[tuple[str, int, int]]) -> None:
    game = Play()
    try:
        for what, who, size in plays:
            await game.step(what, who, size)
        game.check()
        for _ in range(5):
            await asyncio.sleep(0)
        game.check()
    finally:
        await game.world.service.close()


@given(steps)
@settings(max_examples=150)
def test_a_picture_kept_up_is_the_one_made_anew(plays: list[tuple[str, int, int]]) -> None:
    asyncio.run(play(plays))


async def test_nothing_is_remembered_for_whoever_has_ceased_to_look() -> None:
    world = World()
    service = world.service
    planner = Planner(service)
    world.turn([SYSTEM, user("hello")], "A")
    await world.observe()

    def followers() -> int:
        return sum(
            map(len, (service.references._followers, service.residency._followers, service._followers))
        )

    planner.tick()
    assert followers() == 3
    service.mode = "passive"
    planner.tick()
    assert followers() == 0
    planner.outlook()
    assert followers() == 0
    service.mode = "kvpilot"
    planner.tick()
    assert followers() == 3
    world.now += 60.0  # the view of the cache layer is stale
    planner.tick()
    assert followers() == 0
