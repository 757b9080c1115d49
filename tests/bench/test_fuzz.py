"""The fuzzer plays what it says, finds what is wrong, and finds nothing wrong with kvpilot."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.hints.conformance.seeds import PATH, seeds
from typer.testing import CliRunner

from kvpilot.bench.fuzz import run
from kvpilot.bench.fuzz.cases import CHAT, Case, Cases, load_seeds
from kvpilot.bench.fuzz.engine import Received, answer
from kvpilot.bench.fuzz.rules import Outcome, wrong, wrong_body
from kvpilot.bench.fuzz.run import FuzzOptions, play_one, run_fuzz
from kvpilot.cli import app
from kvpilot.coordinator.service import CoordinatorService
from kvpilot.gateway.stream import StreamReader


def test_the_seeds_are_the_conformance_table() -> None:
    assert PATH.read_text() == seeds(), "run: python -m tests.hints.conformance.report"


def test_some_thousand_requests_do_no_harm() -> None:
    document = run_fuzz(FuzzOptions(count=2500, seed=7, gateway=0.6, coordinator=0.3))
    assert document["faults"] == 0, document["first_faults"]
    outcomes = document["outcomes"]
    assert outcomes["to the engine"] > 1000
    assert outcomes["answered here"] > 50
    assert outcomes["refused with 400"] > 20
    assert outcomes["read, to the engine"] > 700
    assert document["events"] > 600
    assert {"evict accepted", "demote accepted", "prefetch missing"} <= document["actions"].keys()
    assert document["asked"]["mapped"] > 50
    assert [len(job) for job in document["rss_mb"]] == [11]


def test_replies_are_read_in_the_fast_way_and_the_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Counter[bool] = Counter()
    usual = StreamReader._usual_chunks

    def counting(reader: StreamReader, data: bytes, out: list[bytes]) -> bool:
        found[result := usual(reader, data, out)] += 1
        return result

    monkeypatch.setattr(StreamReader, "_usual_chunks", counting)
    run_fuzz(FuzzOptions(count=100, seed=1, gateway=1.0))
    assert min(found[True], found[False]) > 5


def test_every_api_is_asked_and_edits_are_applied() -> None:
    cases = [Cases(load_seeds(), 2).make(number) for number in range(700)]
    assert {case.path for case in cases} == {CHAT, "/v1/completions", "/v1/messages", "/v1/responses"}
    edited = [n for n, case in enumerate(cases) if b'"clear_tool_uses_20250919"' in case.body][:60]
    replies = [play_one(number, FuzzOptions(seed=2))["came"]["reply"] for number in edited]
    assert sum(b'"applied_edits":[{' in reply for reply in replies) > 5


def test_processes_share_the_requests() -> None:
    alone, shared = (run_fuzz(FuzzOptions(count=60, seed=4, gateway=0.3, jobs=jobs)) for jobs in (1, 2))
    assert shared["outcomes"] == alone["outcomes"]
    assert shared["faults"] == 0
    assert len(shared["rss_mb"]) == 2


def test_equal_seeds_make_equal_requests_and_each_can_be_made_alone() -> None:
    first, again, other = (Cases(load_seeds(), seed) for seed in (1, 1, 2))
    made = [first.make(number) for number in range(200)]
    assert [again.make(number) for number in reversed(range(200))] == made[::-1]
    assert [other.make(number) for number in range(200)] != made
    assert len({case.body for case in made}) > 190


def test_requests_are_odd_in_every_way() -> None:
    cases = Cases(load_seeds(), 3)
    bodies = [cases.make(number).body for number in range(4000)]
    assert sum(not _is_json(body) for body in bodies) > 400
    assert sum(not _is_utf8(body) for body in bodies) > 40
    for text in (b"NaN", b"1e999", b"\\ud800", b"9" * 400, b"[" * 400, b'{"a":' * 400, b"\xef\xbb\xbf"):
        assert any(text in body for body in bodies), text
    assert any(len(body) > 50_000 for body in bodies)


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


SENT = b'{"model":"m","stream_options":{"x":1},"kv_transfer_params":{"chunk_hashes":true,"a":1},"messages":[ 1 ]}'


@pytest.mark.parametrize(
    ("received", "found"),
    [
        (SENT, ""),
        (SENT[:-1] + b',"return_token_ids":true}', ""),
        (SENT.replace(b'"x":1', b'"x":1,"include_usage":true'), ""),
        (SENT.replace(b'"chunk_hashes":true,', b""), ""),
        (SENT[:-1] + b',"return_token_ids":false}', "return_token_ids"),
        (SENT[:-1] + b',"cache_salt":"a"}', "cache_salt"),
        (SENT.replace(b'"x":1', b'"include_usage":true'), "stream_options"),
        (SENT.replace(b',"a":1', b""), "kv_transfer_params"),
        (SENT.replace(b"[ 1 ]", b"[1]"), "messages"),
        (SENT.replace(b'"model":"m",', b""), "model"),
        (SENT[:-1] + b',"more":1}', "more"),
        (SENT[:-1], "no JSON object"),
    ],
)
def test_only_documented_changes_of_a_body_are_right(received: bytes, found: str) -> None:
    assert found in wrong_body(SENT, received)
    assert bool(wrong_body(SENT, received)) == bool(found)


def messages(*kept: str, thought: bool = True, edits: Any = None, old: str = "r0") -> bytes:
    said: list[Any] = []
    for number, content in enumerate((old, *kept)):
        thoughts = [{"type": "thinking", "thinking": "t"}] if thought else []
        use = {"type": "tool_use", "id": f"c{number}", "input": {"n": 1}}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": content}
        said += [
            {"role": "assistant", "content": [*thoughts, use]},
            {"role": "user", "content": [result]},
        ]
    body = {"messages": said} | ({"context_management": {"edits": edits}} if edits else {})
    return json.dumps(body).encode()


GONE = "[Old tool result content cleared]"
USES: dict[str, Any] = {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 1}}
THINKING = {"type": "clear_thinking_20251015"}


@pytest.mark.parametrize(
    ("edit", "received", "found"),
    [
        (USES, messages("r1", old=GONE), ""),
        (USES, messages("r1"), ""),
        (USES, messages(GONE, old=GONE), "messages"),
        (USES, messages("r1", old="r"), "messages"),
        (USES, messages("r1", thought=False), "messages"),
        (USES, messages("r1", old=GONE, edits=[USES]), "messages"),
        (USES | {"keep": "all"}, messages("r1", old=GONE), "messages"),
        (USES | {"keep": {"type": "turns", "value": 1}}, messages("r1", old=GONE), "messages"),
        (THINKING, messages("r1", thought=False), ""),
        (THINKING, messages("r1", old=GONE), "messages"),
        ({"type": "other"}, messages("r1", old=GONE, edits=[{"type": "other"}]), "messages"),
    ],
)
def test_edits_clear_what_they_say_and_nothing_else(edit: Any, received: bytes, found: str) -> None:
    sent = messages("r1", edits=[edit])
    said = wrong_body(sent, received, path="/v1/messages")
    assert found in said and bool(said) == bool(found)
    assert wrong_body(sent, received), "only the Messages API has such edits"


CASE = Case(1, "/v1/chat/completions", [(b"x-a", b"1")], b'{"messages":[1]}')
TOLD = Received([(b"x-a", b"1")], CASE.body)


@pytest.mark.parametrize(
    ("outcome", "tenant", "found"),
    [
        (Outcome(200, answer(CASE.body).text, TOLD), None, ""),
        (Outcome(500, b"", TOLD), None, "status 500"),
        (Outcome(0, b"", None), None, "status 0"),
        (Outcome(400, b"", None), None, "refused"),
        (Outcome(400, b"", None), "acme", "refused"),
        (Outcome(200, b'{"kvpilot":{"actions":[]}}', None), None, "not forwarded"),
        (Outcome(200, answer(CASE.body).text, Received([], CASE.body)), None, "headers"),
        (Outcome(200, b"{}", TOLD), None, "reply"),
        (Outcome(200, answer(CASE.body).text, TOLD), "acme", "not salted"),
    ],
)
def test_what_users_must_not_see_is_found(outcome: Outcome, tenant: str | None, found: str) -> None:
    said = wrong(CASE, outcome, tenant)
    assert found in said and bool(said) == bool(found)


def test_faults_of_gateway_and_coordinator_are_told_with_their_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(CoordinatorService, "handle", broken)
    monkeypatch.setattr(run, "prepare", broken)
    document = run_fuzz(FuzzOptions(count=20, seed=1, gateway=0.5, coordinator=0.5))
    assert document["faults"] >= 20
    assert any("was not understood: RuntimeError('boom')" in fault for fault in document["first_faults"])
    assert any("raised RuntimeError('boom')" in fault for fault in document["first_faults"])


def test_memory_that_grows_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GROWTH_MB", -1000.0)
    document = run_fuzz(FuzzOptions(count=20, seed=1))
    assert "memory grew" in document["first_faults"][-1]


def test_the_command_tells_what_it_saw_and_can_play_one_case_again(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    result = CliRunner().invoke(app, ["bench", "fuzz", "--count", "30", "--seed", "5", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["seed"] == 5
    alone = play_one(12, FuzzOptions(seed=5))
    assert alone["sent"]["body"] == Cases(load_seeds(), 5).make(12).body
    assert alone["wrong"] == ""


def test_seeds_that_are_none_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "seeds"
    path.write_text('{"body": 1, "headers": {}}\n')
    result = CliRunner().invoke(app, ["bench", "fuzz", "--count", "1", "--seeds", str(path)])
    assert result.exit_code == 2
    with pytest.raises(ValueError, match="line 1 is not an object with body and headers"):
        load_seeds(path)
