"""Why KV is where it is, asked over the control API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from kvpilot.cli.explained import print_chunk, print_session
from kvpilot.control.api import create_app
from kvpilot.control.metrics import metrics_text
from kvpilot.coordinator.planner import Planner
from kvpilot.coordinator.view import Reader
from kvpilot.domain import SignalKind
from tests.coordinator.world import SYSTEM, World, user

BASE = "/kvpilot/v1"
SHELL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "Bash", "arguments": json.dumps({"command": "pytest -q"})}}],
}


class Asked:
    """A coordinator under pressure: ``tool`` waits for a program, ``person`` for a person who left long ago."""

    def __init__(self) -> None:
        self.world = World(recheck_s=())
        reader = Reader(self.world.service)
        self.planner = Planner(self.world.service)
        app = create_app(
            self.world.service, self.planner, reader, lambda: metrics_text(self.world.service), ""
        )
        self.client = TestClient(app)
        self.contexts = {
            name: [SYSTEM, user(f"{name} {' '.join(map(str, range(40)))}")] for name in ("tool", "person")
        }

    async def fill(self) -> None:
        world = self.world
        world.turn(self.contexts["person"], "person")
        world.now += 600.0
        world.turn(self.contexts["tool"], "tool", reply=SHELL)
        world.layer.capacity = int(1000 * sum(len(world.chunks(c)) for c in self.contexts.values()) / 0.9)
        world.now += 0.5
        await world.observe()

    def explain(self, what: str) -> dict[str, Any]:
        answer = self.client.get(f"{BASE}/explain/{what}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture
async def asked() -> Asked:
    asked = Asked()
    await asked.fill()
    return asked


def lines(show: Any, answer: dict[str, Any]) -> str:
    said: list[str] = []
    show(answer, said.append)
    return "\n".join(said)


async def test_a_session_is_explained_by_what_it_waits_for(asked: Asked) -> None:
    answer = asked.explain("sessions/tool")
    (conversation,) = answer["conversations"]
    forecast = conversation["forecast"]
    assert forecast["waits_for"] == "tool"
    assert forecast["since"] == asked.world.now - 0.5
    assert (
        forecast["returns_in_s"]["p10"] <= forecast["returns_in_s"]["p50"] <= forecast["returns_in_s"]["p90"]
    )
    assert 0.0 < forecast["within"]["10s"] <= forecast["within"]["60s"] <= forecast["within"]["600s"] <= 1.0
    named = [entry["feature"] for entry in forecast["features"]]
    assert {"tool:Bash", "program:pytest"} <= set(named)
    assert [abs(e["effect"]) for e in forecast["features"]] == sorted(
        (abs(e["effect"]) for e in forecast["features"]), reverse=True
    )
    assert conversation["place"] == {"rank": 2, "of": 2}
    (other,) = asked.explain("sessions/person")["conversations"]
    assert other["place"] == {"rank": 1, "of": 2}
    assert conversation["worth"] > other["worth"] > 0.0
    shown = lines(print_session, answer)
    assert "program:pytest" in shown and "2. to go of 2" in shown


async def test_what_was_decided_is_told_with_what_it_lost_to(asked: Asked) -> None:
    upcoming = asked.explain("sessions/person")["conversations"][0]["next"]
    assert [step["action"] for step in upcoming] == ["demote"]
    records = asked.planner.tick()
    assert [(r.kind.value, r.session) for r in records] == [("demote", "person")]
    await asked.world.settle(records)
    answer = asked.explain("sessions/person")
    last = answer["conversations"][0]["last"]
    assert (last["action"], last["place"]) == ("demote", {"rank": 1, "of": 2})
    assert last["instead_of"].startswith("default/tool#")
    assert last["instead_of_worth"] > last["worth"]
    assert "lost to default/tool#" in lines(print_session, answer)


async def test_a_demotion_is_judged_by_who_comes_back_first(asked: Asked) -> None:
    records = asked.planner.tick()
    await asked.world.settle(records)
    (chunks,) = (record.planned for record in records)
    asked.world.now += 5.0
    asked.world.turn(asked.contexts["tool"], "tool")
    assert (
        f'kvpilot_demoted_chunks_in_hindsight_total{{verdict="right"}} {float(chunks)}'
        in metrics_text(asked.world.service).decode()
    )


async def test_a_chunk_is_explained_by_all_who_hold_it(asked: Asked) -> None:
    shared, own = (
        asked.world.chunks(asked.contexts["tool"])[0],
        asked.world.chunks(asked.contexts["tool"])[-1],
    )
    (found,) = asked.explain(f"chunks/{shared.hex()}")["spaces"]
    assert (found["holders"], found["position"], found["tiers"]) == (2, 0, ["disk", "host"])
    assert {c["session"] for c in found["held_by"]} == {"tool", "person"}
    assert found["worth"] == pytest.approx(sum(c["worth"] for c in found["held_by"]))
    (found,) = asked.explain(f"chunks/{own.hex().upper()}")["spaces"]
    assert [c["session"] for c in found["held_by"]] == ["tool"]
    assert asked.planner.decisions() != []
    asked.world.service.mode = "passive"
    assert asked.planner.decisions() == [], "what is only observed is not planned for"
    asked.world.signal("tool", SignalKind.END)
    await asyncio.sleep(0.01)
    (found,) = asked.explain(f"chunks/{own.hex()}")["spaces"]
    assert (found["holders"], found["worth"]) == (0, 0)
    assert "first to go" in lines(print_chunk, {"spaces": [found]})


async def test_what_is_not_known_is_said_so(asked: Asked) -> None:
    for what, status, said in (
        ("sessions/nobody", 404, "session 'nobody' is not known"),
        (f"chunks/{'ab' * 32}", 404, "in no live context"),
        ("chunks/xyz", 422, "chunk"),
    ):
        answer = asked.client.get(f"{BASE}/explain/{what}")
        assert answer.status_code == status
        assert said in answer.json()["detail"]


async def test_intervals_of_pauses_are_counted_in_metrics(asked: Asked) -> None:
    world = asked.world
    world.turn(asked.contexts["person"], "person")
    text = metrics_text(world.service).decode()
    for share in ("0.5", "0.8", "0.95"):
        assert f'kvpilot_forecast_pauses_total{{interval="{share}",waits_for="person"}} 1.0' in text
    assert 'kvpilot_forecast_interval_width{interval="0.8",waits_for="person"}' in text
