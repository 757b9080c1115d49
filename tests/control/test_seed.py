"""An agent written for LMCache-Ascend's memory protocol, against kvpilot."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from tests.control.test_api import client_of
from tests.coordinator.world import World

from kvpilot.control import seed as module
from kvpilot.control.seed import Seed
from kvpilot.domain import Space, Tier

SYSTEM = {"role": "system", "content": "rules that are long enough for chunks of four tokens"}


def context(name: str, count: int = 20) -> list[dict[str, Any]]:
    return [SYSTEM, {"role": "user", "content": " ".join(f"{name}{i}" for i in range(count))}]


A, B = context("a"), context("b")


def signed(chunk: bytes) -> str:
    """A hash as LMCache-Ascend tells it."""
    return f"{int.from_bytes(chunk[-8:], 'big', signed=True):x}"


def names(world: World, messages: list[dict[str, Any]]) -> list[str]:
    return [signed(chunk) for chunk in world.chunks(messages)]


def tiers(world: World, messages: list[dict[str, Any]], salt: str = "") -> list[set[Tier]]:
    return [world.layer.tiers(Space("m", salt), chunk) for chunk in world.chunks(messages)]


@pytest.fixture
def world() -> World:
    world = World(recheck_s=())
    world.turn(A, "A")
    return world


@pytest.fixture
def client(world: World) -> Iterator[TestClient]:
    with TestClient(Seed(world.service).app()) as client:
        yield client


def evict(client: TestClient, hashes: list[str], *locations: str, **kw: Any) -> Any:
    body = {"chunk_hashes": hashes, **({"locations": list(locations)} if locations else {})}
    return client.post("/memory/evict", json=body, **kw)


def prefetch(client: TestClient, hashes: list[str], lookup_id: str = "x", **kw: Any) -> Any:
    return client.post("/memory/prefetch", json={"chunk_hashes": hashes, "lookup_id": lookup_id}, **kw)


def outcome(client: TestClient, lookup_id: str = "x") -> dict[str, Any]:
    deadline = time.monotonic() + 10
    while (told := client.get(f"/memory/prefetch/{lookup_id}").json())["status"] == "pending":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return told  # type: ignore[no-any-return]


def on_disk_only(world: World, messages: list[dict[str, Any]]) -> None:
    for held in tiers(world, messages):
        held.discard(Tier.HOST)


def test_demoted_and_prefetched_again_by_signed_hashes_in_any_order(client: TestClient, world: World) -> None:
    hashes = sorted(names(world, A))
    assert any(text.startswith("-") for text in hashes)
    answer = evict(client, hashes, "LocalCPUBackend")
    assert (answer.status_code, answer.json()) == (200, {"status": "success", "num_evicted": len(hashes)})
    assert all(held == {Tier.DISK} for held in tiers(world, A))

    answer = prefetch(client, hashes, "turn/1")
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "prefetch_started",
        "lookup_id": "turn/1",
        "num_chunks": len(hashes),
    }
    told = outcome(client, "turn/1")
    assert (told["status"], told["found"], told["num_chunks"]) == ("completed", len(hashes), len(hashes))
    assert [world.service.actions.get(i) is not None for i in told["action_ids"]] == [True]
    assert all(Tier.HOST in held for held in tiers(world, A))


def test_an_evict_empties_every_tier_and_only_once(client: TestClient, world: World) -> None:
    hashes = [chunk.hex() for chunk in world.chunks(A)]
    assert evict(client, hashes).json() == {"status": "success", "num_evicted": len(hashes)}
    assert not any(world.held(A))
    assert evict(client, hashes).json() == {"status": "success", "num_evicted": 0}
    # The conversation goes on as if nothing had been.
    world.turn(A, "A")
    assert evict(client, names(world, A)).json()["num_evicted"] == len(hashes)


def test_an_evict_leaves_the_rest_of_the_context(client: TestClient, world: World) -> None:
    hashes = names(world, A)
    assert evict(client, hashes[-2:]).json()["num_evicted"] == 2
    assert world.held(A) == [True] * (len(hashes) - 2) + [False] * 2


@pytest.mark.parametrize("locations", [(), ("LocalCPUBackend",), ("LocalCPUBackend", "LocalDiskBackend")])
def test_what_another_live_session_holds_survives(
    client: TestClient, world: World, locations: tuple[str, ...]
) -> None:
    world.turn(B, "B")
    shared = len(set(world.chunks(A)) & set(world.chunks(B)))
    assert shared
    for expected in (len(world.chunks(A)) - shared, 0, 0):
        assert evict(client, names(world, A), *locations).json()["num_evicted"] == expected
    assert all(held == {Tier.HOST, Tier.DISK} for held in tiers(world, B))


def test_a_shared_prefix_is_not_taken_away_by_asking_often(client: TestClient, world: World) -> None:
    world.turn(B, "B")
    shared = [signed(c) for c in world.chunks(A) if c in set(world.chunks(B))]
    for _ in range(3):
        assert evict(client, shared).json() == {"status": "success", "num_evicted": 0}
    assert all(world.held(A))


def test_a_demotion_keeps_what_is_not_on_disk(
    client: TestClient, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpilot.coordinator.executor.STORE_WAIT_S", 0.0)
    tiers(world, A)[-1].discard(Tier.DISK)
    answer = evict(client, names(world, A), "LocalCPUBackend").json()
    assert answer == {"status": "success", "num_evicted": len(world.chunks(A)) - 1}
    assert tiers(world, A)[-1] == {Tier.HOST}


def test_unknown_chunks_are_no_error_and_count_for_nothing(client: TestClient, world: World) -> None:
    unknown = ["-6ed9", "ab" * 32]
    assert evict(client, unknown).json() == {"status": "success", "num_evicted": 0}
    assert evict(client, unknown[:1]).json() == {"status": "success", "num_evicted": 0}
    assert evict(client, [*unknown, *names(world, A)]).json()["num_evicted"] == len(world.chunks(A))
    for lookup_id, hashes in (("both", unknown), ("short", unknown[:1])):
        assert prefetch(client, hashes, lookup_id).status_code == 200
        told = outcome(client, lookup_id)
        assert (told["status"], told["found"]) == ("failed", 0)
        assert told["action_ids"]


def test_chunks_nobody_references_are_evicted_by_their_full_hash(client: TestClient, world: World) -> None:
    stray = world.layer.store(Space("m"), np.arange(1, 13, dtype=np.uint32), Tier.DISK)
    assert evict(client, [c.hex() for c in stray]).json()["num_evicted"] == len(stray)
    assert all(world.held(A))


def test_a_prefetch_that_finds_a_part_says_how_much(client: TestClient, world: World) -> None:
    on_disk_only(world, A)
    world.layer.held.pop((Space("m"), world.chunks(A)[-1]))
    prefetch(client, names(world, A))
    told = outcome(client)
    assert (told["status"], told["found"]) == ("completed", len(world.chunks(A)) - 1)


@pytest.mark.parametrize("cut", [slice(2, 3), slice(-2, -1)])
def test_what_lies_behind_an_evicted_chunk_is_found_where_it_is(
    client: TestClient, world: World, cut: slice
) -> None:
    hashes = names(world, A)
    assert evict(client, hashes[cut]).json()["num_evicted"] == 1
    prefetch(client, [chunk.hex() for chunk in world.chunks(A)])
    there = sum(Tier.HOST in held for held in tiers(world, A))
    told = outcome(client)
    assert (told["status"], told["found"], told["num_chunks"]) == ("completed", there, len(hashes))
    assert there == len(hashes) - 1


def test_a_repeated_lookup_id_is_not_executed_twice(client: TestClient, world: World) -> None:
    on_disk_only(world, A)
    first = prefetch(client, names(world, A)).json()
    ids = outcome(client)["action_ids"]
    again = prefetch(client, names(world, A)[::-1])
    assert (again.status_code, again.json()) == (200, first)
    assert outcome(client)["action_ids"] == ids
    other = prefetch(client, names(world, A)[:1])
    assert other.status_code == 400 and "lookup_id" in other.json()["error"]
    assert [r.id for r in world.service.actions.newest()] == ids


def test_lookup_ids_are_forgotten_after_an_hour_and_bounded(
    client: TestClient, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOOKUPS", 3)
    for number in range(6):
        prefetch(client, names(world, A), f"x{number}")
    assert client.get("/memory/prefetch/x0").status_code == 404
    assert client.get("/memory/prefetch/x5").status_code == 200
    world.now += 3601
    gone = client.get("/memory/prefetch/x5")
    assert gone.status_code == 404 and gone.json()["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("prefetch", b""),
        ("prefetch", b"[]"),
        ("prefetch", b'{"chunk_hashes": ["00"]}'),
        ("prefetch", b'{"lookup_id": "x"}'),
        ("prefetch", b'{"chunk_hashes": ["00"], "lookup_id": ""}'),
        ("prefetch", b'{"chunk_hashes": ["00"], "lookup_id": 7}'),
        ("prefetch", b'{"chunk_hashes": ["00"], "lookup_id": "\\ud800"}'),
        ("prefetch", b'{"chunk_hashes": ["00"], "lookup_id": "\xff"}'),
        ("evict", b"{}"),
        ("evict", b'{"chunk_hashes": []}'),
        ("evict", b'{"chunk_hashes": "00"}'),
        ("evict", b'{"chunk_hashes": [5]}'),
        ("evict", b'{"chunk_hashes": ["xyz"]}'),
        ("evict", b'{"chunk_hashes": ["--1"]}'),
        ("evict", b'{"chunk_hashes": ["00"], "locations": "LocalCPUBackend"}'),
        ("evict", b"[" * 100_000),
    ],
)
def test_malformed_bodies_are_refused_with_a_reason(client: TestClient, path: str, body: bytes) -> None:
    answer = client.post(f"/memory/{path}", content=body)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"] and answer.json()["error"]


@pytest.mark.parametrize("locations", [["LocalDiskBackend"], ["LocalCPUBackend", "RemoteBackend"], []])
def test_places_that_cannot_be_emptied_alone_are_refused_with_those_that_can(
    client: TestClient, world: World, locations: list[str]
) -> None:
    body = {"chunk_hashes": names(world, A), "locations": locations}
    answer = client.post("/memory/evict", json=body)
    assert answer.status_code == 400
    assert "LocalCPUBackend (host memory" in answer.json()["error"]
    assert all(held == {Tier.HOST, Tier.DISK} for held in tiers(world, A))


def test_a_dead_cache_layer_is_told_as_a_failure(client: TestClient, world: World) -> None:
    world.layer.dead = True
    for locations in ((), ("LocalCPUBackend",)):
        answer = evict(client, names(world, B) + names(world, A), *locations)
        assert answer.status_code == 500
        assert "dead" in answer.json()["error"]
        (failure,) = answer.json()["failures"].values()
        assert "dead" in failure["error"]
        world.turn(A, "A")
    prefetch(client, names(world, A))
    told = outcome(client)
    assert (told["status"], told["found"]) == ("failed", 0)


def test_failures_are_named_by_port() -> None:
    assert module._port("http://127.0.0.1:8080/quota: no answer within 5 s") == "8080"
    assert module._port("no such thing") == "unknown"


def test_an_evict_during_a_request_is_answered_in_time_and_not_as_done(
    client: TestClient, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVICT_WAIT_S", 0.05)
    world.start(A, "A")
    answer = evict(client, names(world, A))
    assert answer.status_code == 202
    assert (answer.json()["status"], answer.json()["num_evicted"]) == ("evict_started", 0)
    assert len(answer.json()["action_ids"]) == 1
    assert all(world.held(A))


def test_passive_mode_says_that_nothing_was_done(client: TestClient, world: World) -> None:
    world.service.mode = "passive"
    answer = evict(client, names(world, A)).json()
    assert (answer["status"], answer["num_evicted"]) == ("rejected", 0)
    for hashes in (names(world, A), ["-6ed9"]):
        answer = prefetch(client, hashes).json()
        assert (answer["status"], answer["lookup_id"]) == ("rejected", "x") and answer["reason"]
        assert client.get("/memory/prefetch/x").status_code == 404
    assert all(world.held(A))
    world.service.mode = "kvpilot"
    assert prefetch(client, names(world, A)).json()["status"] == "prefetch_started"
    assert outcome(client)["status"] == "completed"


def test_a_key_reaches_its_own_tenant_only(world: World) -> None:
    world.turn(A, "A", tenant="left")
    world.turn(A, "A", tenant="right")
    left, right = ({"authorization": f"Bearer {key}"} for key in ("l", "r"))
    seed = Seed(world.service, {"l": "left", "r": "right"}, token="operator")
    with TestClient(seed.app()) as client:
        for headers in ({}, {"authorization": "Bearer operator"}):
            answer = evict(client, names(world, A), headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]
        full = [chunk.hex() for chunk in world.chunks(A)]
        assert evict(client, full, headers=left).json()["num_evicted"] == len(full)
        assert not any(world.held(A, "left"))
        assert all(world.held(A, "right")) and all(world.held(A))
        prefetch(client, full, headers=right)
        assert client.get("/memory/prefetch/x", headers=right).status_code == 200
        assert client.get("/memory/prefetch/x", headers=left).status_code == 404


def test_without_keys_the_token_is_needed_where_one_is_set(world: World) -> None:
    with TestClient(Seed(world.service, token="secret").app()) as client:
        assert prefetch(client, names(world, A)).status_code == 401
        assert (
            prefetch(client, names(world, A), headers={"authorization": "Bearer secret"}).status_code == 200
        )


def test_the_control_port_serves_it_too(world: World) -> None:
    with client_of(world, seed=Seed(world.service)) as client:
        assert evict(client, names(world, A)).json()["num_evicted"] == len(world.chunks(A))
        assert list(client.post("/memory/evict", content=b"{").json()) == ["error"]
