"""The control API, over its ASGI interface."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from tests.coordinator.world import World

from kvpilot.control.api import create_app
from kvpilot.control.metrics import metrics_text
from kvpilot.control.seed import Seed
from kvpilot.coordinator.planner import Planner
from kvpilot.coordinator.view import Reader
from kvpilot.sessions.book import Session

BASE = "/kvpilot/v1"
SYSTEM = {"role": "system", "content": "rules that are long enough for chunks of four tokens"}
CONTEXT = [SYSTEM, {"role": "user", "content": " ".join(f"w{i}" for i in range(20))}]


def client_of(world: World, token: str = "", seed: Seed | None = None) -> TestClient:
    reader = Reader(world.service)
    planner = Planner(world.service)
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


def test_an_action_sent_again_under_its_id_is_shown_and_not_done_again(client: TestClient) -> None:
    asked = {"kind": "prefetch", "session": "team:a/member:1", "id": "mine"}
    first, again, other = (
        client.post(f"{BASE}/actions?wait=10", json=asked | more).json()
        for more in ({}, {}, {"kind": "evict"})
    )
    assert again == first
    assert (other["status"], other["id"] == first["id"]) == ("rejected", False)


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
        ("sessions/team:a/member:1/signals", {"kind": "end", "more": 1}),
        ("sessions/team:a/member:1/signals", {"kind": "end", "two\nlines" * 100: 1}),
        ("sessions/team:a/member:1/signals", ["end"]),
        (f"sessions/{'x' * 300}/signals", {"kind": "end"}),
        ("sessions/a%00b/signals", {"kind": "end"}),
        *(
            ("sessions/team:a/member:1/signals", {"kind": "resume", "eta_s": eta})
            for eta in (-1, math.nan, math.inf, -math.inf, 1e308)
        ),
        *(
            (path, {"kind": kind, "session": "x", field: bad})
            for path, kind, field in (
                ("sessions/team:a/member:1/signals", "resume", "parent"),
                ("actions", "evict", "session"),
                ("actions", "evict", "tenant"),
            )
            for bad in ("", "  ", "x" * 100_000, "a\nb", "\ud800", "a\0")
        ),
        ("actions", {"kind": "evict", "session": "x", "messages": [{"role": "user", "content": "\udfff"}]}),
        ("actions", {"kind": "evict", "session": "x", "tools": [{"\ud800": math.nan}]}),
        ("actions", {"kind": "evict", "chunks": ["00"] * 10_001}),
        ("actions", {"kind": "evict", "session": "x", "target": "messages", "start": 4, "end": 1}),
        ("actions", {"kind": "evict", "session": "x", "target": "tokens", "start": 4}),
        ("actions", {"kind": "evict", "session": "x", "start": 1, "end": 4}),
        ("chunks/locate", {"chunks": ["00" * 32] * 10_001}),
        ("chunks/locate", {"chunks": [], "salt": "\ud800"}),
    ],
)
def test_bad_requests_are_refused_with_a_reason(client: TestClient, path: str, body: object) -> None:
    # json.dumps writes lone surrogates and NaN, as careless clients do.
    answer = client.post(
        f"{BASE}/{path}", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 422
    reason = answer.json()["detail"]
    assert 0 < len(reason) < 300 and reason.isprintable(), "one line"
    listed = client.get(f"{BASE}/sessions").json()["sessions"]
    assert [s["id"] for s in listed] == ["team:a/member:1"]


@pytest.mark.parametrize("content", [b"", b"{", b"null", b'{"kind":"end"}', b"\xff", b"[" * 100_000])
@pytest.mark.parametrize("kind", ["application/json", "text/plain", ""])
def test_what_is_no_json_object_is_refused(client: TestClient, content: bytes, kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    answer = client.post(f"{BASE}/sessions/team:a/member:1/signals", content=content, headers=headers)
    good = kind == "application/json" and content.endswith(b"}")
    assert answer.status_code in ((202,) if good else (400, 422))


@pytest.mark.parametrize(
    ("path", "kind", "entry"),
    [
        *(("chunks/locate", {}, bad) for bad in ("00", "00 11", "0x" + "0" * 62, "-" + "0" * 63, "g" * 64)),
        *(("actions", {"kind": "evict"}, bad) for bad in ("", "00 11", "1" * 65, "g", "x" * 100_000)),
    ],
)
def test_a_bad_chunk_name_is_pointed_at(
    client: TestClient, path: str, kind: dict[str, str], entry: str
) -> None:
    answer = client.post(f"{BASE}/{path}", json={**kind, "chunks": ["ab" * 32, entry]})
    assert answer.status_code == 422
    reason = answer.json()["detail"]
    assert reason.startswith("chunks[1]: ") and "64" in reason and len(reason) < 300


def test_chunks_are_named_in_full_or_in_short(client: TestClient, world: World) -> None:
    names = [c.hex() for c in world.chunks(CONTEXT)]
    located = client.post(f"{BASE}/chunks/locate", json={"chunks": [*names, "00" * 32]}).json()
    assert located == {"tiers": [["disk", "host"]] * len(names) + [[]]}
    signed = [f"{int.from_bytes(c[-8:], 'big', signed=True):x}" for c in world.chunks(CONTEXT)]
    done = client.post(f"{BASE}/actions?wait=10", json={"kind": "demote", "chunks": signed}).json()
    assert (done["planned"] + done["skipped"], done["kind"]) == (len(names), "demote")


def test_sessions_are_listed_in_pages(client: TestClient, world: World) -> None:
    for n in range(250):
        world.service.book.sessions["t", str(n)] = Session(("t", str(n)), explicit=True, last_seen=float(n))
    every = [s.id for s in sorted(world.service.book.sessions.values(), key=lambda s: -s.last_seen)]

    def page(query: str) -> list[str]:
        answer = client.get(f"{BASE}/sessions{query}").json()
        assert answer["total"] == 251
        return [s["id"] for s in answer["sessions"]]

    assert page("") == every[:200]
    assert page("?offset=200") == every[200:]
    assert page("?limit=1000") == every
    assert page("?limit=3&offset=2") == every[2:5]
    assert page("?offset=1000") == []
    for query in ("?limit=1001", "?limit=0", "?offset=-1", "?limit=x"):
        assert client.get(f"{BASE}/sessions{query}").status_code == 422


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
            for wrong in ("Bearer wrong", "secret", "Basic secret", "Bearer", ""):
                assert client.get(path, headers={"authorization": wrong}).status_code == 401
            assert client.get(path, headers={"authorization": "Bearer secret"}).status_code == 200


def test_metrics_and_the_openapi_document(client: TestClient) -> None:
    text = client.get("/metrics").text
    assert 'kvpilot_sessions{state="waiting_human"} 1.0' in text
    assert "kvpilot_requests_mapped_total 1.0" in text
    paths = client.get(f"{BASE}/openapi.json").json()["paths"]
    assert f"{BASE}/actions" in paths and f"{BASE}/mode" in paths
