"""Demotions are judged by who came back first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpilot.coordinator.hindsight import HORIZON_S, Hindsight


def test_who_came_back_first_tells() -> None:
    hindsight = Hindsight()
    hindsight.demoted("a", 10, "b", 0.0)
    hindsight.demoted("c", 3, "b", 0.0)
    hindsight.demoted("d", 5, "e", 0.0)
    hindsight.came("a", 1.0)
    hindsight.came("b", 2.0)
    hindsight.came("a", 3.0)
    assert hindsight.chunks == {"regretted": 10, "right": 3}
    hindsight.came("e", HORIZON_S + 1.0)
    assert hindsight.chunks == {"regretted": 10, "right": 3, "idle": 5}


def test_nothing_is_said_of_who_was_forgotten() -> None:
    hindsight = Hindsight()
    hindsight.demoted("a", 10, "b", 0.0)
    hindsight.forget("b")
    hindsight.came("a", 1.0)
    assert not hindsight.chunks


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("demoted", "came", "forget")),
            st.sampled_from("abcd"),
            st.sampled_from("abcd"),
            st.floats(0, 400),
        )
    )
)
def test_no_chunk_is_counted_twice_and_nothing_is_left_behind(
    steps: list[tuple[str, str, str, float]],
) -> None:
    hindsight, now, noted = Hindsight(), 0.0, 0
    for what, one, other, later in steps:
        now += later
        if what == "demoted" and one != other:
            noted += 1
            hindsight.demoted(one, 1, other, now)
        elif what == "came":
            hindsight.came(one, now)
        elif what == "forget":
            hindsight.forget(one)
        assert hindsight.chunks.total() + len(hindsight._open) <= noted
    for one in "abcd":
        hindsight.came(one, now)
    assert not hindsight._open and not hindsight._of
