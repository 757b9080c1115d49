"""The script of the comparison, and what it calls the same. The comparison itself is `kvpilot bench engine`."""

from __future__ import annotations

from kvpilot.bench.same_answers import LONGEST, Answer, compare, script


def test_equal_seeds_ask_equal_things_and_sessions_go_on() -> None:
    asked = script(60, 3)
    assert asked == script(60, 3) != script(60, 4)
    assert all(64 < len(request.prompt) <= LONGEST for request in script(2000, 1))
    assert sum(request.preempt for request in asked) == 12 and any(request.before for request in asked)
    longer = [
        later.prompt[: len(earlier.prompt)] == earlier.prompt
        for earlier in asked
        for later in asked
        if later is not earlier and later.session == earlier.session
    ]
    assert any(longer) and not all(longer)


def test_other_tokens_or_logprobs_are_told() -> None:
    one = Answer((1, 2), (-0.5, -0.25), 64)
    assert compare([one], [Answer((1, 2), (-0.5, -0.25005), 0)])["same"]
    assert not compare([one], [Answer((1, 2), (-0.5, -0.26), 0)])["same"]
    told = compare([one, one], [one, Answer((1, 3), (-0.5, -0.25), 0)])
    assert told["differing"] == [1] and not told["same"]
