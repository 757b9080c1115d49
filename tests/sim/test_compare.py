"""``kvpilot sim compare`` as a user meets it: rows, skipped capacities, one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpilot.cli import app


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Eight agents that come back at different paces, and share a system prompt."""
    lines = []
    for session, pause in enumerate((5, 5, 5, 20, 20, 60, 60, 60)):
        calls = [
            {
                "agent": "main",
                "t_request": turn * (pause + 10.0),
                "t_end": turn * (pause + 10.0) + 10.0,
                "keep": 2 * turn,
                "add": [{"role": "user", "tok": 400, "id": f"u{session}-{turn}"}],
                "reply": {"role": "assistant", "tok": 300, "id": f"a{session}-{turn}"},
            }
            for turn in range(12)
        ]
        agent = {"id": "main", "hidden_prefix_tok": 2000}
        lines.append({"source": "made-up", "session": f"s{session}", "agents": [agent], "calls": calls})
    path = tmp_path / "made-up.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def compare(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["sim", "compare", *map(str, arguments)])


def test_rows_say_what_each_policy_got(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = compare(
        trace, "--pressure", "0.3,1,50", "--policies", "references", "--window", 9, "--json", out
    )
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    rows = {(row["pressure"], row["policy"], row["hints"]): row for row in document["rows"]}
    assert {policy for _, policy, _ in rows} == {"lru", "references", "belady"}
    assert rows[0.3, "belady", "none"]["hit_rate"] == 1.0
    assert rows[0.3, "lru", "lifecycle"]["gap_closed"] is None, "nothing to win where everything fits"
    assert rows[1, "belady", "none"]["gap_closed"] == 1.0
    for row in rows.values():
        assert row["source"] == "made-up"
        assert 0 < row["hit_rate_all"] < row["hit_rate"] <= 1
        chunk_bytes = 256 * 131_072
        assert row["bytes_held"]["memory"]["peak"] <= row["capacity_chunks"] * chunk_bytes
    assert [skip["pressure"] for skip in document["skipped"]] == [50]
    assert document["sources"][0]["calls"] == 96
    assert "made-up" in result.output


def test_a_profile_tells_times_to_first_token(trace: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    result = compare(
        trace,
        "--profile",
        "this-cpu",
        "--pressure",
        "0.5,1,50",
        "--window",
        9,
        "--policies",
        "references",
        "--json",
        out,
        "--plot",
        picture,
    )
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    rows = {(row["pressure"], row["policy"], row["hints"]): row for row in document["rows"]}
    assert {policy for _, policy, _ in rows} == {"lru", "references", "clairvoyant"}
    for (_, policy, _), row in rows.items():
        assert 0 < row["ttft_p50"] <= row["ttft_p90"] <= row["ttft_p99"]
        assert 0 <= row["waited_mean"] < row["ttft_mean"]
        assert set(row["bytes_written"]) == (set() if policy == "clairvoyant" else {"device", "host", "disk"})
    assert rows[1, "clairvoyant", "none"]["ttft_mean"] < rows[1, "lru", "none"]["ttft_mean"]
    pytest.importorskip("matplotlib")
    assert "mean time to first token" in picture.read_text()
    assert [skip["pressure"] for skip in document["skipped"]] == [50]


def test_a_picture_is_drawn(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "pictures" / "out.svg"
    result = compare(
        trace, "--pressure", "0.3,1", "--window", 9, "--policies", "references", "--plot", picture
    )
    assert result.exit_code == 0, result.output
    assert "references, lifecycle" in picture.read_text()
    result = compare(trace, "--pressure", "50", "--policies", "lru", "--plot", picture)
    assert result.exit_code == 2
    assert "every capacity was skipped" in result.output


def test_a_folder_is_all_its_traces(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "again.jsonl").write_bytes(trace.read_bytes())
    out = tmp_path / "result" / "out.json"
    result = compare(tmp_path, "--pressure", "0.3", "--policies", "lru", "--hints", "none", "--json", out)
    assert result.exit_code == 0, result.output
    assert {row["source"] for row in json.loads(out.read_text())["rows"]} == {"again", "made-up"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("no-such-trace",), "no trace 'no-such-trace'"),
        (("{trace}", "--pressure", "0"), "--pressure 0: give numbers above 0"),
        (("{trace}", "--policies", "magic"), "no policy 'magic': there are lru"),
        (("{trace}", "--hints", "all"), "--hints all: give none, lifecycle"),
        (("{trace}", "--tiers", "nine"), "--tiers nine"),
        (("{trace}", "--profile", "abacus"), "no profile 'abacus': there are h100-nvme"),
        (("{trace}", "--pin", "forever"), "--pin forever: give call or lookup"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(trace: Path, arguments: tuple[str, ...], says: str) -> None:
    result = compare(*(argument.replace("{trace}", str(trace)) for argument in arguments))
    assert result.exit_code == 2
    assert says in result.output
    assert result.output.count("\n") == 1
