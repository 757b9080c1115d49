"""Which programs a tool call runs: first … last, with what decides how long they take."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.context.conversation import read_reply
from kvpilot.context.programs import program_of, programs
from kvpilot.domain import ToolFacts


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("ls", "ls"),
        ("cd /repo && git diff HEAD~1 | head -50", "git diff … head"),
        ("source .venv/bin/activate; pytest tests/a.py -x", "pytest"),
        ("timeout 60 python -m pytest -q 2>&1 | tail -5", "python -m pytest … tail"),
        ("CI=1 sudo -E apt-get install -y jq", "apt-get install"),
        ("pip install -e . && python3 -m pytest", "pip install … python3 -m pytest"),
        ("git -C /other log --oneline", "git log"),
        ("npm run test -- --watch=false", "npm run test"),
        ("for f in *.py; do wc -l $f; done", "for … done"),
        ("./scripts/run.sh --fast", "run.sh"),
        ("(make clean && make test) || true", "make clean … true"),
        ("grep -rn 'a | b; c' . > found.txt", "grep"),
        ("cat <<'EOF' > t.py\nprint('not; a | program')\nEOF\npython t.py", "cat … python"),
        ("git add -A && git commit -m \"$(cat <<'EOF'\nfix: don't\nEOF\n)\"", "git add … git commit"),
        ("# what it's for\nls -la", "ls"),
        ("echo 'never closed | head", "echo … head"),
        ("cd /repo", None),
        ("", None),
        ("&& ;", None),
    ],
)
def test_a_line_is_named_by_its_programs(line: str, named: str | None) -> None:
    assert programs(line) == named


@pytest.mark.parametrize(
    ("tool", "arguments", "named"),
    [
        ("Bash", {"command": "go test ./...", "description": "Run tests"}, "go test"),
        ("execute_bash", {"command": "go test ./...", "security_risk": "LOW"}, "go test"),
        ("exec_command", {"cmd": "go test ./...", "yield_time_ms": 1000}, "go test"),
        ("shell", {"command": ["bash", "-lc", "go test ./..."], "workdir": "/w"}, "go test"),
        ("shell", {"command": ["go", "test", "./..."]}, "go test"),
        ("run_command", {"script": "go test ./..."}, "go test"),
        ("run_in_terminal", {"command": "go test ./..."}, "go test"),
        ("mcp__box__run_shell_command", {"command": "go test ./..."}, "go test"),
        ("bash", {"restart": True}, None),
        ("Edit", {"command": "go test", "path": "x"}, None),
        ("str_replace_based_edit_tool", {"command": "view", "path": "x"}, None),
    ],
)
def test_the_shells_of_many_agents_are_known(tool: str, arguments: dict[str, Any], named: str | None) -> None:
    assert program_of(tool, arguments) == named


def call(name: str, **arguments: Any) -> ToolFacts:
    message = {"tool_calls": [{"function": {"name": name, "arguments": json.dumps(arguments)}}]}
    (found,) = read_reply(json.dumps(message).encode()).tools
    return found


def test_what_bounds_a_call_and_what_it_starts_is_read_from_its_arguments() -> None:
    assert call("Bash", command="make", timeout=120_000, run_in_background=True) == ToolFacts(
        "Bash", "make", 120.0, background=True
    )
    assert call("execute_bash", command="make", timeout=30).timeout_s == 30.0
    assert call("shell", command=["make"], timeout_ms=5000).timeout_s == 5.0
    assert call("Task", prompt="look", subagent_type="Explore") == ToolFacts("Task", agent=True)
    assert call("Bash", command="make", timeout=True) == ToolFacts("Bash", "make")


@given(st.text(), st.recursive(st.text() | st.none(), lambda inner: st.lists(inner) | st.text()))
def test_whatever_is_called_nothing_is_raised(tool: str, command: object) -> None:
    assert program_of(tool, {"command": command}) is None or tool
    found = program_of("bash", {"command": command})
    assert found is None or (found and len(found) < 200)
    read_reply(json.dumps({"tool_calls": [{"function": {"name": tool, "arguments": command}}]}).encode())


@pytest.mark.parametrize("line", ["x 'a b' | " * 50_000, "'" * 500_000, "<<A\n" * 100_000, "\\\n" * 200_000])
def test_a_huge_line_costs_no_more_than_a_long_one(line: str) -> None:
    began = time.process_time()
    programs(line)
    assert time.process_time() - began < 0.2
