"""``kvpilot plan-capacity``: what meets a target, what it costs, and what is not tried."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.test_compare import trace
from typer.testing import CliRunner

from kvpilot.cli import app
from kvpilot.sim.plan_capacity import smallest

__all__ = ["trace"]


def plan_capacity(*arguments: object) -> Any:
    given_ = [
        "plan-capacity",
        *map(str, arguments),
        "--profile",
        "this-cpu",
        "--policy",
        "lru",
        "--window",
        "9",
    ]
    return CliRunner().invoke(app, given_)


def test_the_cheapest_sizes_that_meet_the_target_come_first(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ("--device-gb", "0.4,1,2", "--host-gb", "0.1,0.5,1", "--disk-gb", "0,8", "--prices", "100,5,0.1")
    result = plan_capacity(trace, "--ttft-p90", 2, *sizes, "--json", out)
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    answers, simulated = document["answers"], document["simulated"]
    assert answers and len(simulated) < document["offered"] == 18
    assert [a["price"] for a in answers] == sorted(a["price"] for a in answers)
    for answer in answers:
        assert answer["meets"] and answer["ttft_p90"] <= 2
        gb = answer["gb"]
        assert answer["price"] == pytest.approx(100 * gb["device"] + 5 * gb["host"] + 0.1 * gb["disk"])
    cheapest = answers[0]["price"]
    assert all(not s["meets"] for s in simulated if s["price"] < cheapest)
    assert f"{answers[0]['ttft_p90']:.3f}" in result.output


def test_what_nothing_reaches_is_said_with_what_comes_nearest(trace: Path) -> None:
    result = plan_capacity(trace, "--ttft-p90", 0.0001)
    assert result.exit_code == 1
    assert "Nothing offered" in result.output and "nearest" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ttft-p90", "0"), "--ttft-p90 0"),
        (("--ttft-p90", "1", "--device-gb", "0.001"), "the largest context has to fit twice"),
        (("--ttft-p90", "1", "--host-gb", "many"), "--host-gb many"),
        (("--ttft-p90", "1", "--prices", "1,2"), "give one for each of device, host, disk"),
        (("--ttft-p90", "1", "--hints", "all"), "--hints all"),
    ],
)
def test_mistakes_are_one_line(trace: Path, arguments: tuple[str, ...], says: str) -> None:
    result = plan_capacity(trace, *arguments)
    assert result.exit_code == 2
    assert says in result.output.splitlines()[-1]


@given(
    st.tuples(*[st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)] * 3),
    st.tuples(*[st.floats(0.0, 9.0)] * 3),
    st.lists(st.tuples(*[st.integers(0, 9)] * 3), max_size=3),
)
def test_all_smallest_choices_are_found_and_none_is_asked_about_twice(
    offered: tuple[list[int], ...], prices: tuple[float, ...], enough: list[tuple[int, ...]]
) -> None:
    choices = list(itertools.product(*offered))
    asked = []

    def within(small: tuple[float, ...], large: tuple[float, ...]) -> bool:
        return all(a <= b for a, b in zip(small, large, strict=True))

    def meets(choice: tuple[float, ...]) -> bool:
        asked.append(choice)
        return any(within(one, choice) for one in enough)

    def price(choice: tuple[float, ...]) -> float:
        return sum(size * each for size, each in zip(choice, prices, strict=True))

    found = list(smallest(choices, price, meets))
    meeting = [c for c in choices if any(within(one, c) for one in enough)]
    minimal = {c for c in meeting if not any(o != c and within(o, c) for o in meeting)}
    assert set(found) == minimal and len(found) == len(minimal)
    assert [price(c) for c in found] == sorted(price(c) for c in found)
    assert len(asked) == len(set(asked))
