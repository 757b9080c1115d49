"""The control API, over its ASGI interface."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from tests.coordinator.world import World

from kvpilot.control.api import create_app
from kvpilot.control.metrics import metrics_text
from kvpilot.control.seed import Seed
from kvpilot.coordinator.planner import Planner
from kvpilot.coordinator.view import Reader
from kvpilot.plan import PlanSettings

BASE = "/kvpilot/v1"
SYSTEM = {"role": "system", "content": "rules that are long enough for chunks of four tokens"}
CONTEXT = [SYSTEM, {"role": "user", "content": " ".join(f"w{i}" for i in range(20))}]


def client_of(world: World, token: str = "", seed: Seed | None = None) -> TestClient:
    reader = Reader(world.service)
    planner = Planner(world.service, reader, PlanSettings())
    app = create_app(world.service, planner, reader, lambda: metrics_text(world.service), token, seed)
    return TestClient(app)


@pytest.fixture
def world() -> World:
    world = World(recheck_s=())
    world.turn(CONTEXT, "team:a/member:1")
    return world


@pytest.fixture
def client(world: World) -> Iterator[TestClient]:
    with client_of(world) as client:
        yield client


def test_a_session_is_shown_with_its_chunks(client: TestClient, world: World) -> None:
    listed = client.get(f"{BASE}/sessions").json()["sessions"]
    assert [s["id"] for s in listed] == ["team:a/member:1"]
    shown = client.get(f"{BASE}/sessions/team:a/member:1").json()
    assert shown["state"] == "waiting_human"
    assert [c["hash"] for c in shown["contexts"][0]["chunks"]] == [c.hex() for c in world.chunks(CONTEXT)]
    assert client.get(f"{BASE}/sessions/nobody").status_code == 404


def test_an_eviction_is_answered_with_its_outcome(client: TestClient, world: World) -> None:
    done = client.post(f"{BASE}/actions?wait=10", json={"kind": "evict", "session": "team:a/member:1"}).json()
    assert (done["status"], done["confirmed"]) == ("done", len(world.chunks(CONTEXT)))
    assert client.get(f"{BASE}/actions/{done['id']}").json() == done
    assert client.get(f"{BASE}/actions").json()["actions"] == [done]
    assert not any(world.held(CONTEXT))


def test_signals_answer_with_action_ids(client: TestClient) -> None:
    told = client.post(f"{BASE}/sessions/team:a/member:1/signals", json={"kind": "tool_finished"})
    assert told.status_code == 202
    (action,) = told.json()["actions"]
    assert client.get(f"{BASE}/actions/{action}?wait=10").json()["kind"] == "prefetch"


def test_a_wish_to_keep_a_session_is_a_signal_and_is_shown(client: TestClient) -> None:
    url = f"{BASE}/sessions/team:a/member:1"
    told = client.post(f"{url}/signals", json={"kind": "retain", "ttl_s": 60, "priority": 3})
    assert (told.status_code, told.json()["actions"]) == (202, [])
    (context,) = client.get(url).json()["contexts"]
    assert (context["keep_until"], context["priority"]) == (1060.0, 3)
    assert client.post(f"{url}/signals", json={"kind": "retain"}).status_code == 422


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("actions", {"kind": "evict"}),
        ("actions", {"kind": "melt", "session": "x"}),
        ("actions", {"kind": "evict", "session": "a", "chunks": ["00"]}),
        ("sessions/team:a/member:1/signals", {"kind": "nonsense"}),
        ("sessions/team:a/member:1/signals", {"kind": "end", "eta_s": -1}),
    ],
)
def test_bad_requests_are_refused_with_a_reason(
    client: TestClient, path: str, body: dict[str, object]
) -> None:
    answer = client.post(f"{BASE}/{path}", json=body)
    assert answer.status_code == 422
    assert answer.json()["detail"]


def test_the_same_id_of_two_tenants_must_be_told_apart(client: TestClient, world: World) -> None:
    world.turn(CONTEXT, "x", tenant="left")
    world.turn(CONTEXT, "x", tenant="right")
    assert client.get(f"{BASE}/sessions/x").status_code == 409
    assert client.get(f"{BASE}/sessions/x?tenant=left").json()["tenant"] == "left"


def test_mode_can_be_switched(client: TestClient, world: World) -> None:
    assert client.put(f"{BASE}/mode", json={"mode": "passive"}).json() == {"mode": "passive"}
    refused = client.post(f"{BASE}/actions", json={"kind": "evict", "session": "team:a/member:1"}).json()
    assert refused["status"] == "rejected"
    assert all(world.held(CONTEXT))
    assert client.put(f"{BASE}/mode", json={"mode": "wild"}).status_code == 422


def test_with_a_token_everything_but_health_needs_it(world: World) -> None:
    with client_of(world, "secret") as client:
        assert client.get(f"{BASE}/health").status_code == 200
        for path in (f"{BASE}/sessions", f"{BASE}/tiers", f"{BASE}/actions", "/metrics"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
            assert client.get(path, headers={"authorization": "Bearer secret"}).status_code == 200


def test_metrics_and_the_openapi_document(client: TestClient) -> None:
    text = client.get("/metrics").text
    assert 'kvpilot_sessions{state="waiting_human"} 1.0' in text
    assert "kvpilot_requests_mapped_total 1.0" in text
    paths = client.get(f"{BASE}/openapi.json").json()["paths"]
    assert f"{BASE}/actions" in paths and f"{BASE}/mode" in paths
