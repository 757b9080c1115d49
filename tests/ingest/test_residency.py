"""The view of the cache layer: listings, and what is fresher than they are."""

from __future__ import annotations

import hashlib

import numpy as np

from kvpilot.backends.base import Placement
from kvpilot.context.chunks import short_hash
from kvpilot.domain import Space, Tier, TierUsage
from kvpilot.ingest.residency import Residency

SPACE, OTHER = Space("m"), Space("m", "tenant-b")
BOTH, DISK, HOST, NONE = (
    frozenset({Tier.HOST, Tier.DISK}),
    frozenset({Tier.DISK}),
    frozenset({Tier.HOST}),
    frozenset[Tier](),
)


def chunk(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def chunks(count: int) -> list[bytes]:
    return [chunk(i) for i in range(count)]


def listing(residency: Residency, at: float, *rows: tuple[Space, bytes, frozenset[Tier]]) -> bool:
    refresh = residency.begin_refresh(at)
    refresh.add([Placement(*row) for row in rows])
    return residency.commit(refresh)


def usage(residency: Residency, *, listed: int, held: int, at: float, tier: Tier = Tier.HOST) -> None:
    residency.set_usage((TierUsage(tier, held, 1 << 30),), {tier: listed}, at)


def test_questions_are_answered_from_the_listing() -> None:
    view, names = Residency(), chunks(4)
    assert view.stale(0.0)
    assert listing(view, 10.0, (SPACE, names[0], BOTH), (SPACE, names[1], DISK), (SPACE, names[3], HOST))
    assert view.tiers(SPACE, names[0]) == BOTH
    assert view.tiers(SPACE, names[2]) == NONE
    assert view.tiers(OTHER, names[0]) == NONE, "another tenant's chunk is another chunk"
    assert view.count(SPACE, names) == {Tier.HOST: 2, Tier.DISK: 2}
    assert view.prefix(SPACE, names, Tier.DISK) == 2
    assert view.prefix(SPACE, names, Tier.HOST) == 1, "what lies behind a hole does not count"
    assert not view.stale(12.0) and view.stale(100.0)
    assert not listing(
        view, 20.0, (SPACE, names[0], BOTH), (SPACE, names[1], DISK), (SPACE, names[3], HOST)
    ), "nothing changed"
    assert dict(view.resident(Tier.HOST)) == {SPACE: [names[0], names[3]]}


def test_a_listing_begun_before_an_observation_does_not_undo_it() -> None:
    view, one = Residency(), chunk(1)
    listing(view, 10.0, (SPACE, one, BOTH))
    refresh = view.begin_refresh(11.0)
    refresh.add([Placement(SPACE, one, BOTH)])
    view.observe(SPACE, [one], [NONE], 11.5)
    view.commit(refresh)
    assert view.tiers(SPACE, one) == NONE
    listing(view, 12.0, (SPACE, one, DISK))
    assert view.tiers(SPACE, one) == DISK, "a later listing wins"


def test_the_layers_own_report_outlives_the_directorys_lag_but_not_its_knowledge() -> None:
    view, one = Residency(), chunk(1)
    usage(view, listed=100, held=100, at=9.0)
    listing(view, 10.0, (SPACE, one, BOTH))
    view.observe_tier(SPACE, [one], Tier.HOST, False, 10.5)
    view.observe(SPACE, [one], [BOTH], 10.8)
    assert view.tiers(SPACE, one) == DISK, "the directory was only behind"
    listing(view, 11.0, (SPACE, one, BOTH))
    assert view.tiers(SPACE, one) == DISK
    listing(view, 20.0, (SPACE, one, BOTH))
    assert view.tiers(SPACE, one) == BOTH, "it was loaded again meanwhile"


def test_a_directory_that_lost_its_memory_does_not_overrule_what_was_seen() -> None:
    view, one = Residency(), chunk(1)
    for at in (1.0, 2.0, 3.0):
        usage(view, listed=10, held=100, at=at)
    listing(view, 4.0)
    assert not view.absence_is_certain(Tier.HOST)
    view.observe_tier(SPACE, [one], Tier.HOST, True, 4.0)
    listing(view, 60.0)
    assert view.tiers(SPACE, one) == HOST
    usage(view, listed=100, held=100, at=61.0)
    assert view.absence_is_certain(Tier.HOST)
    listing(view, 62.0)
    assert view.tiers(SPACE, one) == NONE


def test_one_comparison_that_catches_the_directory_behind_is_no_reason_for_doubt() -> None:
    view = Residency()
    listing(view, 1.0)
    usage(view, listed=100, held=100, at=1.0)
    usage(view, listed=50, held=100, at=2.0)
    assert view.absence_is_certain(Tier.HOST)
    for at in (3.0, 4.0, 5.0):
        usage(view, listed=50, held=100, at=at)
    assert not view.absence_is_certain(Tier.HOST)


def test_host_events_name_a_chunk_by_64_bits_and_only_if_one_is_meant() -> None:
    view, one, two = Residency(), chunk(1), chunk(2)
    assert not view.host_event(short_hash(one), True, 1.0), "never heard of"
    listing(view, 2.0, (SPACE, one, DISK), (SPACE, two, DISK), (OTHER, two, DISK))
    assert view.host_event(short_hash(one), True, 2.5)
    assert view.tiers(SPACE, one) == BOTH
    assert not view.host_event(short_hash(two), True, 2.6), "two tenants hold such a chunk"
    assert view.tiers(SPACE, two) == DISK
    view.forget_host_events()
    assert view.tiers(SPACE, one) == DISK


def test_a_host_event_may_come_before_its_chunk_is_known() -> None:
    view, one, two = Residency(), chunk(1), chunk(2)
    view.host_event(short_hash(one), True, 1.0)
    view.learn(SPACE, [one])
    assert view.tiers(SPACE, one) == HOST
    view.host_event(short_hash(two), True, 1.0)
    view.host_event(short_hash(two), False, 1.1)
    view.learn(SPACE, [two])
    assert view.tiers(SPACE, two) == NONE


def test_device_prefix_is_that_of_the_best_engine_of_the_model() -> None:
    view, tokens = Residency(), np.arange(16, dtype=np.uint32)
    view.pool("e1", "m").stored([1, 2], None, list(range(8)), 4)
    view.pool("e2", "m").stored([1, 2, 3], None, list(range(12)), 4)
    view.pool("e3", "other").stored([1, 2, 3, 4], None, list(range(16)), 4)
    assert view.device_prefix(SPACE, tokens) == 12
    assert view.device_prefix(OTHER, tokens) == 0
    assert view.device_prefix(Space("unknown"), tokens) == 0


def test_what_was_seen_while_the_directory_was_away_outweighs_what_it_lists_for_a_while() -> None:
    view, gone, new = Residency(), chunk(1), chunk(2)
    for at in (1.0, 2.0, 3.0):
        usage(view, listed=100, held=100, at=at)
    listing(view, 10.0, (SPACE, gone, BOTH))
    view.observe_tier(SPACE, [gone], Tier.HOST, False, 20.0)
    view.observe_tier(SPACE, [gone], Tier.DISK, False, 20.0)
    view.observe_tier(SPACE, [new], Tier.HOST, True, 20.0)
    view.directory_missed(15.0, 30.0)
    listing(view, 31.0, (SPACE, gone, BOTH))
    assert (view.tiers(SPACE, gone), view.tiers(SPACE, new)) == (NONE, HOST)
    assert not view.absence_is_certain(Tier.HOST)
    view.host_event(short_hash(gone), True, 32.0)
    assert view.tiers(SPACE, gone) == BOTH, "stored anew"
    listing(view, 1000.0, (SPACE, gone, BOTH))
    assert view.tiers(SPACE, new) == NONE
    assert view.absence_is_certain(Tier.HOST)
