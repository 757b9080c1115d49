"""The demo's pieces that need no engine: tools that are really executed, scripts, the summary."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kvpilot.bench.lab import BenchError
from kvpilot.demo import run
from kvpilot.demo.agents import JOB_QUESTIONS, SCRIPTS, Agent, job_documents, job_messages, system_prompt
from kvpilot.demo.rounds import Keys, Turn, Workload
from kvpilot.demo.run import print_result, run_demo, summarise
from kvpilot.demo.tools import Toolbox, ToolCall, small_project
from tests.replay.test_render import TEXTS


def test_tools_are_really_executed_and_say_the_same_every_time() -> None:
    with small_project() as project:
        toolbox = Toolbox(project, TEXTS)
        tests = ToolCall("run_tests", {"path": "project"})
        output = toolbox.run(tests, 100_000)
        assert "FAILED (failures=2)" in output and "exit code 1" in output
        assert str(project) not in output and output == toolbox.run(tests, 100_000)
        found = toolbox.run(ToolCall("grep", {"pattern": "^def ", "path": "lib/textwrap.py"}), 100_000)
        assert ":def dedent(text):" in found
        assert "decoder.py" in toolbox.run(ToolCall("list_dir", {"path": "lib/json"}), 100_000)
        assert len(toolbox.run(ToolCall("read_file", {"path": "lib/textwrap.py"}), 50)) < 500


def test_what_a_tool_cannot_do_is_its_output() -> None:
    with small_project() as project:
        toolbox = Toolbox(project, TEXTS)
        assert "FileNotFoundError" in toolbox.run(
            ToolCall("read_file", {"path": "lib/../../etc/passwd"}), 100
        )
        assert "FileNotFoundError" in toolbox.run(ToolCall("read_file", {"path": "/etc/passwd"}), 100)
        assert "no such tool" in toolbox.run(ToolCall("rm", {"path": "lib"}), 100)


def test_an_agent_goes_through_its_script_with_real_results() -> None:
    with small_project() as project:
        agent = Agent(SCRIPTS[1], "s", Toolbox(project, TEXTS), 2_000)
        agent.begin("system", 200)
        while not agent.done:
            agent.replied("I look.")
            agent.run_tools()
        agent.replied("Done.")
    roles = [m["role"] for m in agent.messages]
    assert (
        roles[:2] == ["system", "user"]
        and roles[-1] == "assistant"
        and "tool_calls" not in agent.messages[-1]
    )
    asked = [use["id"] for m in agent.messages for use in m.get("tool_calls", ())]
    answered = [m["tool_call_id"] for m in agent.messages if m["role"] == "tool"]
    assert asked == answered and len(asked) == sum(len(step) for step in SCRIPTS[1].steps)
    assert all(
        json.loads(u["function"]["arguments"]) for m in agent.messages for u in m.get("tool_calls", ())
    )


def test_there_are_documents_enough_and_jobs_grow_by_questions() -> None:
    load = Workload()
    wanted = load.jobs_per_pause * sum(len(script.steps) for script in SCRIPTS)
    with small_project() as project:
        documents = job_documents(Toolbox(project, TEXTS), 500, wanted)
    assert len(documents) == wanted == len(set(documents))
    first, second = job_messages("doc", []), job_messages("doc", ["reply"])
    assert second[: len(first)] == first and len(JOB_QUESTIONS) == 2
    assert [m["role"] for m in second] == ["system", "user", "assistant", "user"]


def test_the_system_prompt_fills_its_length_with_text() -> None:
    assert system_prompt(TEXTS, 400) == system_prompt(TEXTS, 800)[: len(system_prompt(TEXTS, 400))]
    assert system_prompt(TEXTS, 400).startswith("You are a careful coding agent")


def test_every_round_has_tenants_of_its_own() -> None:
    keys = [Keys.of_round(number) for number in range(5)]
    assert len({key for pair in keys for key in (pair.agents, pair.others)}) == 10


def turn(agent: str, number: int, ttft: float, cached: int) -> Turn:
    return Turn(agent, number, number > 0, 1000, cached, ttft, "ok")


def test_ratios_are_of_the_same_turn_in_the_same_pair_of_rounds() -> None:
    played = [
        ("passive", [turn("a", 0, 900, 0), turn("a", 1, 1000, 100)]),
        ("kvpilot", [turn("a", 0, 900, 0), turn("a", 1, 300, 900)]),
        ("kvpilot", [turn("a", 0, 900, 0), turn("a", 1, 800, 900)]),
        ("passive", [turn("a", 0, 900, 0), turn("a", 1, 2000, 100)]),
    ]
    document = summarise(played, {"host": 1})
    # First turns are cold in both modes and count in neither.
    assert document["returning_turns"] == 2
    assert document["paired_ratio_ttft"] == 0.35
    assert document["passive"]["ttft_ms"] == {"p50": 1500, "p90": 1900}
    assert (document["passive"]["cached_share"], document["kvpilot"]["cached_share"]) == (0.1, 0.9)
    assert document["order"] == ["passive", "kvpilot", "kvpilot", "passive"]


class FakeRoom:
    """What the demo asks of a stack beside its rounds."""

    texts = TEXTS

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(chat=self._nothing)
        self.control = SimpleNamespace(set_mode=self._nothing)

    async def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    async def tier_sizes(self) -> dict[str, int]:
        return {"host": 1}


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[Turn] | Exception]:
    """The demo without a stack: what its rounds give, in order."""
    to_play: list[list[Turn] | Exception] = []

    @contextmanager
    def no_stack(*_: Any, **__: Any) -> Iterator[None]:
        yield

    @asynccontextmanager
    async def fake_lab(_: Any) -> AsyncIterator[FakeRoom]:
        yield FakeRoom()

    async def play() -> list[Turn]:
        turns = to_play.pop(0)
        if isinstance(turns, Exception):
            raise turns
        return turns

    monkeypatch.setattr(run, "kv_bytes_per_token", lambda _: 4096)
    monkeypatch.setattr(run, "launch", no_stack)
    monkeypatch.setattr(run, "lab", fake_lab)
    monkeypatch.setattr(run, "reset_tiers", FakeRoom()._nothing)
    monkeypatch.setattr(run, "Round", lambda *_: SimpleNamespace(play=play))
    return to_play


def two_turns(ttft: float) -> list[Turn]:
    return [turn("a", 0, 900, 0), turn("a", 1, ttft, 500)]


def test_what_was_measured_before_a_failure_is_known(
    rounds: list[list[Turn] | Exception], tmp_path: Path
) -> None:
    rounds += [two_turns(1000), two_turns(300), BenchError("the engine went away")]
    known: list[dict[str, Any]] = []
    with pytest.raises(BenchError):
        run_demo(tmp_path, known.append)
    assert [document["complete"] for document in known] == [False] * 3
    assert known[1]["order"] == ["passive"]
    assert known[-1]["paired_ratio_ttft"] == 0.3


def test_the_last_document_is_the_result_and_the_user_is_told_where_it_is(
    rounds: list[list[Turn] | Exception], tmp_path: Path
) -> None:
    rounds += [two_turns(1000), two_turns(300)]
    known: list[dict[str, Any]] = []
    document = run_demo(tmp_path, known.append, order=("passive", "kvpilot"), answers=False)
    assert known[-1] == document
    assert "complete" not in document and document["took_s"] >= 0
    shown = io.StringIO()
    print_result(document, Console(file=shown, width=200), Path("elsewhere/numbers.json"))
    assert "elsewhere/numbers.json" in shown.getvalue() and "out/demo.json" not in shown.getvalue()
